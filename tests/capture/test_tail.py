"""Blocks that are run again: the gradients are the same, and what backward does not need is not computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.walk import Walk
from trainplan.workload.losses import mse
from trainplan.workload.workload import Batch

from .cases import CASES, NAMES, built, captured


def stage_of(name: str) -> tuple[Captured, Stage]:
    chain = captured(name)
    return chain, chain.stage(0, len(chain.blocks)).bind(values_of(built(name)))


def gradients(chain: Captured, stage: Stage, walk: Walk, again: bool) -> dict[str, Tensor]:
    """Of all parameters, by going back through every block by itself; `again`: each was run a second time for that."""
    for parameter in stage.parameters():
        parameter.grad = None
    with stage.buffers_kept():
        for index in range(len(chain.blocks)):
            torch.manual_seed(index)
            walk.forward(stage, index)
            if again and index < len(chain.blocks) - 1:
                torch.manual_seed(index)
                walk.again(stage, index)
        for index in reversed(range(len(chain.blocks))):
            walk.backward(index)
    return {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_blocks_that_are_run_again_are_the_same(name):
    """The second time finds the tail, the third and fourth go without it; the fourth with another number of samples."""
    chain, stage = stage_of(name)
    for samples in (3, 3, 2):
        batch = CASES[name].batch(samples, 1)
        expected = gradients(chain, stage, Walk(chain, batch, CASES[name].loss), again=False)
        found = gradients(chain, stage, Walk(chain, batch, CASES[name].loss), again=True)
        assert set(found) == set(expected)
        for parameter, gradient in expected.items():
            assert torch.equal(found[parameter], gradient), parameter


class Layer(nn.Module):
    """Half a transformer's layer; `last`: what comes behind the product."""

    def __init__(self, width: int, last: nn.Module) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.fall(torch.nn.functional.gelu(self.rise(self.norm(x)))))


class Layers(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16, last) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("last", "skipped"), [(nn.Identity(), True), (nn.Tanh(), False), (nn.Dropout(0.5), False), (nn.ReLU(), False)]
)
def test_as_much_is_computed_as_torchs_checkpoint_computes(last, skipped):
    """FLOPs of running a layer again, against those that torch.utils.checkpoint adds. (Dropout's mask is drawn together
    with what it is applied to.)"""
    model = Layers(last)
    batch = Batch(5, (torch.randn(5, 7, 16),), targets=torch.randn(5, 7, 4))
    chain = capture(model, batch, mse())
    names = [block.name for block in chain.blocks]
    index = names.index("layers.1")
    stage = chain.stage(0, len(chain.blocks)).bind(values_of(model))
    walk = Walk(chain, batch, mse())
    for block in range(index + 1):
        walk.forward(stage, block)
    for _ in range(2):  # which finds the tail, and then the forms of what it makes
        walk.again(stage, index)
    with FlopCounterMode(display=False) as ours:
        walk.again(stage, index)
    x = torch.randn(5, 7, 16, requires_grad=True)

    def flops(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return counter.get_total_flops()

    layer = model.layers[1]
    theirs = flops(lambda: checkpoint(layer, x, use_reentrant=False)) - flops(lambda: layer(x))
    product = 2 * 5 * 7 * 16 * 64
    assert theirs == (product if skipped else 2 * product)
    assert ours.get_total_flops() == theirs
