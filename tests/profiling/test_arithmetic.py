"""Profiles say in which precision products and convolutions ran, and how many FLOPs are in each."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from synthetic import chain
from tests.profiling.models import of
from trainplan.cluster.catalogue import device
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.predict.accuracy import own_precision
from trainplan.predict.speeds import speeds
from trainplan.profile.arithmetic import of_setting, runs_in
from trainplan.profile.estimate import estimate
from trainplan.profile.measure import measure
from trainplan.report.lines import profile_words


def network() -> nn.Module:
    """A convolution of 2·9·8·8·3·4 = 13,824 FLOPs and a product of 2·256·4 = 2,048."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))


def test_a_measured_profile() -> None:
    profile = measure(of(network(), (3, 8, 8)), samples=[2], repeats=1, verify=False)
    assert (profile.precision, profile.products_in, profile.convolutions_in) == ("fp32", "fp32", "fp32")
    assert profile.convolution_flops == 13_824
    assert profile.flops == 13_824 + 2_048


@pytest.mark.parametrize(("name", "convolutions"), [("A100-80", "tf32"), ("V100-32", "fp32"), ("TitanRTX", "fp32")])
def test_an_estimated_profile(name: str, convolutions: str) -> None:
    profile = estimate(of(network(), (3, 8, 8)), device(name), samples=[2])
    assert (profile.products_in, profile.convolutions_in) == ("fp32", convolutions)
    assert profile.convolution_flops == 13_824


def test_weights_in_half_precision() -> None:
    def inputs(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(samples, 8).bfloat16(), torch.zeros(samples).long()

    workload = of(nn.Linear(8, 4).bfloat16(), (8,), inputs=inputs)
    profile = measure(workload, samples=[2], repeats=1, verify=False)
    assert (profile.precision, profile.products_in) == ("bf16", "bf16")


class Widened(nn.Module):
    """Products in 16 bits, and then in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


def test_weights_of_several_types_are_named() -> None:
    """And what products ran in is not known, so no rule takes them for the one or the other."""
    profile = measure(of(Widened(), (8,)), samples=[2], repeats=1, verify=False)
    assert (profile.precision, profile.products_in, profile.convolutions_in) == ("mixed fp32 and bf16", "", "")
    assert ", eager, mixed fp32 and bf16, " in profile_words(profile)
    assert ", eager, mixed types, " in profile_words(replace(profile, precision=""))  # of an older file
    assert own_precision(profile, plan()) == "weights in mixed fp32 and bf16"


def test_of_weights_of_several_types_nobody_knows_how_fast_another_device_is() -> None:
    here, other = Device("cpu", 2 * 10**9, {}, 1e9), Device("gpu", 2 * 10**9, {"fp32": 1e12, "bf16": 1e13}, 1e9)
    there = Cluster("two", (Node("node", (here, other), Link("inside", 1e-4, 1e9)),), "gloo")
    with pytest.raises(PlanError, match=r"weights are of several types. Try devices of one kind"):
        speeds(chain(2, precision="mixed fp32 and bf16", products_in="", convolutions_in=""), there)


def test_torch_can_be_told_otherwise() -> None:
    """On a GPU with tensor cores convolutions run in tf32 unless told not to, products only if told to."""
    settings = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    assert [of_setting(setting, tensor_cores=True) for setting in settings] == ["fp32", "tf32"]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert of_setting(torch.backends.cuda.matmul.fp32_precision, tensor_cores=True) == "tf32"
        assert of_setting(torch.backends.cuda.matmul.fp32_precision, tensor_cores=False) == "fp32"
        # Whether this CPU multiplies in less than it is given, nobody tells us.
        assert runs_in(torch.device("cpu"), "fp32") == ("", "fp32")
    finally:
        torch.set_float32_matmul_precision(before)
