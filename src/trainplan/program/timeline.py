"""A timeline: operations with start and end. Predicted or measured, it is the same value with the same names.

Its events bear the names of the program's operations, so that predicted against measured is a join (`report.joined`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainplan import files
from trainplan.program.ops import SPECS, Kind, Lane


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
        return files.from_json(Timeline, files.read(path, "timeline"))


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
