"""A timeline: operations with start and end. Predicted or measured, it is the same value with the same names.

Its events bear the names of the program's operations, so that predicted against measured is a join (`report.joined`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainplan import files
from trainplan.amounts import MOST, POSSIBLE, untrue
from trainplan.errors import InputError
from trainplan.program.ops import SPECS, Kind, Lane

MOST_RANKS = 2**20  # and steps: what has more was mistyped


@dataclass(frozen=True)
class Event:
    """One operation as it happened on one rank."""

    name: str  # text form of its key
    kind: str
    rank: int
    start: float  # seconds since the start of the timeline
    end: float
    bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """What happened when, on every rank. A collective appears once for each member."""

    source: Literal["predicted", "measured"]
    world: int
    steps: int
    events: tuple[Event, ...]
    title: str = ""

    @property
    def duration(self) -> float:
        return max((e.end for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    def of_rank(self, rank: int) -> list[Event]:
        return [e for e in self.events if e.rank == rank]

    def seconds_by_kind(self, steps: int | None = None) -> dict[str, float]:
        """Seconds that each kind of operation took, a step, summed over the ranks."""
        total: dict[str, float] = {}
        for event in self.events:
            total[event.kind] = total.get(event.kind, 0.0) + event.end - event.start
        return {kind: value / (steps or self.steps) for kind, value in total.items()}

    def save(self, path: str | Path) -> None:
        files.write(path, "timeline", files.to_json(self))

    @staticmethod
    def load(path: str | Path) -> Timeline:
        where = f"timeline {path}"
        return _checked(files.from_json(Timeline, files.read(path, "timeline"), where), where)


def _checked(timeline: Timeline, where: str) -> Timeline:
    """The timeline of a file, if it can be one. An operation of a measured one may end before it starts: the clocks of
    two machines are never quite brought together."""
    for place, value, expected in _faults(timeline):
        raise InputError(f"{where}.{place}", f"it is {value!r:.60}, and {expected}", files.made_by("timeline"))
    return timeline


def _faults(timeline: Timeline) -> Iterator[tuple[str, Any, str]]:
    bad = untrue(timeline, free=("start", "end"))
    if bad is not None:
        yield bad[0].lstrip("."), bad[1], POSSIBLE
    for name in ("world", "steps"):
        if not 1 <= getattr(timeline, name) <= MOST_RANKS:
            yield name, getattr(timeline, name), f"a number from 1 to {MOST_RANKS:,} was expected"
    for number, event in enumerate(timeline.events):
        place = f"events[{number}]"
        if event.rank >= timeline.world:
            yield f"{place}.rank", event.rank, f"there are {timeline.world} ranks, from 0 on"
        if event.kind not in Kind.__members__:
            yield f"{place}.kind", event.kind, "there is no such kind of operation"
        for name in ("start", "end"):
            if not abs(getattr(event, name)) <= MOST:
                yield f"{place}.{name}", getattr(event, name), "seconds were expected"


def busy(events: list[Event], lane: Lane) -> float:
    """Seconds in which at least one of the events on this lane goes on.

    >>> busy([Event("0F0", "F", 0, 0.0, 2.0), Event("0F1", "F", 0, 1.0, 3.0)], Lane.COMPUTE)
    3.0
    """
    spans = sorted((e.start, e.end) for e in events if SPECS[Kind[e.kind]].lane is lane)
    total, until = 0.0, -np.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(total)


def gaps(events: list[Event]) -> NDArray[np.float64]:
    """Idle seconds between consecutive compute events of one rank."""
    spans = sorted((e.start, e.end) for e in events if SPECS[Kind[e.kind]].lane is Lane.COMPUTE)
    return np.array([max(0.0, b[0] - a[1]) for a, b in itertools.pairwise(spans)])
