"""Predicted beside measured: the two timelines of a plan, joined by the names of their operations.

Every misprediction has an address: the rows add up to the step (`exclusive.py` says how moments are shared out).

An operation means the same in both: a SEND lasts from its posting (and from when its link is free) until the message
has arrived at the other rank; a receive from when the message and its host are both there until the tensors are; a
collective from when its last member comes until it is over on this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainplan.errors import InputError
from trainplan.program.ops import SPECS, Kind
from trainplan.program.timeline import Timeline
from trainplan.report.exclusive import WAIT, Step, steps
from trainplan.report.table import milliseconds, table
from trainplan.units import percent, seconds

_SHOWN = 12  # operations; the rest is summed up


@dataclass(frozen=True)
class Row:
    """Something of a step, predicted and measured: seconds of a mean rank for a kind, of one rank for an operation."""

    name: str
    predicted_s: float
    measured_s: float
    rank: int = -1  # of one operation

    @property
    def difference_s(self) -> float:
        return self.predicted_s - self.measured_s

    @property
    def error(self) -> float | None:
        """Relative to what was measured; None where nothing was."""
        return self.difference_s / self.measured_s if self.measured_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name, "predicted_s": self.predicted_s, "measured_s": self.measured_s,
            "difference_s": self.difference_s, "error": self.error,
        }  # fmt: skip
        return {**data, "rank": self.rank} if self.rank >= 0 else data


@dataclass(frozen=True)
class Joined:
    """A predicted and a measured timeline of the same plan."""

    title: str
    total: Row
    kinds: tuple[Row, ...]  # the largest difference first
    ops: tuple[Row, ...]  # the same, for every operation of every rank
    noise: float | None  # how far two halves of the measurement are apart, relative; None: one step has no halves
    steps: int  # that were measured
    mean: bool = False  # of all steps together, since workers had none in common; else medians of steps
    only_predicted: tuple[str, ...] = ()
    only_measured: tuple[str, ...] = ()
    unmeasured: tuple[int, ...] = ()  # ranks, such as workers that were lost: they are in no row

    def __str__(self) -> str:
        rows = [_cells("step", self.total, self.total)]
        rows += [_cells(kind_words(row.name), row, self.total) for row in self.kinds]
        text = table(["", ">predicted ms", ">measured ms", ">error", ">of the step"], rows, lines=True)
        worst = [row for row in self.ops if abs(row.difference_s) > 0.01 * self.total.measured_s][:_SHOWN]
        if worst:
            cells = [
                [row.name, str(row.rank), milliseconds(row.predicted_s), milliseconds(row.measured_s)] for row in worst
            ]
            text += "\n\nlargest differences\n" + table(["operation", ">rank", ">predicted ms", ">measured ms"], cells)
        for where, names in (("predicted", self.only_predicted), ("measured", self.only_measured)):
            if names:
                text += f"\nonly {where}: {', '.join(names[:8])}" + (
                    f" and {len(names) - 8} more" if len(names) > 8 else ""
                )
        if self.unmeasured:
            ranks = ", ".join(f"rank {rank}" for rank in self.unmeasured)
            text += f"\nwithout {ranks}, of which nothing was measured"
        return f"{text}\n{self.summary()}"

    def summary(self) -> str:
        """One line: how far off, and how far off one can tell."""
        error = self.total.error or 0.0
        of = f"median of {self.steps} steps" if self.steps > 1 else "one step"
        what = f"from the first operation of a step to its last ({of})"
        if self.mean:
            what = f"a step (mean of {self.steps}, which workers did without waiting for each other)"
        return (
            f"predicted {seconds(self.total.predicted_s)}, measured {seconds(self.total.measured_s)} {what}: error "
            f"{percent(error)}, noise floor {noise_words(self.noise)}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.title, "total": self.total.to_json(), "kinds": [row.to_json() for row in self.kinds],
            "ops": [row.to_json() for row in self.ops], "noise": self.noise, "steps": self.steps,
            "mean": self.mean, "unmeasured": list(self.unmeasured),
            "only_predicted": list(self.only_predicted), "only_measured": list(self.only_measured),
        }  # fmt: skip


def join(predicted: Timeline, measured: Timeline) -> Joined:
    """Two timelines of one plan, by operation: medians over the measured steps, and the last predicted step."""
    if predicted.title and measured.title and predicted.title != measured.title:
        raise InputError(
            "joining a predicted timeline with a measured one",
            f"one is of the plan {predicted.title!r}, the other of {measured.title!r}",
            f"--plan {measured.title!r}",
        )
    if predicted.world != measured.world:
        raise InputError(
            f"joining {predicted.title!r} with {measured.title!r}",
            f"one has {predicted.world} ranks, the other {measured.world}",
            "timelines of the same plan",
        )
    expected, seen = steps(predicted)[-1:], steps(measured)
    if not expected or not seen:
        raise InputError("joining timelines", "one of them has no events", "a timeline of at least one step")
    unmeasured = {event.rank for event in predicted.events} - {event.rank for event in measured.events}
    planned, real = _medians(expected, unmeasured), _medians(seen, unmeasured)
    ops = [Row(n, planned.get((n, k, r), 0.0), real.get((n, k, r), 0.0), r) for n, k, r in planned.keys() | real.keys()]
    kinds = {k for _, k, _ in planned.keys() | real.keys()}
    there = predicted.world - len(unmeasured)
    mean = [Row(kind, _sum(planned, kind) / there, _sum(real, kind) / there) for kind in sorted(kinds)]
    return Joined(
        title=measured.title or predicted.title,
        total=Row("step", expected[0].seconds, median(step.seconds for step in seen)),
        kinds=tuple(sorted(mean, key=_by_size)),
        ops=tuple(sorted((row for row in ops if row.name != WAIT), key=lambda row: (*_by_size(row), row.rank))),
        noise=noise_floor([step.seconds for step in seen]),
        steps=sum(step.of for step in seen),
        mean=seen[0].of > 1,
        only_predicted=_missing(planned, real),
        only_measured=_missing(real, planned),
        unmeasured=tuple(sorted(unmeasured)),
    )


def noise_floor(values: list[float]) -> float | None:
    """How far the medians of every other value are from those between, relative: less cannot be told from chance.

    >>> noise_floor([1.0, 1.2, 1.0, 1.2]), noise_floor([1.0])
    (0.18181818181818177, None)
    """
    if len(values) < 2:
        return None
    first, second = median(values[0::2]), median(values[1::2])
    middle = (first + second) / 2
    return abs(first - second) / middle if middle else 0.0


def noise_words(noise: float | None) -> str:
    """A noise floor in words.

    >>> noise_words(0.034), noise_words(None)
    ('3.4 %', 'not known')
    """
    return "not known" if noise is None else percent(noise)


def kind_words(kind: str) -> str:
    """A kind of operation in words.

    >>> kind_words("RECV_F"), kind_words("wait")
    ('receive activation', 'wait for other ranks')
    """
    return "wait for other ranks" if kind == WAIT else SPECS[Kind[kind]].what


Key = tuple[str, str, int]  # name, kind, rank


def _medians(found: Iterable[Step], without: Collection[int]) -> dict[Key, float]:
    values: dict[Key, list[float]] = defaultdict(list)
    for step in found:
        for share in (share for share in step.shares if share.rank not in without):
            values[share.name, share.kind, share.rank].append(share.seconds)
    return {key: median(several) for key, several in values.items()}


def _sum(of: dict[Key, float], kind: str) -> float:
    return sum(value for (_, k, _), value in of.items() if k == kind)


def _missing(here: dict[Key, float], there: dict[Key, float]) -> tuple[str, ...]:
    names = sorted({f"{n} on rank {r}" for n, k, r in here.keys() - there.keys() if k != WAIT})
    return tuple(names)


def _by_size(row: Row) -> tuple[float, str]:
    return -abs(row.difference_s), row.name


def _cells(words: str, row: Row, total: Row) -> list[str]:
    error = "–" if row.error is None else percent(row.error)
    share = row.measured_s / total.measured_s if total.measured_s else 0.0
    return [words, milliseconds(row.predicted_s), milliseconds(row.measured_s), error, percent(share)]
