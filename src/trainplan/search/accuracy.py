"""Time to an accuracy: epochs that it takes (statistical efficiency) × seconds of an epoch (hardware efficiency).

Nobody knows epochs without training, so this is offered only with a study of staleness (`trainplan study staleness -o
FILE`), and named with it. A synchronous plan is the same training as one device's, whatever its shape: it takes the
epochs of one worker. Asynchronous servers take those that the study found for their rule with as many workers; they
are searched only here, and only as the study has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.errors import InputError, PlanError, nearest
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import parse
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.program.staleness import STUDIED
from trainplan.search.objective import Objective, epoch_steps
from trainplan.solve.resolve import solve
from trainplan.units import seconds, significant


@dataclass(frozen=True)
class Study:
    """Epochs to an accuracy on one task, by rule and workers."""

    path: str
    task: str
    target: float
    made: str
    command: str
    epochs: dict[tuple[str, int], float]

    @property
    def alone(self) -> float:
        """Epochs of one worker, and of whatever is the same training."""
        return next(epochs for (_, workers), epochs in self.epochs.items() if workers == 1)

    def of(self, plan: Plan) -> float:
        """Epochs that a plan takes; without end where the study does not say, or the target was not reached."""
        if plan.exchange not in ASYNCHRONOUS:
            return self.alone
        return self.epochs.get((plan.exchange, plan.dp), float("inf"))

    @property
    def words(self) -> str:
        return f"{self.target:.0%} on {self.task} ({self.path}: {self.command}, {self.made})"


def study_of(asked: str) -> Study:
    """The study in FILE, or in FILE:TASK where it is of several tasks."""
    path, colon, task = asked.rpartition(":")
    if not colon or not Path(path).exists():
        path, task = asked, ""
    data: dict[str, Any] = files.read(path, "staleness")
    tasks = data["targets"]
    if (task or len(tasks) > 1) and task not in tasks:
        why = f"it is of {', '.join(tasks)}" if task else f"it is of several tasks: {', '.join(tasks)}"
        raise InputError(
            f"--study {asked}", why, f"--study {path}:{nearest(task, tasks, 1) if task else next(iter(tasks))}"
        )
    task = task or next(iter(tasks))
    rows = [row for row in data["rows"] if row["task"] == task and row["epochs"] is not None]
    found = {(row["rule"], row["workers"]): row["epochs"] for row in rows}
    if not any(workers == 1 for _, workers in found):
        why = f"one worker did not reach {tasks[task]:.0%} in it, or was not trained, so nothing compares with it"
        raise InputError(f"--study {asked}", why, "trainplan study staleness --workers 1,2,4 --epochs 100 -o FILE")
    return Study(path, task, tasks[task], data["made"], data["command"], found)


def to_accuracy(study: Study) -> Objective:
    """The shortest time to the accuracy of a study."""
    return Objective(
        "accuracy",
        lambda p: study.of(p.plan) * p.epoch_s,
        lambda space, known: known.seconds * epoch_steps(space) * study.alone,
        lambda space, row, seconds, size: seconds * epoch_steps(space) * study.alone,
        lambda value: f"{seconds(value)} to {study.target:.0%}",
        lambda p: _epochs_words(study, p),
        "reaches it in",
        "sooner",
        "later",
    )


def asynchronous(study: Study, profile: Profile, cluster: Cluster, batch: int, devices: int) -> Iterator[Prediction]:
    """Servers that wait for nobody, or not for all, with as many workers as the study knows and devices there are."""
    for rule, workers in study.epochs:
        if rule not in ASYNCHRONOUS or not 1 < workers < min(devices, batch + 1):
            continue
        bound = f" bound={','.join(map(str, STUDIED[rule]))}" if STUDIED[rule] else ""
        try:
            yield solve(parse(f"{rule} dp={workers} servers=1{bound}"), profile, cluster, batch)
        except PlanError:  # more keys than this model has, or workers than its batch
            continue


def _epochs_words(study: Study, p: Prediction) -> str:
    """How long a plan takes to the accuracy, and of what that is made.

    >>> from types import SimpleNamespace
    >>> from trainplan.plan.plan import plan
    >>> study = Study("", "digits", 0.95, "", "", {("ssp", 1): 4.0})
    >>> _epochs_words(study, SimpleNamespace(plan=plan(dp=2), epoch_s=30.0))
    '2 min 0 s to 95% = 4.00 epochs of 30.0 s'
    """
    epochs = study.of(p.plan)
    return f"{seconds(epochs * p.epoch_s)} to {study.target:.0%} = {significant(epochs)} epochs of {seconds(p.epoch_s)}"
