"""Estimated profiles: closed forms, published timings, and the one thing of the zoo that does not fit."""

import time
from dataclasses import replace

import psutil
import pytest
from torch import nn

from trainplan.cluster.catalogue import device
from trainplan.cluster.cluster import Device
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.plan.plan import plan
from trainplan.predict.predict import predict
from trainplan.profile.bounds import in_half
from trainplan.profile.estimate import estimate, traced
from trainplan.profile.gap import two_lanes
from trainplan.profile.measure import measure
from trainplan.profile.op import Op
from trainplan.profile.roofline import (
    CONVOLUTION,
    CONVOLUTION_FUSED,
    KERNEL_S,
    MISALIGNED,
    PRODUCT,
    STREAM,
    run_seconds,
    speed_of,
)
from trainplan.workload.load import load

from . import models

TOY = Device("toy", 2**34, {"fp32": 1e12}, 1e11)


def step_seconds(profile, place=0):
    passes = [
        (sum(b.forward_s[place] for b in profile.blocks), sum(b.forward_issue_s[place] for b in profile.blocks)),
        (sum(b.backward_s[place] for b in profile.blocks), sum(b.backward_issue_s[place] for b in profile.blocks)),
        (sum(b.update_s for b in profile.blocks), sum(b.update_issue_s for b in profile.blocks)),
    ]
    return two_lanes(passes)


def test_a_large_linear_layer_takes_its_arithmetic():
    profile = estimate(models.of(nn.Linear(2048, 4096), (2048,), classes=4096), TOY, samples=[1024])
    product = 2 * 1024 * 2048 * 4096
    assert profile.flops == product / 1024
    assert profile.kind == "estimated"
    assert profile.total("forward_s", 0, 1, 1024) == pytest.approx(product / (1e12 * PRODUCT), rel=0.05)
    # The model's input needs no gradient: one product, not two.
    assert profile.total("backward_s", 0, 1, 1024) == pytest.approx(product / (1e12 * PRODUCT), rel=0.1)


def test_a_small_operator_takes_its_bytes_or_a_kernel():
    speed = speed_of(TOY, "fp32")
    assert run_seconds(Op("add", 0.0, 8_000_000, 4_000_000), speed) == pytest.approx(12e6 / (1e11 * STREAM) + KERNEL_S)
    assert run_seconds(Op("add", 0.0, 8, 4), speed) == pytest.approx(KERNEL_S, rel=0.01)


def test_an_odd_dimension_slows_tensor_cores_only():
    def product(columns: int) -> Op:
        return Op("mm", 2.0 * 4096 * 4096 * columns, 0, 0, (4096, 4096, columns))

    tensor, plain = speed_of(device("A100-80"), "tf32"), speed_of(device("A100-80"), "fp32")
    ratios = [run_seconds(product(50257), speed) / run_seconds(product(50256), speed) for speed in (tensor, plain)]
    assert ratios == pytest.approx([1 / MISALIGNED, 1.0], rel=0.01)


def test_sizes_that_were_not_traced_lie_on_the_line():
    workload = load("resnet18:cifar10")
    profile = estimate(workload, device("T4"), samples=[1, 3, 8])
    direct = estimate(workload, device("T4"), samples=[8])
    for block, same in zip(profile.blocks, direct.blocks, strict=True):
        assert block.saved_bytes[2] == same.saved_bytes[0]
        assert block.forward_s[2] == pytest.approx(same.forward_s[0])
        assert list(block.backward_s) == sorted(block.backward_s)
        assert block.flops == same.flops


def test_bytes_of_an_estimate_are_those_of_a_measurement():
    workload = load(models.GPT)
    guess = estimate(workload, device("cpu"), samples=[2, 4])
    truth = measure(workload, samples=[2, 4], repeats=1, verify=False)
    for one, other in zip(guess.blocks, truth.blocks, strict=True):
        assert one.saved_bytes == other.saved_bytes
        assert one.flops == other.flops
        # What a kernel allocates for itself is not seen (here, that of attention).
        assert one.forward_workspace_bytes == pytest.approx(other.forward_workspace_bytes, rel=0.01)
        assert 0.3 * other.backward_workspace_bytes[0] <= one.backward_workspace_bytes[0]
        assert one.backward_workspace_bytes[0] <= 1.2 * other.backward_workspace_bytes[0]
    assert guess.crossings == truth.crossings
    assert guess.state_bytes_per_parameter == truth.state_bytes_per_parameter
    assert [p.name for p in guess.parameters] == [p.name for p in truth.parameters]
    # On a CPU, the host is the device.
    assert not any(block.forward_issue_s[0] for block in guess.blocks)


