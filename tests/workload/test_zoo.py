"""The zoo is the networks of the papers: exact counts of parameters, tensors and multiplications."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainplan.workload.datasets import DATASETS
from trainplan.workload.describe import describe
from trainplan.workload.load import load


def on_meta(name):
    with torch.device("meta"):
        return load(name).build()


def parameters(name):
    return sum(parameter.numel() for parameter in on_meta(name).parameters())


# Jansen (2020), appendix A: parameters, parameter tensors, multiplications of the forward pass of one image.
# ImageNet's totals are torchvision's, CIFAR-10's are pytorch-cifar's.
THESIS = [
    ("resnet18:mnist", 11_172_810, 62, 455_800_832),
    ("resnet18:cifar10", 11_173_962, 62, 555_422_720),
    ("resnet18:imagenet", 11_689_512, 62, 1_814_073_344),
    ("resnet18:highres", 11_689_512, 62, 9_475_444_736),
    ("resnet50:mnist", 23_519_690, 161, 1_046_819_840),
    ("resnet50:cifar10", 23_520_842, 161, 1_297_829_888),
    ("resnet50:imagenet", 25_557_032, 161, 4_089_184_256),
    ("resnet50:highres", 25_557_032, 161, 21_355_249_664),
    ("resnet152:mnist", 58_155_466, 467, 2_902_930_432),
    ("resnet152:cifar10", 58_156_618, 467, 3_722_137_600),
    ("resnet152:imagenet", 60_192_808, 467, 11_513_626_624),
    ("resnet152:highres", 60_192_808, 467, 60_144_173_056),
    ("vgg11:mnist,bn=0", 9_224_458, 18, 94_828_544),
    ("vgg11:cifar10,bn=0", 9_225_610, 18, 152_769_536),
    ("vgg11:imagenet", 132_863_336, 22, 7_609_090_048),
    ("vgg11:highres", 132_863_336, 22, 39_231_324_160),
    ("vgg16:mnist,bn=0", 14_718_666, 28, 205_125_632),
    ("vgg16:cifar10,bn=0", 14_719_818, 28, 313_201_664),
    ("vgg16:imagenet", 138_357_544, 32, 15_470_264_320),
    ("vgg16:highres", 138_357_544, 32, 80_301_948_928),
    ("mobilenetv2:mnist", 2_296_346, 173, 75_564_160),
    ("mobilenetv2:cifar10", 2_296_922, 173, 91_154_944),
    ("mobilenetv2:imagenet", 3_504_872, 158, 300_774_272),
    ("mobilenetv2:highres", 3_504_872, 158, 1_565_984_768),
]


@pytest.mark.parametrize(("name", "count", "tensors", "multiplications"), THESIS)
def test_networks_of_the_thesis(name, count, tensors, multiplications):
    model = on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert len(list(model.parameters())) == tensors
    shape = DATASETS[load(name).dataset].shape
    with FlopCounterMode(display=False) as flops:
        output = model(torch.empty(2, *shape, device="meta"))
    assert flops.get_total_flops() == 2 * 2 * multiplications  # two samples, a multiplication and an addition each
    assert output.shape == (2, DATASETS[load(name).dataset].classes)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vgg11:mnist", 9_229_962),
        ("vgg11:cifar10", 9_231_114),
        ("vgg16:mnist", 14_727_114),
        ("vgg16:cifar10", 14_728_266),
        ("vgg11:imagenet,bn=1", 132_868_840),
        ("vgg16:highres,bn=1", 138_365_992),
        ("mobilenetv2:mnist,block=torchvision", 2_236_106),
        ("mobilenetv2:cifar10,block=torchvision", 2_236_682),
        ("mobilenetv2:imagenet,block=cifar", 3_564_680),
        ("resnet34:imagenet", 21_797_672),  # torchvision's
        ("resnet101:imagenet", 44_549_160),
        ("vgg13:imagenet", 133_047_848),
        ("vgg19:imagenet", 143_667_240),
        ("vgg19:imagenet,bn=1", 143_678_248),
        ("resnet34:cifar10", 21_282_122),  # pytorch-cifar's
        ("resnet101:cifar10", 42_512_970),
        ("vgg19:cifar10", 20_040_522),
        ("resnet34:mnist", 21_282_122 - 2 * 64 * 9),
        ("vgg19:mnist", 20_040_522 - 2 * 64 * 9),
    ],
)
def test_variants(name, count):
    assert parameters(name) == count


def test_parameter_names_are_torchvisions():
    resnet = dict(on_meta("resnet50:imagenet").state_dict())
    assert {"conv1.weight", "layer1.0.downsample.1.running_var", "layer4.2.bn3.bias", "fc.weight"} <= resnet.keys()
    assert {"features.28.weight", "classifier.6.bias"} <= on_meta("vgg16:imagenet").state_dict().keys()
    mobilenet = on_meta("mobilenetv2:imagenet").state_dict()
    names = {"features.0.0.weight", "features.1.conv.1.weight", "features.18.1.running_mean", "classifier.1.weight"}
    assert names <= mobilenet.keys()
    assert mobilenet["features.17.conv.0.0.weight"].shape == (960, 160, 1, 1)


def test_a_step_trains_every_parameter():
    for name in ("resnet18:mnist", "mobilenetv2:mnist", "vgg11:mnist"):
        workload = load(name)
        torch.manual_seed(0)
        model = workload.build()
        optimizer = workload.optimizer(model.parameters())
        batch = workload.inputs(2, 0)
        loss = workload.loss.function(model(*batch.args), batch.targets)
        loss.backward()
        optimizer.step()
        assert math.isfinite(loss.item()), name
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_initial_values_are_torchvisions_on_large_images_and_torchs_on_small_ones():
    torch.manual_seed(0)
    stem = load("resnet18:imagenet").build().conv1.weight
    assert stem.std().item() == pytest.approx(math.sqrt(2 / (64 * 49)), rel=0.05)  # normal, fan-out
    small = load("resnet18:cifar10").build().conv1.weight
    bound = 1 / math.sqrt(3 * 9)
    assert small.abs().max().item() <= bound  # uniform
    assert small.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    head = load("mobilenetv2:imagenet").build().classifier[1]
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not head.bias.any()


def test_dropout_is_an_option():
    drops = [m.p for m in on_meta("vgg11:imagenet").modules() if isinstance(m, torch.nn.Dropout)]
    assert drops == [0.5, 0.5]
    assert [m.p for m in on_meta("vgg11:cifar10,dropout=0.3").modules() if isinstance(m, torch.nn.Dropout)] == [0.3]
    assert on_meta("mobilenetv2:imagenet,dropout=0").classifier[0].p == 0


# -- GPT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("", 124_439_808),  # GPT-2
        ("layers=24,hidden=1024,heads=16,seq=1024,vocab=50257", 354_823_168),
        ("layers=48,hidden=1600,heads=25", 1_557_611_200),
        ("layers=2,hidden=8,heads=2,seq=4,vocab=11,mlp=16", 11 * 8 + 4 * 8 + 2 * (4 * 64 + 2 * 128 + 9 * 8 + 16) + 16),
    ],
)
def test_gpt_by_shape(shape, count):
    assert parameters(f"gpt:{shape}") == count


def test_gpt_is_causal_tied_and_loses_what_chance_loses():
    workload = load("gpt:layers=2,hidden=32,heads=4,seq=8,vocab=50")
    torch.manual_seed(0)
    model = workload.build().double()
    assert model.lm_head.weight is model.wte.weight
    batch = workload.inputs(3, 1)
    (ids,) = batch.args
    assert torch.equal(ids[:, 1:], batch.targets[:, :-1])  # each target is the next token
    out = model(ids)
    assert workload.loss.function(out, batch.targets).item() == pytest.approx(math.log(50), rel=0.02)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    assert torch.equal(model(changed)[:, :5], out[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], out[:, 5:])


def test_gpt_equals_transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    ours = load("gpt:layers=2,hidden=32,heads=4,seq=16,vocab=40").build().double().eval()
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=40)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    weights = {}
    for name, value in ours.state_dict().items():
        linear = any(part in name for part in ("c_attn.w", "c_proj.w", "c_fc.w"))  # stored the other way round there
        weights[name if name.startswith("lm_head") else f"transformer.{name}"] = value.T if linear else value
    theirs.load_state_dict(weights, strict=True)
    ids = torch.randint(40, (3, 16))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-9, atol=1e-9)


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = load("gpt:layers=8,hidden=64,heads=4,seq=8,vocab=100").build()
    assert model.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.h[3].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_description():
    described = describe(load("gpt:layers=2,hidden=32,heads=4,seq=8,vocab=50,batch=4"))
    assert described.inputs == "8 int64"
    assert described.input_bytes == 8 * 8 * 2
    assert described.parameter_bytes == 4 * described.parameters
    assert "batch 4" in str(described)
    frozen = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    frozen[0].requires_grad_(False)
    other = describe(load(frozen, inputs=(torch.zeros(1, 4), torch.zeros(1, 2)), loss="mse"))
    assert (other.parameters, other.trainable, other.tensors) == (30, 10, 4)
    assert "30 parameters in 4 tensors, of which 10 are trained" in str(other)
