"""What is best: the shortest step, the cheapest epoch, or the least memory; and what no plan can beat in that.

time      seconds of a step (of an epoch as many times as it has steps)
money     what the machines cost while an epoch is trained; a machine is rented whole
memory    bytes of the fullest device; of plans that hardly differ, the fastest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainplan.errors import PlanError, nearest
from trainplan.predict.predict import Prediction
from trainplan.search.columns import Space
from trainplan.search.floor import Floats, Floors
from trainplan.units import gib, seconds, significant


@dataclass(frozen=True)
class Objective:
    """A number of a plan that is to be small."""

    name: str
    value: Callable[[Prediction], float]
    floor: Callable[[Space, Floors], Floats]  # of every plan of a space, what it cannot beat
    closer: Callable[[Space, int, float, float], float]  # the same of a row that takes so many seconds at least
    words: Callable[[float], str]  # a value, for people
    than: str  # … is better than another


def _price(space: Space) -> Floats:
    """An hour of the machines that each plan uses."""
    counts, which = np.unique(space.ranks, return_inverse=True)
    return np.array([space.cluster.price_per_hour(int(count)) for count in counts])[which.reshape(-1)]


def _epoch(space: Space) -> float:
    return -(-space.profile.samples_per_epoch // space.batch) / 3600


TIME = Objective(
    "time",
    lambda p: p.step_s,
    lambda space, known: known.seconds,
    lambda space, row, bound, before: bound,
    seconds,
    "faster",
)
MONEY = Objective(
    "money",
    lambda p: p.price_per_epoch or float("inf"),
    lambda space, known: known.seconds * _epoch(space) * _price(space),
    lambda space, row, bound, before: bound * _epoch(space) * space.cluster.price_per_hour(int(space.ranks[row])),
    lambda value: f"{significant(value)} USD an epoch",
    "cheaper",
)
MEMORY = Objective(
    "memory",
    lambda p: p.peak_bytes * (1 + 1e-6 * np.tanh(p.step_s)),
    lambda space, known: known.bytes,
    lambda space, row, bound, before: before,
    lambda value: gib(round(value)),
    "smaller",
)
OBJECTIVES = {each.name: each for each in (TIME, MONEY, MEMORY)}


def objective_of(name: str, space: Space) -> Objective:
    """The objective of a name, where it can be worked out."""
    if name not in OBJECTIVES:
        raise PlanError(f"objective {name}", f"the objectives are {', '.join(OBJECTIVES)}", nearest(name, OBJECTIVES))
    if name == "money" and not space.cluster.price_per_hour():
        raise PlanError(
            f"objective money on {space.cluster.name}",
            "what an hour of its machines costs is not known",
            "--set price=2.5 (USD for an hour of one device)",
        )
    return OBJECTIVES[name]
