"""The host's lane: how long it takes to issue operators, forward and backward, and an optimizer's step.

What is timed is what a training loop does: calling modules, with all that Python and autograd do around the kernel. The
tensors are tiny and the device is held up meanwhile, so nothing but the host is seen. Two chains of modules are timed,
a short one and a long one: what a pass costs once, such as waking the thread that goes backward, is in both alike. What
they differ by is divided by the operators that the estimate would count for the same calls (`profile.operators`), so
the two belong together.

A chain of one kind finds all that it needs in the host's caches. A network has modules of many kinds, and each finds
what the others left: that takes about twice as long (`mixed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.profile.device.families import family_of
from trainplan.profile.device.file import Issue
from trainplan.profile.operators import Recorder

SHORT, LONG = 4, 24  # modules one after the other
TRIES = 11
HELD_S = 0.02  # longer than issuing any of this takes


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


@dataclass(frozen=True)
class _Passes:
    """A chain of modules: seconds of its passes, and their operators."""

    forward_s: float
    backward_s: float
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def issue(family: str, lane: Lane) -> Issue:
    """Seconds to issue an operator of a family."""
    make, shape = _CHAINS[family]
    short, long = (_passes([make() for _ in range(count)], shape, lane) for count in (SHORT, LONG))
    ahead, back = len(long.forward) - len(short.forward), len(long.backward) - len(short.backward)
    more = LONG - SHORT
    if min(ahead, back) < more:  # the seconds would be those of several
        raise RuntimeError(
            f"{more} modules have {ahead} operators in their forward pass and {back} in their backward pass"
        )
    found = Issue((long.forward_s - short.forward_s) / ahead, (long.backward_s - short.backward_s) / back)
    if min(found.forward_s, found.backward_s) <= 0:
        raise RuntimeError(f"{LONG} modules took no longer than {SHORT}")
    return found


def mixed(alone: Mapping[str, Issue], lane: Lane) -> Issue:
    """How many times longer operators take to issue among others of all kinds than `alone`, forward and backward."""
    short, long = (_passes([make() for _ in range(n) for make in _KINDS], (2, 8, 8, 8), lane) for n in (_FEW, _MANY))

    def by_kind(names: Sequence[str], passing: str) -> float:
        return sum(getattr(alone.get(family_of(name), alone["elementwise"]), passing) for name in names)

    ahead = by_kind(long.forward, "forward_s") - by_kind(short.forward, "forward_s")
    back = by_kind(long.backward, "backward_s") - by_kind(short.backward, "backward_s")
    found = Issue((long.forward_s - short.forward_s) / ahead, (long.backward_s - short.backward_s) / back)
    if min(found.forward_s, found.backward_s) <= 0:
        raise RuntimeError(f"{_MANY} modules of every kind took no longer than {_FEW}")
    return found


def _passes(modules: Sequence[nn.Module], shape: tuple[int, ...], lane: Lane) -> _Passes:
    chain = nn.Sequential(*modules).to(lane.device)
    given = torch.randn(shape, device=lane.device, requires_grad=True)

    def forward() -> Tensor:
        out: Tensor = chain(given)
        return out

    def clear() -> None:
        chain.zero_grad(set_to_none=True)
        given.grad = None

    out = forward()
    gradient = torch.ones_like(out)
    with Recorder(gpu=True) as recorder:
        out = forward()
        ahead = len(recorder.ops)
        out.backward(gradient)
    names = tuple(op.name for op in recorder.ops)
    taken: list[tuple[float, float]] = []
    for _ in range(TRIES):
        clear()
        lane.wait()
        lane.hold(HELD_S)
        start = time.perf_counter()
        out = forward()
        turn = time.perf_counter()
        out.backward(gradient)
        taken.append((turn - start, time.perf_counter() - turn))
        lane.wait()
    return _Passes(median(a for a, _ in taken), median(b for _, b in taken), names[:ahead], names[ahead:])


def updates(lane: Lane) -> Updates:
    """Of Adam over few and many tensors: what the two differ by is the tensors' part."""
    few, many = 10, 110
    found = {}
    for count in (few, many):
        parameters = [nn.Parameter(torch.randn(64, device=lane.device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(64, device=lane.device)
        optimizer = torch.optim.Adam(parameters, foreach=True)
        optimizer.step()
        with Recorder(gpu=True) as recorder:
            optimizer.step()
        kinds = len([op for op in recorder.ops if "foreach" in op.name])
        if not kinds:
            raise RuntimeError(f"of {len(recorder.ops)} operators of an optimizer's step none goes over all tensors")
        taken = []
        for _ in range(TRIES):
            lane.wait()
            lane.hold(HELD_S)
            start = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - start)
        lane.wait()
        found[count] = median(taken) / kinds
    slope = max(0.0, (found[many] - found[few]) / (many - few))
    return Updates(max(0.0, found[few] - few * slope), slope)
