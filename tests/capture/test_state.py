"""Python state that forward changes is refused where it moves at every call, and let be where it comes to rest."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
import torch
from torch import Tensor, nn

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.state import kept, python_state
from trainplan.profile.capture.verify import verify
from trainplan.workload.workload import Batch, Loss

from .test_refuse import Net
from .verified import captured_and_verified

BATCH = Batch(4, (torch.randn(4, 6),), {}, torch.randint(0, 6, (4,)))
LOSS = Loss(nn.functional.cross_entropy, lambda batch: batch.samples)


class HalvesLater(nn.Module):
    """Halves its output from the third call on: one call, and two, look like any other model."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x / 2 if self.n >= 3 else x


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[1])
        return x


class Tally:
    def __init__(self) -> None:
        self.calls = 0


class CountsInAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._tally = Tally()

    def forward(self, x: Tensor) -> Tensor:
        self._tally.calls += 1
        return x


class CountsInAnIterator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        next(self.numbers)
        return x


class OwnDice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.dice.random()


# What is noted is found by a change of state at the trace; iterators and generators show theirs in the same way.
CHANGING = {
    HalvesLater: "n", Grows: "seen", CountsInAnObject: "_tally", CountsInAnIterator: "numbers", OwnDice: "dice",
}  # fmt: skip


@pytest.mark.parametrize("odd", CHANGING, ids=lambda odd: odd.__name__)
def test_capture_refuses_state_that_moves_at_every_call(odd):
    with pytest.raises(ModelError, match=f"'{CHANGING[odd]}' in module 'middle.odd'.*every call") as refusal:
        capture(Net(odd()), BATCH)
    assert refusal.value.instead


@pytest.mark.parametrize("odd", CHANGING, ids=lambda odd: odd.__name__)
def test_verify_refuses_it_by_itself(odd, monkeypatch):
    monkeypatch.setattr("trainplan.profile.capture.export.settles", lambda model, call: None)
    captured = capture(Net(odd()), BATCH, LOSS)
    with pytest.raises(ModelError, match=f"'{CHANGING[odd]}' in module 'middle.odd'.*every call"):
        verify(captured, Net(odd()), BATCH, LOSS)
    assert not captured.verified


class Elsewhere(nn.Module):
    """Keeps its count where no attribute shows it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Elsewhere.calls += not torch.compiler.is_exporting()
        return x / 2 if Elsewhere.calls >= 3 else x


def test_verify_refuses_a_model_that_answers_differently_the_next_time():
    Elsewhere.calls = 0
    with pytest.raises(ModelError, match="eager model against itself"):
        captured_and_verified(Net(Elsewhere()), BATCH, LOSS)


class WarmsUp(nn.Module):
    """Its state comes to rest after two calls, and its answer changes then."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = 0

    def forward(self, x: Tensor) -> Tensor:
        self.warm = min(self.warm + 1, 2)
        return x if self.warm < 2 else x * 0.5


def test_verify_refuses_a_state_that_rests_and_matters():
    with pytest.raises(ModelError, match="eager model against itself"):
        captured_and_verified(Net(WarmsUp()), BATCH, LOSS)


class Caches(nn.Module):
    """Remembers what the first call found out, and finds the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None
        self.longest = 0
        self.scales: dict[int, float] = {}
        self.recent: deque[int] = deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.width is None:
            self.width = x.shape[1]
        self.longest = max(self.longest, x.shape[1])
        self.recent.append(x.shape[1])
        return x * self.scales.setdefault(self.width, self.width**-0.5)


class CachesAMask(nn.Module):
    """Computes a tensor once, outside of tracing: what a rotary embedding's tables do."""

    def __init__(self) -> None:
        super().__init__()
        self._mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return x * torch.ones(6).cumsum(0)
        if self._mask is None:
            self._mask = torch.ones(6).cumsum(0)
        return x * self._mask


@pytest.mark.parametrize("odd", [Caches, CachesAMask])
def test_a_cache_that_comes_to_rest_is_accepted(odd):
    model = Net(odd())
    before = python_state(model)
    captured, difference = captured_and_verified(model, BATCH, LOSS)
    assert captured.verified
    assert difference < 1e-6
    assert python_state(model) == before  # the model is as it was, its caches are empty


def test_attributes_and_containers_are_put_back():
    model = nn.Linear(2, 2)
    model.a, model.b, model.c = [1, {"x": 1}], {1}, deque([1])
    tuple_of, tally = ([1],), Tally()
    model.d, model.e = tuple_of, tally
    before = python_state(model)
    with kept(model):
        model.a[1]["x"] = 2
        model.a.append(3)
        model.b.add(2)
        model.c.append(2)
        model.d[0].append(2)
        model.e.calls = 5
        model.new = 1
        del model.b
        assert python_state(model) != before
    assert python_state(model) == before
    assert model.e is tally
    assert not hasattr(model, "new")
