"""The host's lane: how long it takes to issue operators, forward and backward, and an optimizer's step.

What is timed is what a training loop does: calling modules, with all that Python and autograd do around the kernel. The
tensors are tiny and the device is held up meanwhile, so nothing but the host is seen. Two chains of modules are timed,
a short one and a long one: what a pass costs once, such as waking the thread that goes backward, is in both alike. What
they differ by is divided by the operators that the estimate would count for the same calls (`profile.operators`), so
the two belong together.

A chain of one kind finds all that it needs in the host's caches. A network has modules of many kinds, and each finds
what the others left: that takes up to twice as long (`mixed`).

A host is not as steady as a device. It shares its caches, its clock and often its cores with others, and is faster or
slower by tens of percent for seconds at a time. So all this is read in *rounds*, spread over the whole time for which a
device is measured (`HostLane`): what counts is the median of the rounds, and how far they are apart is told with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.errors import InputError
from trainplan.profile.device.families import family_of
from trainplan.profile.device.file import Issue
from trainplan.profile.operators import Recorder

SHORT, LONG = 4, 24  # modules one after the other
TRIES = 5  # of a chain in a round; the first is not counted, since what was measured before has filled the caches
LEAST_HELD_S, MORE = 2e-3, 2.0  # the device is held so long, or so many times what issuing took last time


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


# Family → (a module that can follow itself, the shape that it takes)
_CHAINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "product": (lambda: nn.Linear(32, 32), (8, 32)),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), (2, 8, 8, 8)),
    "attention": (_Attention, (2, 2, 16, 16)),
    "elementwise": (nn.GELU, (8, 32)),
    "reduction": (lambda: nn.Softmax(-1), (8, 32)),
    "normalisation": (lambda: nn.BatchNorm2d(8), (2, 8, 8, 8)),
    "pooling": (lambda: nn.MaxPool2d(3, 1, 1), (2, 8, 8, 8)),
}
# One of each, which can follow each other.
_KINDS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), lambda: nn.BatchNorm2d(8), nn.ReLU,
    lambda: nn.MaxPool2d(3, 1, 1), lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8), nn.GELU,
    lambda: nn.Softmax(-1), _Attention,
)  # fmt: skip
_FEW, _MANY = 3, 9  # times all kinds
_FEW_TENSORS, _MANY_TENSORS = 10, 110  # of an optimizer's step
# What is not here is issued like what is element by element.
FAMILIES = tuple(_CHAINS)


@dataclass(frozen=True)
class Lane:
    """The device, as far as the host's lane is concerned."""

    device: torch.device
    wait: Callable[[], None]  # until it is idle
    hold: Callable[[float], None]  # keeps it busy for so many seconds


@dataclass(frozen=True)
class Updates:
    """Of an optimizer's step that goes over all tensors at once."""

    op_s: float
    tensor_s: float


class _Chain:
    """Modules one after the other: their operators, and seconds of their passes whenever they are asked for."""

    def __init__(self, modules: Sequence[nn.Module], shape: tuple[int, ...], lane: Lane) -> None:
        self._lane, self._held = lane, 10 * LEAST_HELD_S
        self._modules = nn.Sequential(*modules).to(lane.device)
        self._given = torch.randn(shape, device=lane.device, requires_grad=True)
        self._gradient = torch.ones_like(self._modules(self._given))
        with Recorder(gpu=True) as recorder:
            out = self._modules(self._given)
            ahead = len(recorder.ops)
            out.backward(self._gradient)
        names = tuple(op.name for op in recorder.ops)
        self.forward, self.backward = names[:ahead], names[ahead:]

    def seconds(self) -> tuple[float, float]:
        """Of the two passes."""
        taken = [self._once() for _ in range(TRIES)][1:]
        return median(ahead for ahead, _ in taken), median(back for _, back in taken)

    def _once(self) -> tuple[float, float]:
        self._modules.zero_grad(set_to_none=True)
        self._given.grad = None
        self._lane.wait()
        self._lane.hold(self._held)
        start = time.perf_counter()
        out = self._modules(self._given)
        turn = time.perf_counter()
        out.backward(self._gradient)
        end = time.perf_counter()
        self._lane.wait()
        self._held = max(LEAST_HELD_S, MORE * (end - start))
        return turn - start, end - turn


class _Pair:
    """A short chain and a long one: what they differ by is some modules, and nothing else."""

    def __init__(self, kinds: Sequence[Callable[[], nn.Module]], counts: tuple[int, int], shape: Any, lane: Lane):
        chains = [_Chain([make() for _ in range(count) for make in kinds], shape, lane) for count in counts]
        self.short, self.long = chains
        self.forward, self.backward = (
            _beyond(getattr(self.long, passing), getattr(self.short, passing)) for passing in ("forward", "backward")
        )
        more = (counts[1] - counts[0]) * len(kinds)
        if min(len(self.forward), len(self.backward)) < more:  # the seconds would be those of several
            ahead, back = len(self.forward), len(self.backward)
            raise RuntimeError(
                f"{more} modules have {ahead} operators in their forward pass and {back} in their backward pass"
            )

    def expected(self, issue: Mapping[str, Issue]) -> tuple[float, float]:
        """The same by what is known of each family of operators."""
        ahead = sum(issue.get(family_of(name), issue["elementwise"]).forward_s for name in self.forward)
        return ahead, sum(issue.get(family_of(name), issue["elementwise"]).backward_s for name in self.backward)

    def seconds(self) -> tuple[float, float]:
        """Of what the long one has more, forward and backward."""
        (long_ahead, long_back), (short_ahead, short_back) = self.long.seconds(), self.short.seconds()
        return long_ahead - short_ahead, long_back - short_back


