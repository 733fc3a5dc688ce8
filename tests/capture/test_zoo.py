"""The models that we ship, themselves: captured, cut at random legal places, and equal to the model."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.verify import run_split
from trainplan.workload.load import load

from .cases import in_type
from .test_equality import DOUBLE, assert_same, eager, stages_of

# Every family, both shapes of its stem, and each kind of its blocks; the deep ones once in a while.
SHIPPED = [
    "resnet18:mnist", "resnet34:cifar10", "resnet50:cifar10", "resnet18:imagenet", "vgg11:cifar10", "vgg16:mnist",
    "mobilenetv2:cifar10", "gpt:layers=3,hidden=16,heads=2,seq=8,vocab=32",
]  # fmt: skip
DEEP = ["resnet152:cifar10", "vgg19:cifar10", "vgg11:imagenet", "mobilenetv2:highres"]


@pytest.mark.parametrize("name", [*SHIPPED, *(pytest.param(name, marks=pytest.mark.slow) for name in DEEP)])
def test_a_shipped_model_is_its_chain_wherever_it_is_cut(name: str) -> None:
    workload = load(name)
    torch.manual_seed(0)
    model = workload.build().to(DOUBLE)
    chain = capture(model, in_type(workload.inputs(2, 0), DOUBLE), workload.loss)
    dice = random.Random(name)
    for trial, samples in enumerate((2, 3)):  # the blocks, and other places with another size
        cut = chain if trial == 0 else chain.recut(cuts=dice.sample(chain.legal_cuts, dice.randint(2, 6)))
        whole, batch = copy.deepcopy(model), in_type(workload.inputs(samples, trial), DOUBLE)
        stages = stages_of(cut, whole)
        torch.manual_seed(trial)
        found = run_split(stages, batch, workload.loss)
        assert_same(stages, whole, found, eager(whole, batch, workload.loss, trial), 1e-9)
