"""What is asked of a plan beside that it fits: what shall be best, and what it must keep to.

objective     time, money or memory (`objective.py`); accuracy, with a study (`accuracy.py`)
deadline      seconds in which all epochs are trained
budget        USD that all epochs may cost
devices       that it may use at most
framework     one that must be able to run it (`frameworks.py`)
synchronous   no plan in which anybody computes with weights that others have changed meanwhile
fixed         what some fields of a plan are to be
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import InputError, PlanError, nearest
from trainplan.plan.plan import Plan
from trainplan.predict.predict import Prediction
from trainplan.program.program import Bools
from trainplan.search.accuracy import Study, study_of, to_accuracy
from trainplan.search.columns import Space
from trainplan.search.floor import Floors
from trainplan.search.frameworks import Framework, framework
from trainplan.search.objective import OBJECTIVES, Objective, epoch_steps, prices
from trainplan.units import parse_seconds, seconds, significant, some

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Wishes:
    """What is asked; what is not said is free."""

    objective: str = "time"
    deadline: float | None = None  # seconds
    budget: float | None = None  # USD
    epochs: float = 1.0  # that both are for
    devices: int | None = None
    framework: Framework | None = None
    synchronous: bool = False
    study: Study | None = None  # then epochs are those to its accuracy
    fixed: tuple[tuple[str, Any], ...] = ()  # field of a plan, and what it shall be

    def check(self, cluster: Cluster) -> None:
        """Refused where it cannot be asked of a cluster."""
        if self.devices is not None and self.devices > cluster.world:
            why = f"{cluster.name} has {some(cluster.world, 'device')}"
            raise PlanError(f"--devices {self.devices}", why, f"--devices {cluster.world}")
        if (self.budget is not None or self.objective == "money") and not cluster.price_per_hour():
            asked = f"--budget {self.budget:g}" if self.budget is not None else "--objective money"
            why = f"what an hour of the machines of {cluster.name} costs is not known"
            raise PlanError(asked, why, "--set price=2.5 (USD for an hour of one device)")

    @property
    def best(self) -> Objective:
        """What shall be best."""
        return to_accuracy(self.study) if self.study is not None else OBJECTIVES[self.objective]

    def allowed(self, space: Space) -> Space:
        """The plans that may be asked for."""
        for number, (field, value) in enumerate(self.fixed):
            keep = space.having(field, value)
            if not keep.any():
                before = "".join(f" with {name}={given}" for name, given in self.fixed[:number])
                raise PlanError(f"{field}={value}", f"no plan{before} on {space.cluster.name} has it", f"no {field}")
            space = space.only(keep)
        if self.framework is None:
            return space
        keep = self.framework.runs(space)
        if not keep.any():
            raise PlanError(f"--for {self.framework.name}", "it runs none of the plans that there are here", "no --for")
        return space.only(keep)

    def possible(self, space: Space, known: Floors) -> Bools:
        """The plans that may keep to what was asked, by their bounds: others need not be simulated."""
        least = known.seconds * epoch_steps(space) * (self.study.alone if self.study is not None else self.epochs)
        found = np.ones(len(space), dtype=bool)
        if self.deadline is not None:
            found &= least <= self.deadline
        if self.budget is not None:
            found &= least / 3600 * prices(space) <= self.budget
        return found

    def _epochs(self, plan: Plan) -> float:
        return self.study.of(plan) if self.study is not None else self.epochs

    def meets(self, p: Prediction) -> bool:
        """Whether a plan that fits keeps to what was asked."""
        return not self.misses(p)

    def misses(self, p: Prediction) -> str:
        """By how much a plan misses what was asked for; nothing where it does not."""
        said, epochs = [], self._epochs(p.plan)
        if self.deadline is not None and p.epoch_s * epochs > self.deadline:
            said.append(f"takes {seconds(p.epoch_s * epochs)}, and there are {seconds(self.deadline)}")
        price = (p.price_per_epoch or 0.0) * epochs
        if self.budget is not None and price > self.budget:
            said.append(f"costs {significant(price)} USD, and there are {significant(self.budget)}")
        return " and ".join(said)

    @property
    def words(self) -> str:
        """All that was asked, in a line; nothing where it is as usual."""
        of = f" for {self.epochs:g} epochs" if self.epochs != 1 else " for an epoch"
        if self.study is not None:
            of = " to the accuracy"
        said = [
            f"objective {self.objective}" if self.objective != "time" else "",
            self.study.words if self.study is not None else "",
            f"within {seconds(self.deadline)}{of}" if self.deadline is not None else "",
            f"for at most {significant(self.budget)} USD{of}" if self.budget is not None else "",
            f"on at most {some(self.devices, 'device')}" if self.devices is not None else "",
            f"what {self.framework.name} runs ({self.framework.source})" if self.framework is not None else "",
            "only synchronous" if self.synchronous else "",
            " ".join(f"{field}={value}" for field, value in self.fixed),
        ]
        return ", ".join(filter(None, said))


def wishes_of(
    objective: str = "time", deadline: str | float | None = None, budget: float | None = None, epochs: float = 1.0,
    devices: int | None = None, synchronous: bool = False, runs_in: str = "", study: str = "",
) -> Wishes:  # fmt: skip
    """What was typed, refused where it means nothing.

    >>> wishes_of(deadline="2h", budget=50, epochs=90).words
    'within 2 h 0 min for 90 epochs, for at most 50.0 USD for 90 epochs'
    >>> wishes_of("monye")
    Traceback (most recent call last):
    trainplan.errors.InputError: --objective monye: the objectives are time, money, memory, accuracy. Try money.
    """
    known = (*OBJECTIVES, ACCURACY)
    if objective not in known:
        raise InputError(
            f"--objective {objective}", f"the objectives are {', '.join(known)}", nearest(objective, known, 1)
        )
    if (objective == ACCURACY) != bool(study):
        why, instead = "a study says when an accuracy is reached", "--objective accuracy"
        if not study:
            why = "how many epochs an accuracy takes is known only by training"
            instead = "--study FILE, which trainplan study staleness -o FILE writes"
        raise InputError(f"--study {study}" if study else f"--objective {objective}", why, instead)
    if study and epochs != 1:
        raise InputError(f"--epochs {epochs:g} --study {study}", "the study says how many epochs", "no --epochs")
    limit = parse_seconds(deadline) if deadline is not None else None
    for name, value, example in (
        ("deadline", limit, "12h"), ("budget", budget, "500"), ("epochs", epochs, "90"), ("devices", devices, "8"),
    ):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name} {value:g}", "it is more than nothing, and has an end", f"--{name} {example}")
    return Wishes(
        objective, limit, budget, epochs, devices, framework(runs_in) if runs_in else None, synchronous,
        study_of(study) if study else None,
    )  # fmt: skip
