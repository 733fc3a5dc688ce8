"""What is best: the shortest step, the cheapest epoch, or the least memory; and what no plan can beat in that.

time      seconds of a step (of an epoch as many times as it has steps)
money     what the machines cost while an epoch is trained; a machine is rented whole
memory    bytes of the fullest device, to a hundredth; of plans that do not differ so far, the fastest
accuracy  time to an accuracy, with a study (`accuracy.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from trainplan.predict.predict import Prediction
from trainplan.search.columns import Space
from trainplan.search.floor import Floats, Floors
from trainplan.search.room import fullest
from trainplan.units import gib, seconds, significant

T = TypeVar("T", float, Floats)


@dataclass(frozen=True)
class Objective:
    """A number of a plan that is to be small."""

    name: str
    value: Callable[[Prediction], float]
    floor: Callable[[Space, Floors], Floats]  # of every plan of a space, what it cannot beat
    closer: Callable[[Space, int, float, float], float]  # the same of a row with so many seconds and bytes at least
    words: Callable[[float], str]  # a bound, for people
    shown: Callable[[Prediction], str]  # what a plan has of it
    verb: str  # what a plan does to it
    than: str  # … is better than another
    worse: str


def prices(space: Space) -> Floats:
    """An hour of the machines that each plan uses."""
    counts, which = np.unique(space.ranks, return_inverse=True)
    return np.array([space.cluster.price_per_hour(int(count)) for count in counts])[which.reshape(-1)]


def _price(space: Space, row: int) -> float:
    return space.cluster.price_per_hour(int(space.ranks[row]))


def epoch_steps(space: Space) -> int:
    """Steps of an epoch, of any plan."""
    return -(-space.profile.samples_per_epoch // space.batch)


def _about(size: T) -> T:
    """Bytes, rounded down by less than a hundredth.

    >>> round(_about(1000.0)), bool(_about(1000.0) == _about(1003.0))
    (998, True)
    """
    return cast(T, 1.01 ** np.floor(np.log(np.maximum(size, 1.0)) / np.log(1.01)))


TIME = Objective(
    "time",
    lambda p: p.step_s,
    lambda space, known: known.seconds,
    lambda space, row, seconds, size: seconds,
    seconds,
    lambda p: f"{seconds(p.step_s)} a step",
    "takes",
    "faster",
    "slower",
)
MONEY = Objective(
    "money",
    lambda p: p.price_per_epoch or float("inf"),
    lambda space, known: known.seconds * epoch_steps(space) / 3600 * prices(space),
    lambda space, row, bound, before: (
        bound * epoch_steps(space) / 3600 * space.cluster.price_per_hour(int(space.ranks[row]))
    ),
    lambda value: f"{significant(value)} USD an epoch",
    lambda p: f"{significant(p.price_per_epoch or 0.0)} USD an epoch",
    "costs",
    "cheaper",
    "dearer",
)
MEMORY = Objective(
    "memory",
    lambda p: _about(p.peak_bytes) * (1 + 1e-3 * p.step_s / (1 + p.step_s)),
    lambda space, known: _about(fullest(known.room, known.fits, known.bytes, space.cluster)),
    lambda space, row, seconds, size: _about(size),
    gib,
    lambda p: gib(p.peak_bytes),
    "needs",
    "smaller",
    "larger",
)
OBJECTIVES = {each.name: each for each in (TIME, MONEY, MEMORY)}
