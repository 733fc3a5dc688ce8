"""What cannot be shared out is refused; what can be is found whole again."""

import pytest
import torch
from torch import nn

from trainplan.engine.shards import Shards, check_elementwise
from trainplan.errors import PlanError
from trainplan.plan.optimizers import ELEMENTWISE
from trainplan.program.lower.units import Unit


class Layerwise(torch.optim.SGD):
    """Somebody's own: what it does to a weight may depend on all of it."""


def test_optimizers_that_need_whole_weights_are_refused_by_name() -> None:
    weights = [nn.Parameter(torch.zeros(3, 3))]
    for name in ELEMENTWISE:
        check_elementwise(getattr(torch.optim, name)(weights), zero=1)
    for optimizer in (torch.optim.Adafactor(weights), torch.optim.LBFGS(weights), Layerwise(weights)):
        with pytest.raises(
            PlanError, match=rf"zero=2 with {type(optimizer).__name__}: .*Try zero=0, or one of SGD, Adam"
        ):
            check_elementwise(optimizer, zero=2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_are_views_of_their_unit(zero: int) -> None:
    """The second of three ranks has the end of one weight and the beginning of the other."""
    weights = {"a": nn.Parameter(torch.arange(6.0).view(2, 3)), "b": nn.Parameter(torch.arange(6.0, 10.0))}
    shards = Shards([Unit(("a", "b"), (6, 4), 4, sharers=3, first=0, last=0)], weights, place=1, zero=zero, group=None)
    assert {name: piece.tolist() for name, piece in shards.pieces.items()} == {"a": [4.0, 5.0], "b": [6.0, 7.0]}
    flat = shards.open(0)
    flat.copy_(torch.arange(12.0))
    assert weights["b"].tolist() == [6.0, 7.0, 8.0, 9.0]
    shards.release(0)
    assert flat.untyped_storage().nbytes() == (0 if zero == 3 else 48)
    with torch.no_grad():
        shards.pieces["b"].add_(1.0)
    assert shards.own[0].tolist() == [4.0, 5.0, 7.0, 8.0]


def test_a_weight_without_a_gradient_has_none_of_the_step_before() -> None:
    """Under zero=1 gradients are not emptied but overwritten: also where nothing comes, or what comes is added to."""
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    shards = Shards([Unit(("a", "b"), (2, 2), 4, sharers=1, first=0, last=0)], weights, place=0, zero=1, group=None)
    (3 * weights["a"] + 5 * weights["b"]).sum().backward()
    (3 * weights["a"]).sum().backward()
    assert shards.to_scatter(0).tolist() == [6, 6, 5, 5]
    assert shards.pieces["b"].grad.tolist() == [5, 5]
    shards.zero_gradients()
    (3 * weights["a"]).sum().backward()
    assert shards.to_scatter(0).tolist() == [3, 3, 0, 0]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_states_of_a_weight_without_dimensions_are_taken_from_those_of_whole_ones(name: str) -> None:
    """A temperature: its moments look like the count of steps, and a rank's part of it has one dimension."""
    make = getattr(torch.optim, name)
    whole = {"t": nn.Parameter(torch.tensor(0.5)), "w": nn.Parameter(torch.ones(2))}
    saved = make(whole.values(), lr=0.1)
    sum((3 * p).sum() for p in whole.values()).backward()
    saved.step()
    unit = Unit(("t", "w"), (1, 2), 4, sharers=1, first=0, last=0)
    shards = Shards([unit], whole, place=0, zero=1, group=None)
    optimizer = make(shards.pieces.values(), lr=0.1)
    shards.take_state(0, {name: saved.state[p] for name, p in whole.items()}, optimizer.state)
    for piece in shards.pieces.values():
        piece.grad = torch.ones_like(piece)
    before = {name: piece.detach().clone() for name, piece in shards.pieces.items()}
    optimizer.step()
    assert all(piece.shape == before[name].shape for name, piece in shards.pieces.items())
    assert all(not torch.equal(piece, before[name]) for name, piece in shards.pieces.items())
