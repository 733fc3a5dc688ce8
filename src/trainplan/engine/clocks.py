"""The clocks of several machines, brought together.

A monotonic clock counts from when its machine was started, so the clocks of two machines have nothing to do with each
other. Each rank asks rank 0 for the time, some times over (Cristian's algorithm): the answer was given somewhere
between question and answer, so half of the round trip is how far off the middle of the two can be. The shortest round
trip knows best. Where no difference at all is within that bound, there is none: ranks of one machine share a clock.

Clocks drift apart, so it is asked before and after what is recorded, and in between the offset changes evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainplan.engine.world import host_group

ROUNDS = 16
_TAG = 2**21  # beyond the tags of training and of evaluation


def now() -> float:
    """Seconds by this machine's clock, which only goes forward."""
    return time.perf_counter()


@dataclass(frozen=True)
class Reading:
    """How far this rank's clock was behind rank 0's, once."""

    at: float  # by this rank's clock
    offset: float  # what to add to this rank's clock to get rank 0's
    within: float  # the offset is no further off than this


def read(rounds: int = ROUNDS) -> Reading:
    """How far this rank's clock is behind rank 0's; all ranks call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Reading(now(), 0.0, 0.0)
    message = torch.zeros(1, dtype=torch.float64)
    with host_group() as group:
        if dist.get_rank() == 0:
            for rank in range(1, dist.get_world_size()):  # one after the other: they would slow each other down
                for _ in range(rounds):
                    dist.recv(message, rank, group=group, tag=_TAG)
                    message[0] = now()
                    dist.send(message, rank, group=group, tag=_TAG)
            return Reading(now(), 0.0, 0.0)

        def ask() -> float:
            dist.send(message, 0, group=group, tag=_TAG)
            dist.recv(message, 0, group=group, tag=_TAG)
            return float(message)

        return nearest([timed(ask, now) for _ in range(rounds)])


Answer = tuple[float, float, float]  # asked and answered by our clock, and what the other clock said


def timed(ask: Callable[[], float], clock: Callable[[], float]) -> Answer:
    """Ask another clock for the time, and note by ours when."""
    asked = clock()
    said = ask()
    return asked, clock(), said


def nearest(answers: Sequence[Answer]) -> Reading:
    """The reading of the shortest round trip.

    >>> nearest([(1.0, 3.0, 12.0), (5.0, 5.5, 15.0)])
    Reading(at=5.25, offset=9.75, within=0.25)
    >>> nearest([(1.0, 3.0, 2.5)])  # no difference would explain this answer, too
    Reading(at=2.0, offset=0.0, within=1.0)
    """
    asked, answered, said = min(answers, key=lambda answer: answer[1] - answer[0])
    middle, within = (asked + answered) / 2, (answered - asked) / 2
    offset = said - middle
    return Reading(middle, offset if abs(offset) > within else 0.0, within)


def aligned(moment: float, readings: Sequence[Reading]) -> float:
    """A moment of this rank's clock by rank 0's clock; the offset changes evenly from one reading to the next.

    >>> readings = [Reading(0.0, 10.0, 0.1), Reading(100.0, 12.0, 0.1)]
    >>> aligned(-5.0, readings), aligned(50.0, readings), aligned(200.0, readings), aligned(5.0, [])
    (5.0, 61.0, 212.0, 5.0)
    """
    if not readings:
        return moment
    before = [reading for reading in readings if reading.at <= moment]
    after = [reading for reading in readings if reading.at > moment]
    if not before or not after:
        return moment + (before[-1] if before else after[0]).offset
    first, second = before[-1], after[0]
    share = (moment - first.at) / (second.at - first.at)
    return moment + first.offset + share * (second.offset - first.offset)
