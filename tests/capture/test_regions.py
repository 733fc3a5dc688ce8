"""Regions without gradients and under autocast: cut inside, nested either way, and never forgotten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainplan.profile.capture.captured import capture
from trainplan.workload.workload import Batch, Loss

from .verified import captured_and_verified

BATCH = Batch(3, (torch.randn(3, 4),), {}, torch.randint(0, 4, (3,)))
LOSS = Loss(F.cross_entropy, lambda batch: batch.samples)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()


class NoGradInAutocast(Three):
    """torch.export forgets this no_grad."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            with torch.no_grad():
                y = self.b(x)
            x = self.c(x * y * torch.tensor([1.0, 2, 3, 4], device=x.device))
        return x.float()


class AutocastInNoGrad(Three):
    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            y = self.b(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.b(x)
            with torch.enable_grad():
                w = self.c(x)
        return x * y * z.float() * w


class AutocastInAutocast(Three):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                x = self.b(x.float())
            with torch.autocast("cpu", dtype=torch.float16):
                x = x + self.c(x)
        return x.float()


class AllThree(Three):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                y = self.b(x.float())
            x = x * y
        return self.c(x.float())


@pytest.mark.parametrize("kind", [NoGradInAutocast, AutocastInNoGrad, AutocastInAutocast, AllThree])
def test_nested_regions_are_what_they_are_in_eager(kind):
    torch.manual_seed(0)
    model = kind()
    captured, difference = captured_and_verified(model, BATCH, LOSS)
    assert difference < 1e-6
    assert len(captured.blocks) >= 3
    assert captured_and_verified(model, BATCH, LOSS, granularity="operator")[1] < 1e-6


def test_autocast_moves_with_the_stage_to_another_device():
    chain = capture(AutocastInNoGrad(), BATCH, LOSS)
    from trainplan.profile.capture.regions import region_of

    regions = {region_of(node) for node in chain.flow.ops}
    moved = {region.on(torch.device("cpu"), torch.device("cuda")) for region in regions}
    assert {device for region in moved for device, *_ in region.autocast} == {"cuda"}
    assert {region.grad for region in moved} == {True, False}


class UnderNoGrad(Three):
    def forward(self, x):
        with torch.no_grad():
            x = self.b(self.a(x))
        return self.c(x)


def test_gradients_do_not_cross_into_a_region_without_them():
    chain, _ = captured_and_verified(UnderNoGrad(), BATCH, LOSS)
    assert [block.name for block in chain.blocks] == ["a", "b", "c"]
    assert [crossing.needs_grad for crossing in chain.crossings] == [False, False]
