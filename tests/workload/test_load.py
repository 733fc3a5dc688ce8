"""Names: what they load, that they come back the same, and what is said when they are wrong."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainplan.errors import InputError, ModelError
from trainplan.workload.batch import tensors
from trainplan.workload.datasets import DATASETS
from trainplan.workload.load import load
from trainplan.workload.losses import cross_entropy, token_cross_entropy
from trainplan.workload.workload import Batch

CANONICAL = [
    ("resnet50:cifar10", "resnet50:cifar10"),
    ("ResNet-50 : CIFAR-10".replace(" ", ""), "resnet50:cifar10"),
    ("mobilenet_v2:ImageNet", "mobilenetv2:imagenet"),
    ("vgg11:cifar10,bn=1", "vgg11:cifar10"),
    ("vgg11:cifar10,bn=no,batch=64", "vgg11:cifar10,bn=0"),
    ("vgg16:imagenet,batch=256,bn=true", "vgg16:imagenet,bn=1,batch=256"),
    ("resnet18:mnist,lr=1e-2", "resnet18:mnist"),
    ("resnet18:mnist,optimizer=adamw", "resnet18:mnist,optimizer=adamw"),
    ("resnet18:mnist,lr=0.001,optimizer=adamw", "resnet18:mnist,optimizer=adamw"),
    ("resnet18:mnist,clip_norm=1,samples_per_epoch=1000", "resnet18:mnist,samples_per_epoch=1000,clip_norm=1"),
    ("gpt", "gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50257"),
    ("gpt:hidden=64,heads=4", "gpt:layers=12,hidden=64,heads=4,seq=1024,vocab=50257"),
    (
        "gpt,heads=4,dropout=0.1,mlp=3072,hidden=768",
        "gpt:layers=12,hidden=768,heads=4,seq=1024,vocab=50257,dropout=0.1",
    ),
]


@pytest.mark.parametrize(("text", "name"), CANONICAL)
def test_a_canonical_name_brings_the_workload_back(text, name):
    workload = load(text)
    assert workload.name == name
    again = load(workload.name)
    assert again == workload
    assert pickle.loads(pickle.dumps(workload)) == workload


@pytest.mark.parametrize(
    ("name", "assumed"),
    [
        ("resnet18:cifar10", False),  # the data set says
        ("gpt:layers=2,hidden=64,heads=4", True),
        ("gpt:layers=2,hidden=64,heads=4,samples_per_epoch=5", False),
        ("examples/net.py:build", False),
        ("tests/engine/user_model.py:build", True),
        ("tests/engine/user_model.py:build,samples_per_epoch=5", False),
    ],
)
def test_an_epoch_that_nobody_gave_is_assumed(name, assumed, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    workload = load(name)
    assert workload.epoch_assumed is assumed
    assert load(workload, samples_per_epoch=7).epoch_assumed is False


def test_overrides_are_options():
    workload = load("vgg11:cifar10", bn=False, batch=8, lr=0.5)
    assert workload.name == "vgg11:cifar10,bn=0,batch=8,lr=0.5"
    assert workload == load(workload.name)
    assert load("vgg11:cifar10,batch=16", batch=8).batch == 8


def test_overrides_that_are_functions_replace_the_field():
    def optimizer(parameters):
        return torch.optim.Adagrad(parameters, lr=0.25)

    loss = cross_entropy(label_smoothing=0.1)
    workload = load("resnet18:cifar10", optimizer=optimizer, loss=loss)
    assert (workload.name, workload.optimizer, workload.loss) == ("resnet18:cifar10", optimizer, loss)
    assert load(workload, clip_norm=1.0).clip_norm == 1.0
    with pytest.raises(InputError, match=r"no such field. Try batch"):
        load(workload, bach=3)


@pytest.mark.parametrize("name", ["resnet18:mnist", "vgg11:cifar10", "mobilenetv2:imagenet", "resnet18:highres"])
def test_defaults_are_the_suites(name):
    workload = load(name)
    data = DATASETS[workload.dataset]
    assert (workload.batch, workload.samples_per_epoch) == (data.batch, data.training)
    (group,) = workload.optimizer([nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (data.lr, data.momentum, data.weight_decay)


def test_optimizers_by_name():
    parameters = [nn.Parameter(torch.zeros(1))]
    adamw = load("gpt").optimizer(parameters)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["weight_decay"] == 0.1
    sgd = load("gpt:optimizer=sgd,lr=0.5").optimizer(parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]) == (0.5, 0.9)
    with pytest.raises(InputError, match="only sgd has momentum"):
        load("gpt:momentum=0.9")


def test_inputs_have_shape_range_and_seed():
    workload = load("resnet18:cifar10")
    batch = workload.inputs(6, 3)
    assert batch.args[0].shape == (6, 3, 32, 32)
    assert batch.targets.max() < 10
    assert torch.equal(batch.args[0], workload.inputs(6, 3).args[0])
    assert not torch.equal(batch.args[0], workload.inputs(6, 4).args[0])
    with torch.device("meta"):  # inputs are real, wherever models are being built
        assert workload.inputs(1, 0).args[0].device.type == "cpu"
        assert load("gpt:seq=4").inputs(1, 0).targets.device.type == "cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet51:cifar10", "'resnet51' is not in the zoo, and no module. Try resnet50:cifar10 or resnet18:cifar10"),
        ("resnet18:cifar100", "data set 'cifar100' is not in the table. Try resnet18:cifar10"),
        ("resnet18", "does not say on which data set. Try resnet18:cifar10"),
        ("resnet18:cifar10,bacth=3", "no such option. Try batch"),
        ("resnet18:cifar10,batch=0", "must be at least 1. Try batch=64"),
        ("resnet18:cifar10,batch=many", "not a whole number"),
        ("resnet18:cifar10,batch=2,batch=3", "given twice"),
        ("resnet18:cifar10,fast", "not of the form key=value"),
        ("vgg11:cifar10,bn=maybe", "neither yes nor no"),
        ("mobilenetv2:cifar10,block=tv", "Try cifar, torchvision"),
        ("resnet18:cifar10,optimizer=adagrad", "not one of the words"),
        ("gpt:medium", "'medium' is not an option"),
        ("gpt:hidden=100,heads=12", "100 does not divide into 12 heads. Try heads=10"),
        ("gpt:laers=3", "Try layers"),
        ("module:Linear", "a name cannot bring back"),
        ("qqqq", "not a name that we know. Try resnet18:cifar10, gpt:"),
        ("nosuchpackage.models:make", "no module 'nosuchpackage'"),
    ],
)
def test_wrong_names(text, message):
    with pytest.raises(InputError, match=message):
        load(text)


def test_losses_say_what_their_mean_is_over():
    loss = token_cross_entropy()
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, -100, 4], [-100, -100, -100]])
    value = loss.function(logits, labels)
    assert torch.allclose(value, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert (loss.count(Batch(2, targets=labels)), loss.mean_over) == (2, "tokens")
    # Nothing counts: zero, with zero gradients, so that weighting it by 0 changes nothing.
    empty = loss.function(logits[1:], labels[1:])
    empty.backward()
    assert (empty.item(), loss.count(Batch(1, targets=labels[1:])), logits.grad.abs().max().item()) == (0, 0, 0)


# -- modules from Python -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.two(self.one(x)) * self.scale


def test_a_module_is_copied_and_on_meta_without_its_weights():
    model = Tied()
    workload = load(model, inputs=(torch.randn(4, 3), torch.randn(4, 3)), loss="mse", batch=6, lr=0.5, optimizer="sgd")
    built = workload.build()
    assert built is not model
    assert torch.equal(built.one.weight, model.one.weight)
    with torch.device("meta"):
        empty = workload.build()
    assert {p.device.type for p in (*empty.parameters(), *empty.buffers())} == {"meta"}
    assert empty.two.weight is empty.one.weight
    assert model.one.weight.device.type == "cpu"
    assert (workload.name, workload.batch) == ("module:Tied", 6)
    assert workload.optimizer(built.parameters()).param_groups[0]["lr"] == 0.5
    batch = workload.inputs(6, 1)
    assert batch.samples == 6
    assert torch.equal(batch.args[0][0], batch.args[0][4])  # the example's rows, over and over


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_module_that_cannot_be_copied_says_what_to_write():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))
    workload = load(model, inputs=(torch.randn(4, 3), torch.randn(4, 3)), loss="mse")
    with pytest.raises(
        ModelError, match=r"'0\.weight' is computed.*Try torch\.nn\.utils\.parametrizations\.weight_norm"
    ):
        workload.build()


def test_a_module_needs_inputs_and_loss():
    with pytest.raises(ModelError, match="no inputs"):
        load(Tied(), loss="mse")
    with pytest.raises(ModelError, match="no loss"):
        load(Tied(), inputs=torch.zeros(1, 3))
    with pytest.raises(InputError, match="Try cross_entropy"):
        load(Tied(), inputs=torch.zeros(1, 3), loss="cross_entrpy")
    with pytest.raises(InputError, match=r"no such field. Try samples_per_epoch"):
        load(Tied(), inputs=torch.zeros(1, 3), loss="mse", sample_per_epoch=3)
    with pytest.raises(InputError, match="must be at least 1"):
        load(Tied(), inputs=torch.zeros(1, 3), loss="mse", batch=0)
    with pytest.raises(InputError, match="neither a text nor"):
        load(42)
    with pytest.raises(InputError, match="sets that itself"):
        load(Tied(), inputs=torch.zeros(1, 3), loss="mse", optimizer=torch.optim.SGD, lr=0.1)


def test_inputs_may_take_samples_alone_and_are_seeded():
    workload = load(Tied(), inputs=lambda samples: torch.randn(samples, 3), loss="mse")
    state = torch.get_rng_state()
    one, two = workload.inputs(4, 7), workload.inputs(4, 7)
    assert torch.equal(one.args[0], two.args[0])
    assert not torch.equal(one.args[0], workload.inputs(4, 8).args[0])
    assert torch.equal(state, torch.get_rng_state())
    wrong = load(Tied(), inputs=lambda samples, seed: torch.zeros(samples + 1, 3), loss="mse")
    with pytest.raises(ModelError, match="the function gave 5"):
        wrong.inputs(4, 0)


def test_what_a_batch_shares_is_what_does_not_grow_with_it():
    def inputs(samples, seed):
        return {"x": torch.randn(samples, 3), "mask": torch.ones(8, 8), "two": torch.ones(2, 3)}, torch.ones(samples, 3)

    workload = load(Tied(), inputs=inputs, loss="mse")
    assert [workload.inputs(samples, 0).shared for samples in (1, 8)] == [{"kwargs[mask]", "kwargs[two]"}] * 2
    fixed = load(Tied(), inputs=lambda samples: (torch.randn(2, 3), torch.randn(2, 3)), loss="mse")
    with pytest.raises(ModelError, match="for 3 samples: the function gave 2"):
        fixed.inputs(3, 0)
    assert not fixed.inputs(2, 0).shared


def test_tables_and_names_need_no_torch():
    code = (
        "import sys, trainplan.workload.datasets, trainplan.workload.zoo, trainplan.workload.load,"
        " trainplan.workload.training\n"
        "assert trainplan.workload.datasets.dataset('mnist').classes == 10\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_tensor_of_a_batch_has_its_place():
    assert list(tensors(load("resnet18:mnist").inputs(1, 0))) == ["args[0]", "targets"]