def test_a_layer_that_is_run_again_lacks_its_last_product():
    """A third of the arithmetic of a transformer's layer with short sequences; the layer that a norm follows in
    its block, and convolutions that batch norm reads, are run whole."""
    workload = load("gpt:layers=3,hidden=256,heads=4,seq=64,vocab=500")
    guess = estimate(workload, device("H200"), samples=[2, 4])
    truth = measure(workload, samples=[2, 4], repeats=3, verify=False)
    by_name = {block.name: block for block in guess.blocks}
    layer, last, head = by_name["h.0"], by_name["h.2"], by_name["lm_head"]
    assert layer.tail_flops == 2 * 64 * 256 * 1024
    assert layer.recompute_s[0] < 0.9 * layer.forward_s[0]
    assert layer.recompute_issue_s[0] < layer.forward_issue_s[0]
    assert [last.tail_flops, head.tail_flops] == [0, 0]  # the last norm is in one block with the last layer
    assert (last.recompute_s, head.recompute_s) == (last.forward_s, head.forward_s)
    assert [block.tail_flops for block in truth.blocks] == [block.tail_flops for block in guess.blocks]
    assert [bool(block.recompute_s) for block in truth.blocks] == [bool(block.tail_flops) for block in guess.blocks]
    assert not any(block.tail_flops for block in estimate(load("resnet18:cifar10"), device("T4"), samples=[2]).blocks)


def test_a_plan_that_recomputes_takes_what_is_run_again():
    """One device: the step is longer by just that, and by nothing where no block needs to compute anything again."""
    profile = estimate(load("gpt:layers=3,hidden=768,heads=12,seq=512,vocab=500"), device("T4"), samples=[8])
    free = replace(
        profile, blocks=tuple(replace(b, recompute_s=(0.0,), recompute_issue_s=(0.0,)) for b in profile.blocks)
    )
    here = cluster("1xT4")
    plain, whole, nothing = (
        predict(plan(blocks=len(one.blocks), recompute=way), one, here, batch=8).step_s
        for one, way in ((profile, "none"), (profile, "full"), (free, "full"))
    )
    again = sum(block.recompute_s[0] for block in profile.blocks)
    assert whole - nothing == pytest.approx(again, rel=0.05)
    assert nothing == pytest.approx(plain, rel=0.05)


def test_small_work_on_a_gpu_is_bound_by_the_host():
    profile = estimate(load(models.GPT), device("H200"), samples=[1, 2])
    run, issue = (sum(getattr(b, name)[0] for b in profile.blocks) for name in ("backward_s", "backward_issue_s"))
    assert issue > 3 * run
    assert step_seconds(profile, 0) == pytest.approx(step_seconds(profile, 1), rel=0.02)


@pytest.mark.parametrize(
    ("name", "batch", "cold", "hot"),
    [
        ("resnet18", 128, 1.02, 1.28),
        pytest.param("resnet50", 64, 3.52, 3.56, marks=pytest.mark.slow),
        pytest.param("resnet152", 32, 7.91, 8.34, marks=pytest.mark.slow),
    ],
)
def test_resnets_on_a_titan_rtx(name, batch, cold, hot):
    """Milliseconds an image in fp32, published (cgnorthcutt/cnn-gpu-benchmarks@eb762d8).

    The efficiency of convolutions in the roofline is from ResNets on this card, so this checks the sum, not the
    constant.
    """
    titan = replace(device("TitanRTX"), efficiency={"searched": 1.0})  # its script sets cudnn.benchmark
    profile = estimate(load(f"{name}:imagenet"), titan, samples=[batch])
    assert 0.85 * cold < 1e3 * step_seconds(profile) / batch < 1.15 * hot


