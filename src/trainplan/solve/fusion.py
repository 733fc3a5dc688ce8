"""PACE's fusion: which gradients travel as one, so that the next forward pass is over soonest.

A sum costs a latency however small it is, so small gradients are better fused; but a fused tensor is ready only with
the last of its gradients, and is needed with the first of its blocks. Given which are fused, the best order is known:
at each moment the ready tensor that is needed first goes, and one that is needed sooner interrupts it. That order is
the oracle of a dynamic program over the gradients, from the one that is needed first (and is ready last) on.

Why that is possible: whoever is needed later never delays who is needed sooner. So what the first gradients cost does
not depend on how the others are fused, but only the other way round, through the moments at which the link is taken. A
partial answer is therefore (when the forward pass is over as far as these blocks go, when the link is taken), and one
that is no later and at no moment has taken more is as good as another: those that are not the best in either way are
dropped, and what is left at the end is the optimum.

>>> tensors = [Tensor(1.0, 2.0, 2), Tensor(2.0, 2.0, 1), Tensor(3.0, 2.0, 0)]     # ready, seconds, needed by block
>>> fused(tensors, forward=[1.0, 1.0, 1.0], begin=3.0, latency=0.0)
Fusion(counts=(1, 1, 1), over=8.0, exact=True)
>>> fused(tensors, forward=[1.0, 1.0, 1.0], begin=3.0, latency=1.0)
Fusion(counts=(1, 2), over=11.0, exact=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

MOST_LABELS = 48  # partial answers that are kept for as many gradients; beyond these the answer may not be the best

Taken = tuple[tuple[float, float], ...]  # intervals, in order


class Tensor(NamedTuple):
    """A gradient, in the order of arrival."""

    ready: float
    seconds: float  # of its bytes
    block: int  # that needs it first
    kind: str = ""  # only the same are fused


@dataclass(frozen=True)
class Fusion:
    """An answer."""

    counts: tuple[int, ...]  # gradients of each fused tensor, in the order of arrival
    over: float  # when the next forward pass is
    exact: bool  # no partial answer had to be dropped for their number


class _Label(NamedTuple):
    over: float
    taken: Taken
    counts: tuple[int, ...]  # from the one that is needed first


def fused(tensors: Sequence[Tensor], forward: Sequence[float], begin: float, latency: float) -> Fusion:
    """The fusion after which a forward pass that may begin at `begin` is over soonest."""
    rest = [*accumulate(reversed(forward))][::-1]  # seconds of a block and all after it
    backwards = list(reversed(tensors))
    labels: list[list[_Label]] = [[] for _ in range(len(tensors) + 1)]
    labels[0] = [_Label(begin + rest[0] if rest else begin, (), ())]
    exact = True
    for done in range(len(tensors)):
        labels[done] = _best(labels[done])
        exact &= len(labels[done]) <= MOST_LABELS
        for label in labels[done][:MOST_LABELS]:
            seconds, block = latency, backwards[done].block
            for end in range(done + 1, len(tensors) + 1):
                own = backwards[end - 1]
                if own.kind != backwards[done].kind:
                    break
                seconds, block = seconds + own.seconds, min(block, own.block)
                arrived, taken = take(label.taken, backwards[done].ready, seconds)
                over = max(label.over, arrived + rest[block])
                labels[end].append(_Label(over, taken, (*label.counts, end - done)))
    found = min(labels[-1], key=lambda label: (label.over, len(label.counts)))
    return Fusion(found.counts[::-1], found.over, exact)


def take(taken: Taken, ready: float, seconds: float) -> tuple[float, Taken]:
    """When a tensor has arrived that goes whenever the link is free from some moment on; and when that is taken then.

    >>> take(((2.0, 3.0), (5.0, 6.0)), 1.0, 3.0)
    (5.0, ((1.0, 6.0),))
    """
    at, left = ready, seconds
    new = []
    for start, end in (*taken, (float("inf"), float("inf"))):
        if left > 0 and start > at:
            own = min(left, start - at)
            new.append((at, at + own))
            left -= own
            if left <= 0:
                at = at + own
        if left > 0:
            at = max(at, end)
    merged: list[tuple[float, float]] = []
    for start, end in sorted((*taken, *new)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return at, tuple(merged)


def _best(labels: list[_Label]) -> list[_Label]:
    """Those that no other is as good as."""
    found: list[_Label] = []
    for label in sorted(labels, key=lambda label: (label.over, sum(end - start for start, end in label.taken))):
        if not any(_no_more(other.taken, label.taken) for other in found):
            found.append(label)
    return found


def _no_more(one: Taken, other: Taken) -> bool:
    """Whether at no moment more has been taken of the link."""
    moments = [moment for interval in (*one, *other) for moment in interval]
    return all(_until(one, moment) <= _until(other, moment) + 1e-12 for moment in moments)


def _until(taken: Taken, moment: float) -> float:
    return sum(min(end, moment) - start for start, end in taken if start < moment)
