"""What a measured timeline says of two things that a probe measures too: how much slower sums of gradients are while
ranks compute, and how far apart ranks are that do the same.

A sum is under way from when its last member comes, and the sum before it is over, until its last member has it. Of
that, ranks compute for b seconds, and for a seconds they do not. If it takes w seconds alone and k times as long beside
compute, then b / k + a = w; over all sums of a run together,

    k = Σb / (Σw − Σa)

which is what `Slowdown.slowed_collective` (of sums in our rounds `slowed_message`) says from a probe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, median, stdev

from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.text import parse
from trainplan.program.timeline import Event, Timeline

Span = tuple[float, float]
_PASSES = ("F", "B")


@dataclass(frozen=True)
class Seen:
    """Of a run of replicas, medians over its steps or sums over all of them."""

    beside_s: float  # in which a sum and compute went on, a step
    after_s: float  # in which a sum went on and nobody computed
    alone_s: float  # that the sums of a step would take alone
    slowed: float | None  # None: beside compute nothing was done, as far as that can be told
    spread: float  # of the seconds of passes of the ranks: standard deviation over mean
    slowest: float  # how much longer the passes of a step's slowest rank take than those of the mean one


def seen(timeline: Timeline, alone: Callable[[int], float]) -> Seen:
    """What a timeline of replicas shows; `alone`: seconds of a sum of so many bytes with nothing beside it."""
    beside = after = work = 0.0
    passes: dict[int, list[float]] = defaultdict(list)
    slowest = []
    for events in _steps(timeline).values():
        busy = _union((e.start, e.end) for e in events if SPECS[Kind[e.kind]].lane is Lane.COMPUTE)
        free = 0.0  # when the sum before was over
        for start, end, size in sorted(_sums(events), key=lambda own: own[1]):
            span = max(start, free), end
            free = end
            shared = sum(max(0.0, min(span[1], until) - max(span[0], since)) for since, until in busy)
            beside, after, work = beside + shared, after + span[1] - span[0] - shared, work + alone(size)
        own: dict[int, float] = defaultdict(float)
        for event in events:
            if event.kind in _PASSES:
                own[event.rank] += event.end - event.start
        for rank, spent in own.items():
            passes[rank].append(spent)
        slowest.append(max(own.values()) / mean(own.values()) - 1)
    middle = [median(spent) for spent in passes.values()]
    done = work - after  # beside compute
    return Seen(
        beside_s=beside / timeline.steps, after_s=after / timeline.steps, alone_s=work / timeline.steps,
        slowed=beside / done if done > 0.1 * work else None,
        spread=stdev(middle) / mean(middle) if len(middle) > 1 else 0.0, slowest=median(slowest),
    )  # fmt: skip


def _steps(timeline: Timeline) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        found[parse(event.name).step].append(event)
    return found


def _sums(events: Iterable[Event]) -> list[tuple[float, float, int]]:
    """Start, end and bytes of every sum of gradients."""
    members: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == Kind.REDUCE_GRAD.name:
            members[event.name].append(event)
    return [(max(e.start for e in own), max(e.end for e in own), own[0].bytes) for own in members.values()]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Spans of time that do not touch.

    >>> _union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
