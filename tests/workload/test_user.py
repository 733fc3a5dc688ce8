"""Workloads from users' own files and packages."""

import textwrap

import pytest
import torch
from torch import nn

from trainplan.errors import InputError, ModelError
from trainplan.workload.load import load
from trainplan.workload.workload import Loss

GOOD = """
import torch
from torch import nn
import widths
from .sizes import CLASSES

def classifier(width=widths.WIDTH):
    return {
        "model": nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, CLASSES)),
        "inputs": lambda samples, seed: (torch.randn(samples, 20), torch.randint(CLASSES, (samples,))),
        "loss": "cross_entropy",
        "batch": 256,
    }

def large(width: int):
    def build():
        return nn.Linear(20, width)
    return {"build": build, "inputs": (torch.zeros(1, 20), torch.zeros(1, width)), "loss": nn.MSELoss(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.125), "samples_per_epoch": 7}

def triple():
    return nn.Linear(3, 3), torch.zeros(2, 3), lambda output, targets: output.sum()

def ready():
    from trainplan.workload.load import load
    return load("resnet18:mnist", batch=3)

def free(**options):
    return nn.Linear(int(options["size"]), 1), torch.zeros(1, int(options["size"])), "mse"

def breaks():
    layer = nn.Linear(2, 2)
    return layer(torch.zeros(1, 3))

def returns_a_model():
    return nn.Linear(2, 2)

def returns_a_pair():
    return nn.Linear(2, 2), None

def has_no_model():
    return {"inputs": torch.zeros(1), "loss": "mse"}

def misspelt():
    return {"model": nn.Linear(2, 2), "inpts": torch.zeros(1, 2), "loss": "mse"}

def builds_nothing():
    return {"build": lambda: 3, "inputs": torch.zeros(1), "loss": "mse"}

def model_is_a_word():
    return "resnet18", torch.zeros(1), "mse"

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(GOOD)
    (tmp_path / "widths.py").write_text("WIDTH = 64")
    (tmp_path / "sizes.py").write_text("CLASSES = 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    for name in ("widths", "sizes", "models"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


def count(workload):
    return sum(parameter.numel() for parameter in workload.build().parameters())


def test_a_function_that_returns_a_dict(folder):
    workload = load("models.py:classifier")
    assert workload.name == "models.py:classifier"
    assert (workload.batch, workload.samples_per_epoch) == (256, 100_000)
    assert count(workload) == 20 * 64 + 64 + 64 * 3 + 3
    assert isinstance(workload.optimizer([torch.nn.Parameter(torch.zeros(1))]), torch.optim.AdamW)
    batch = workload.inputs(4, 0)
    assert workload.loss.function(workload.build()(*batch.args), batch.targets).isfinite()
    assert workload.loss.count(batch) == 4


def test_it_is_built_again_wherever_it_is_asked_for(folder):
    workload = load("models.py:classifier")
    with torch.device("meta"):
        assert {parameter.device.type for parameter in workload.build().parameters()} == {"meta"}
    torch.manual_seed(3)
    first = workload.build()
    torch.manual_seed(3)
    second = workload.build()
    assert first is not second
    assert torch.equal(first[0].weight, second[0].weight)


def test_loading_leaves_random_numbers_alone(folder):
    state = torch.get_rng_state()
    load("models.py:classifier")
    assert torch.equal(state, torch.get_rng_state())


def test_options_go_to_the_function_or_to_the_training(folder):
    workload = load(f"{folder}/models.py:classifier,width=8,batch=32", clip_norm=1)
    assert workload.name == f"{folder}/models.py:classifier,width=8,batch=32,clip_norm=1"
    assert (workload.batch, workload.clip_norm, count(workload)) == (32, 1, 20 * 8 + 8 + 8 * 3 + 3)
    again = load(workload.name)
    assert (again.name, again.batch, again.build) == (workload.name, workload.batch, workload.build)
    assert load("models.py:classifier,width=64,batch=256").name == "models.py:classifier"


def test_a_loss_that_would_be_trained_is_refused_and_one_whose_weights_are_fixed_is_not():
    """No optimizer, exchange or checkpoint would have its parameters."""

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.spread = nn.Parameter(torch.zeros(()))

        def forward(self, output, targets):
            return nn.functional.mse_loss(output, targets) * torch.exp(-self.spread) + self.spread

    given = {"inputs": (torch.zeros(2, 3), torch.zeros(2, 1)), "batch": 2}
    with pytest.raises(InputError, match=r"it has parameters of its own \(spread\) .*the model's.*requires_grad_"):
        load(nn.Linear(3, 1), loss=Learned(), **given)
    with pytest.raises(InputError, match="parameters of its own"):
        load(nn.Linear(3, 1), loss=Loss(Learned(), lambda batch: batch.samples), **given)
    assert load(nn.Linear(3, 1), loss=Learned().requires_grad_(False), **given).batch == 2


def test_other_forms(folder):
    large = load("models.py:large,width=5")
    assert (large.samples_per_epoch, count(large)) == (7, 105)
    assert large.optimizer(large.build().parameters()).param_groups[0]["lr"] == 0.125
    named = load("models.py:large,width=5,optimizer=adam")
    assert named.name == "models.py:large,width=5,optimizer=adam"
    assert isinstance(named.optimizer(named.build().parameters()), torch.optim.Adam)
    triple = load("models.py:triple")
    assert triple.inputs(5, 0).samples == 5
    ready = load("models.py:ready,batch=9")
    assert (ready.name, ready.batch, ready.dataset) == ("models.py:ready,batch=9", 9, "mnist")
    assert count(load("models.py:free,size=4")) == 5


def test_a_package(folder):
    (folder / "widths_package").mkdir()
    (folder / "widths_package" / "__init__.py").write_text("")
    (folder / "widths_package" / "size.py").write_text("SIZE = 3")
    (folder / "widths_package" / "models.py").write_text(
        "import torch\nfrom .size import SIZE\n"
        "def make(): return torch.nn.Linear(SIZE, 1), (torch.zeros(1, SIZE), torch.zeros(1, 1)), 'mse'\n"
    )
    by_name = load("widths_package.models:make", batch=4)
    assert (by_name.name, count(by_name)) == ("widths_package.models:make,batch=4", 4)
    by_path = load("widths_package/models.py:make")  # the file of a package is that package's module
    (folder / "widths_package" / "script.py").write_text("import size\nfrom .models import make")
    assert count(load("widths_package/script.py:make")) == 4
    assert by_path.build.options["function"].__module__ == "widths_package.models"


def test_a_file_that_changed_is_read_again(folder):
    assert count(load("models.py:triple")) == 12
    (folder / "models.py").write_text(
        GOOD.replace("nn.Linear(3, 3), torch.zeros(2, 3)", "nn.Linear(3, 4), torch.zeros(2, 3)")
    )
    assert count(load("models.py:triple")) == 16


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("modles.py:classifier", InputError, r"no such file in .*Try models.py"),
        ("models.py:clasifier", InputError, "no such function in it. Try classifier"),
        ("models.py:NUMBER", InputError, "NUMBER is a int, not a function"),
        ("models.py", InputError, "does not say which function. Try models.py:classifier"),
        ("models.py:classifier,widht=3", InputError, "neither the function nor training has it. Try width"),
        ("models.py:large", InputError, "missing a required argument: 'width'"),
        ("models.py:large,width=5,lr=3", InputError, "it has its own optimizer"),
        ("models.py:breaks", ModelError, r"it raised RuntimeError: mat1 and mat2.*models.py:33\)"),
        ("models.py:returns_a_model", ModelError, "returned Linear. Try a dict"),
        ("models.py:returns_a_pair", ModelError, "returned tuple of 2 items. Try a dict"),
        ("models.py:has_no_model", ModelError, "has no model"),
        ("models.py:misspelt", InputError, "'inpts' of workload .*no such field. Try inputs"),
        ("models.py:model_is_a_word", ModelError, "its model is a str"),
    ],
)
def test_what_can_go_wrong(folder, text, kind, message):
    with pytest.raises(kind, match=message):
        load(text)


def test_what_can_go_wrong_later(folder):
    with pytest.raises(ModelError, match=r"it gave a int. Try an nn.Module"):
        load("models.py:builds_nothing").build()


def test_files_that_do_not_import(folder):
    (folder / "syntax.py").write_text("def make(:\n    pass\n")
    (folder / "fails.py").write_text("import torch\n\nraise KeyError('gone')\n")
    (folder / "needs.py").write_text("import no_such_library\n")
    with pytest.raises(ModelError, match=r"SyntaxError.*syntax.py:1\)"):
        load("syntax.py:make")
    with pytest.raises(ModelError, match=r"KeyError: 'gone' .*fails.py:3\)"):
        load("fails.py:make")
    with pytest.raises(ModelError, match=r"No module named 'no_such_library' .*needs.py:1\)"):
        load("needs.py:make")
    with pytest.raises(ModelError, match=r"No module named 'no_such_library'"):
        load("needs:make")


def test_the_example_in_the_documentation_runs(folder):
    from trainplan.workload import user

    text = user.__doc__.partition("    import torch")[2].partition("\n\n|")[0]
    (folder / "example.py").write_text(textwrap.dedent("    import torch" + text))
    assert count(load("example.py:classifier,width=2")) == 20 * 2 + 2 + 2 * 3 + 3
