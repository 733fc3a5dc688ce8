"""What `run` answers: what happened on real processes, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from trainplan.plan.text import brief, title
from trainplan.predict.predict import Prediction
from trainplan.report.joined import Joined, noise_words
from trainplan.report.table import milliseconds, table
from trainplan.search.replan import Replanned
from trainplan.units import gib, percent, seconds, significant


@dataclass(frozen=True)
class Ran:
    """The answer of `run`: what happened, beside what was predicted."""

    prediction: Prediction
    step_seconds: tuple[float, ...]  # after the warm-up, each of its slowest rank; none: the run was not longer
    losses: tuple[float, ...]
    peak_bytes: tuple[int | None, ...]  # of every rank; None: it was lost
    out: str
    drift: float  # how many times slower the reference kernel is now than when the profile was made; 0: not known
    joined: Joined | None = None  # None: too few steps were recorded
    warm_up: int = 0  # steps at the beginning, which do not count
    changes: tuple[Replanned, ...] = ()  # where workers came or went: the plan is the last one's
    lost: tuple[int, ...] = ()  # workers that died, and that asynchronous servers went on without
    untested: str = ""  # what of it nobody has seen work before
    notes: tuple[str, ...] = ()  # of the profile

    @property
    def step_s(self) -> float | None:
        """The median; None where all steps were warm-up."""
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def error(self) -> float | None:
        """Of the predicted step time, relative to the measured one."""
        return self.prediction.step_s / self.step_s - 1 if self.step_s else None

    @property
    def corrected_error(self) -> float | None:
        """The same with the machine as fast as it is now."""
        return self.prediction.step_s * self.drift / self.step_s - 1 if self.drift and self.step_s else None

    def __str__(self) -> str:
        lines = [f"ran {title(self.prediction.plan)}: {self.summary()}"]
        for change in self.changes:
            was, now = change.workers
            lines.append(f"workers changed, {was} → {now}: {title(change.before.plan)} → {title(change.plan)}")
        lines += [f"worker {rank} was lost, and the others went on without it" for rank in self.lost]
        if self.losses:
            lines.append(
                f"loss {self.losses[0]:.4f} → {self.losses[-1]:.4f} in {len(self.losses)} steps{self._diverged}"
            )
        if self.joined is not None:
            lines.append(str(self.joined))
        if self.memory is not None:
            lines.append(self._memory(*self.memory))
        lines += [self.untested] if self.untested else []
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, f"logs, timeline and results are in {self.out}"])

    @property
    def _diverged(self) -> str:
        """Where the loss stopped being a number, if it did."""
        first = next((step for step, loss in enumerate(self.losses, 1) if not isfinite(loss)), None)
        return f"; it is no finite number in step {first} of these, the first such" if first is not None else ""

    def summary(self) -> str:
        """Predicted and measured step, in one line."""
        words = f"predicted {seconds(self.prediction.step_s)} a step, measured "
        if self.step_s is None or self.error is None:
            least = self.warm_up + 1
            early = "come before the last change of workers, or warm up," if self.changes else "warm up"
            words += f"not known: the first {self.warm_up} steps {early} and do not count, so a run that tells it has "
            return words + f"at least {least} (--steps {least}), and {self.warm_up + 10} to tell it well"
        of = f"median of {len(self.step_seconds)} steps" if len(self.step_seconds) > 1 else "one step"
        words += f"{seconds(self.step_s)} on the slowest rank ({of}), error {percent(self.error)}"
        if self.corrected_error is not None and abs(self.drift - 1) > 0.02:
            speed = (
                f"{significant(self.drift)} × as slow" if self.drift > 1 else f"{significant(1 / self.drift)} × as fast"
            )
            words += f"; the machine is {speed} as when the profile was made, and with that in mind the error is "
            words += percent(self.corrected_error)
        return words

    def _memory(self, rank: int, expected: int, measured: int, context: int) -> str:
        """Predicted beside measured peak memory of the rank that is predicted to be fullest."""
        row = [f"peak memory of rank {rank}", gib(expected), gib(measured)]
        if self.prediction.device == "cpu":
            note = "measured is the resident memory of the process, with Python, torch and all libraries; "
            note += f"predicted is tensors, and {gib(context)} for these" if context else "predicted is tensors alone"
        else:
            note = "both are what torch allocates on the device"
            note += f"; driver and libraries take {gib(context)} more" if context else ""
        return f"{table(['', '>predicted', '>measured'], [row], lines=True)}\n{note}"

    @property
    def memory(self) -> tuple[int, int, int, int] | None:
        """(rank, bytes predicted, bytes measured, bytes that the device's context takes) of the fullest rank of those
        that were not lost; None where no rank's memory is known.

        On a GPU torch counts its own allocations, so the context is in neither number; on a CPU the resident memory
        of the process has everything, so what is known of the process itself is in the prediction too.
        """
        p = self.prediction
        context, known = p.peak_bytes - p.peak.bytes, dict(enumerate(self.peak_bytes))
        by_size = sorted(p.peaks, key=lambda peak: -peak.bytes)
        for peak in (p.peak, *by_size):
            if (measured := known.get(peak.rank)) is not None:
                return peak.rank, peak.bytes + (context if p.device == "cpu" else 0), measured, context
        return None

    def to_json(self) -> dict[str, Any]:
        memory = None
        if self.memory is not None:
            rank, expected, measured, _ = self.memory
            memory = {"rank": rank, "predicted_bytes": expected, "measured_bytes": measured}
        return {
            "predicted": self.prediction.to_json(), "step_s": self.step_s, "step_seconds": list(self.step_seconds),
            "warm_up": self.warm_up, "losses": list(self.losses), "peak_bytes": list(self.peak_bytes),
            "memory": memory, "error": self.error, "corrected_error": self.corrected_error, "drift": self.drift,
            "out": self.out, "lost": list(self.lost), "changes": [change.to_json() for change in self.changes],
            "joined": self.joined.to_json() if self.joined is not None else None, "untested": self.untested,
            "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """The answer of a dry `run`: the job, and how to start it."""

    prediction: Prediction
    job: str
    command: str
    untested: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        p = self.prediction
        fits = "fits" if p.fits else "DOES NOT FIT"
        memory = f"{gib(p.peak_bytes)} of {gib(p.limit_bytes)} ({fits})"
        lines = [
            f"{brief(p.plan)}: predicted {seconds(p.step_s)} a step, {memory}",
            f"job      {self.job}",
            f"start    {self.command}",
            *([self.untested] if self.untested else []),
            *(f"note     {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted": self.prediction.to_json(), "job": self.job, "command": self.command,
            "untested": self.untested, "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class RanElsewhere:
    """The answer of `run` on a machine that has started its ranks, but on which the results are not gathered."""

    host: str
    folder: str
    untested: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"the results of this run are on {self.host}, in {self.folder}"]
        lines += [self.untested] if self.untested else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        results = {"host": self.host, "folder": self.folder}
        return {"results": results, "untested": self.untested, "notes": list(self.notes)}


def summary(runs: tuple[Ran, ...]) -> str:
    """Several runs, a row each."""
    rows = [
        [
            title(ran.prediction.plan), milliseconds(ran.prediction.step_s),
            milliseconds(ran.step_s) if ran.step_s is not None else "not known",
            percent(ran.error) if ran.error is not None else "–",
            percent(ran.corrected_error) if ran.corrected_error is not None else "–",
            noise_words(ran.joined.noise if ran.joined is not None else None),
        ]
        for ran in runs
    ]  # fmt: skip
    headers = ["plan", ">predicted ms", ">measured ms", ">error", ">error without drift", ">noise floor"]
    return table(headers, rows, lines=True)