def test_convolutions_have_fewer_products_where_cudnn_takes_winograds():
    """In fp32 without tensor cores: by its rule of thumb in one kernel, forward and for the input; if it tries all, in
    several steps, for the weights as well."""
    titan = device("TitanRTX")
    thumb, tried = (
        speed_of(replace(titan, efficiency={"searched": searched}), "fp32") for searched in (0.0, 1.0)
    )  # fmt: skip
    shape = (64, 256, 256, 28 * 28, 9, 1, 1)
    once, size = 2.0 * 64 * 28 * 28 * 256 * 256 * 9, 4 * 64 * 28 * 28 * 256
    forward = Op("convolution", once, size, size, shape)
    backward = Op("convolution_backward", 2 * once, 2 * size, size, shape)
    strided = replace(forward, shape=(*shape[:5], 2, 1))
    plain = run_seconds(strided, thumb)
    assert plain == run_seconds(strided, tried)
    assert run_seconds(forward, thumb) == pytest.approx(plain * (4 / 9 / CONVOLUTION_FUSED) * CONVOLUTION, rel=0.01)
    assert run_seconds(backward, thumb) == pytest.approx(plain + run_seconds(forward, thumb), rel=0.01)
    assert run_seconds(forward, tried) < 0.7 * run_seconds(forward, thumb)
    assert run_seconds(backward, tried) == pytest.approx(2 * run_seconds(forward, tried), rel=0.01)
    tensor_cores = speed_of(device("A100-80"), "tf32")
    assert run_seconds(forward, tensor_cores) == pytest.approx(run_seconds(strided, tensor_cores))


@pytest.mark.parametrize("asked", [0.5, 2.0, -1.0])
def test_cudnn_tries_its_algorithms_or_does_not(asked):
    with pytest.raises(InputError, match=r"efficiency searched"):
        speed_of(replace(device("TitanRTX"), efficiency={"searched": asked}), "fp32")


def test_a_gpt_of_a_billion_parameters_takes_seconds_and_no_memory():
    started, before = time.perf_counter(), psutil.Process().memory_info().rss
    workload = load("gpt:layers=24,hidden=1792,heads=28,seq=1024")
    profile = estimate(workload, device("A100-80"), samples=[8])
    assert profile.parameter_count == pytest.approx(1.017e9, rel=0.01)
    # 6 FLOP for every parameter of a product and token, and attention over half the sequence forward and back.
    tokens = 8 * 1024
    products = profile.parameter_count - 1024 * 1792
    assert 8 * profile.flops == pytest.approx(2 * products * tokens + 24 * 4 * 1024 * 1792 * tokens, rel=0.01)
    assert psutil.Process().memory_info().rss - before < 1e9
    assert time.perf_counter() - started < 40  # some five seconds alone


HIGHRES = {"resnet152": False, "vgg16": True}
ALL = {
    f"{network}:{data}": (network, data) != ("resnet152", "highres")
    for network in ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
    for data in ("mnist", "cifar10", "imagenet", "highres")
}


def fits_a_titan(name: str) -> bool:
    batch = {"mnist": 128, "cifar10": 64, "imagenet": 32, "highres": 32}[name.split(":")[1]]
    titan = cluster("1xTitanRTX")
    profile = estimate(load(name), titan.device(0), samples=[batch])
    return predict(plan(blocks=len(profile.blocks)), profile, titan, batch=batch).fits


@pytest.mark.parametrize("network", HIGHRES)
def test_what_fits_a_titan_rtx_at_the_largest_images(network):
    """Measured there with 24 GiB and batches of 32: ResNet-152 ran out of memory, and nothing else."""
    assert fits_a_titan(f"{network}:highres") == HIGHRES[network]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_of_the_whole_zoo_one_does_not_fit(name):
    assert fits_a_titan(name) == ALL[name]


def test_refusals():
    with pytest.raises(InputError, match="fp32 or tf32"):
        estimate(models.skip(), device("H200"), precision="bf16")
    with pytest.raises(InputError, match="the device has fp32"):
        estimate(models.skip(), device("V100-16"), precision="tf32")
    with pytest.raises(InputError, match="at least 1"):
        estimate(models.skip(), device("H200"), samples=[])


def test_attention_is_what_the_device_runs():
    """In bf16 a Turing has no kernel of its own for attention; an Ampere has."""
    text = "gpt:layers=1,hidden=32,heads=2,seq=16,vocab=64,dropout=0"
    for name, fused in (("A100-80", True), ("T4", False)):
        found = traced(in_half(load(text), "bf16"), (2, 4), True, capability=device(name).capability)
        names = {op.name for block in found.at(2).blocks for op in block.forward}
        assert ("attention" in names, "_safe_softmax" in names) == (fused, not fused)
