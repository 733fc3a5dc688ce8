"""Models that are known by their shape are those that capturing gives, and take no torch."""

import random

import pytest

import processor
from trainplan.profile.attention import Gpu
from trainplan.profile.estimate import estimate, traced
from trainplan.profile.family import known
from trainplan.profile.modelled import modelled
from trainplan.profile.repeated import same
from trainplan.workload.load import load

AGAIN = "what is traced has changed: run `python benchmarks/families.py gpt`"


def quietly(what, share):
    pass


def shape(seed: int) -> str:
    """Any GPT of a few layers."""
    draw = random.Random(seed)
    heads = draw.randint(2, 9)
    words = {
        "layers": draw.randint(4, 5),
        "hidden": heads * draw.randint(2, 33),
        "heads": heads,
        "seq": draw.randint(2, 65),
        "vocab": draw.randint(2, 999),
        "mlp": draw.randint(2, 513),
        "dropout": draw.choice([0.0, 0.1, 0.3]),
        "optimizer": draw.choice(["adamw", "adam", "sgd"]),
        "batch": draw.randint(1, 9),
    }
    return "gpt:" + ",".join(f"{key}={value}" for key, value in words.items())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_known_model_is_the_captured_one_number_by_number(seed):
    workload = load(shape(seed))
    found, captured = known(workload, gpu=True), modelled(workload, (), Gpu(), quietly)
    assert found is not None
    assert found.update == captured.update, AGAIN
    for known_trace, trace in zip(found.traces, captured.traces, strict=True):
        for one, other in zip(known_trace.blocks, trace.blocks, strict=True):
            assert one == other, AGAIN
    assert same(found, captured), AGAIN


@pytest.mark.parametrize(
    "words",
    [
        {"layers": 2},
        {"heads": 1},
        {"seq": 1},
        {"optimizer": "sgd", "momentum": 0},
        {"weight_decay": 0},
        {"attention": "eager"},
    ],
    ids=str,
)
def test_what_has_another_form_is_not_known(words):
    usual = {"layers": 4, "hidden": 8, "heads": 2, "seq": 4, "vocab": 9}
    assert known(load("gpt", **usual), gpu=True) is not None
    assert known(load("gpt", **usual | words), gpu=True) is None


def test_other_parts_and_other_devices_are_not_known():
    text = "gpt:layers=4,hidden=8,heads=2,seq=4,vocab=9"
    assert known(load(text), gpu=True) is not None
    assert known(load(text), gpu=False) is None
    assert known(load(text, loss="mse"), gpu=True) is None
    assert known(load(text, optimizer=lambda parameters: None), gpu=True) is None
    assert known(load("resnet18:cifar10"), gpu=True) is None


COLD = """
import sys
from trainplan import predict
model = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=50257"
found = predict(model, plan="pp=8 schedule=1f1b micro=512", cluster="64x8xA100-80", batch=512)
assert found.prediction.step_s > 0
assert "torch" not in sys.modules
"""


def test_a_model_of_175_billion_parameters_is_predicted_from_a_cold_start_without_torch():
    """In three seconds of the processor, if that is not slow today."""
    assert processor.taken(COLD) < 3.0 * processor.slower()


def test_the_cluster_s_devices_price_a_known_model_as_a_captured_one():
    from trainplan.cluster.catalogue import device
    from trainplan.profile.device.known import model_of
    from trainplan.profile.estimate import priced
    from trainplan.profile.roofline import speed_of

    workload = load("gpt:layers=4,hidden=64,heads=4,seq=32,vocab=99,batch=4")
    place = device("A100-80")
    profile = estimate(workload, place)
    speed = speed_of(place, "fp32", model_of(place))
    assert profile.blocks == priced(traced(workload, [1, 2, 4], True), place, speed, [1, 2, 4]).blocks
    assert profile.flops > 0
    assert profile.parameter_count == sum(p.numel() for p in workload.build().parameters())