def _beyond(long: Sequence[str], short: Sequence[str]) -> list[str]:
    """The names that the first has more."""
    left = Counter(long)
    left.subtract(short)
    return [name for name, count in left.items() for _ in range(count)]


@dataclass
class HostLane:
    """Seconds of the host to issue operators, read again and again.

    What cannot be had is `missing`, with the reason; the estimate falls back, and says so.
    """

    lane: Lane
    rounds: int = 0
    _broken: dict[str, str] = field(default_factory=dict)
    _pairs: dict[str, _Pair] = field(default_factory=dict)
    _read: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _updates: list[Updates] = field(default_factory=list)

    def __post_init__(self) -> None:
        for family, (make, shape) in _CHAINS.items():
            self._try(family, lambda make=make, shape=shape: _Pair([make], (SHORT, LONG), shape, self.lane))  # type: ignore[misc]
        self._try("mixed", lambda: _mixed(self.lane))
        self._steps: list[_Step] = []
        try:
            self._steps = [_Step(count, self.lane) for count in (_FEW_TENSORS, _MANY_TENSORS)]
        except Exception as error:
            self._broken["host.optimizer"] = _words(error)

    def _try(self, name: str, make: Callable[[], _Pair]) -> None:
        try:
            self._pairs[name] = make()
        except Exception as error:
            self._broken[f"host.{name}"] = _words(error)

    def read(self) -> None:
        """One round."""
        self.rounds += 1
        for name, pair in self._pairs.items():
            taken = pair.seconds()
            if min(taken) > 0:  # else something came between
                self._read.setdefault(name, []).append(taken)
        if self._steps:
            few, many = (step.seconds() for step in self._steps)
            slope = max(0.0, (many - few) / (_MANY_TENSORS - _FEW_TENSORS))
            self._updates.append(Updates(max(0.0, few - _FEW_TENSORS * slope), slope))

    @property
    def missing(self) -> dict[str, str]:
        """What could not be made, and what no round could read."""
        if not self.rounds:
            return self._broken
        why = f"a longer chain took less than a shorter one in each of {self.rounds} rounds: the host was busy"
        return self._broken | {f"host.{name}": why for name in self._pairs if name not in self._read}

    @property
    def issue(self) -> dict[str, Issue]:
        """By family, seconds of an operator among others of all kinds."""
        alone = {family: self._alone(family) for family in FAMILIES if family in self._read}
        if "mixed" not in self._read or "elementwise" not in alone:
            return alone
        pair, (ahead, back) = self._pairs["mixed"], _middle(self._read["mixed"])
        forward, backward = pair.expected(alone)
        return {
            family: Issue(one.forward_s * ahead / forward, one.backward_s * back / backward)
            for family, one in alone.items()
        }

    def _alone(self, family: str) -> Issue:
        ahead, back = _middle(self._read[family])
        return Issue(ahead / len(self._pairs[family].forward), back / len(self._pairs[family].backward))

    @property
    def updates(self) -> Updates:
        """Of an optimizer's step."""
        if not self._updates:
            return Updates(0.0, 0.0)
        return Updates(median(one.op_s for one in self._updates), median(one.tensor_s for one in self._updates))

    @property
    def spread(self) -> float:
        """How far the rounds are apart: the range of their middle half over their median, of modules of all kinds."""
        totals = [sum(taken) for taken in self._read.get("mixed", ())]
        if len(totals) < 3:
            return 0.0
        low, middle, high = quantiles(totals, n=4, method="inclusive")
        return (high - low) / middle


class Pace:
    """How fast a host is at this moment, against what a device file says of it: something to read beside a step.

    The same modules of many kinds as a file's are issued. 1.2: it takes 1.2 times as long as in the file.
    """

    def __init__(self, lane: Lane, issue: Mapping[str, Issue]) -> None:
        if "elementwise" not in issue:
            why = "it does not say how long a host takes for operators element by element, which all others are like"
            raise InputError("the pace of a host by a device file", why, "measuring the device again")
        self._pair = _mixed(lane)
        self._expected = sum(self._pair.expected(issue))

    def now(self) -> float:
        return sum(self._pair.seconds()) / self._expected


def _mixed(lane: Lane) -> _Pair:
    return _Pair(_KINDS, (_FEW, _MANY), (2, 8, 8, 8), lane)


def _middle(taken: Iterable[tuple[float, float]]) -> tuple[float, float]:
    ahead, back = zip(*taken, strict=True)
    return median(ahead), median(back)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class _Step:
    """Adam's step over so many tensors: its seconds for each kind of operator."""

    def __init__(self, count: int, lane: Lane) -> None:
        self._lane, self._held = lane, 10 * LEAST_HELD_S
        parameters = [nn.Parameter(torch.randn(64, device=lane.device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(64, device=lane.device)
        self._optimizer = torch.optim.Adam(parameters, foreach=True)
        self._optimizer.step()
        with Recorder(gpu=True) as recorder:
            self._optimizer.step()
        self._kinds = len([op for op in recorder.ops if "foreach" in op.name])
        if not self._kinds:
            raise RuntimeError(f"of {len(recorder.ops)} operators of an optimizer's step none goes over all tensors")

    def seconds(self) -> float:
        return median([self._once() for _ in range(TRIES)][1:]) / self._kinds

    def _once(self) -> float:
        self._lane.wait()
        self._lane.hold(self._held)
        start = time.perf_counter()
        self._optimizer.step()
        taken = time.perf_counter() - start
        self._lane.wait()
        self._held = max(LEAST_HELD_S, MORE * taken)
        return taken
