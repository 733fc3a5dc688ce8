"""What each command answers: a value that prints as text for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.describe import describe
from trainplan.plan.text import text as plan_text
from trainplan.plan.text import title
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.program.timeline import Timeline
from trainplan.report.joined import Joined, noise_words
from trainplan.report.lines import cluster_lines, error_line, mfu_line, mfu_words, model_line
from trainplan.report.table import gib_number, milliseconds, number, table
from trainplan.report.timeline import draw
from trainplan.search.recommend import Recommendation
from trainplan.units import MIB, count, gib, percent, seconds, significant

if TYPE_CHECKING:
    from trainplan.engine.compare import Comparison

_BLOCKS_SHOWN = 60


@dataclass(frozen=True)
class Profiled:
    """The answer of `profile`."""

    profile: Profile
    path: str = ""

    def __str__(self) -> str:
        profile = self.profile
        largest = profile.samples[-1]
        rows = [
            [
                block.name, count(sum(p.count for p in profile.parameters if p.blocks[0] == place)),
                milliseconds(block.forward_s[-1]), milliseconds(block.backward_s[-1]),
                significant(block.saved_bytes[-1] / MIB), significant(_out(profile, place, largest) / MIB),
            ]
            for place, block in enumerate(profile.blocks[:_BLOCKS_SHOWN])
        ]  # fmt: skip
        headers = ["block", ">parameters", ">forward ms", ">backward ms", ">saved MiB", ">out MiB"]
        lines = [
            model_line(profile, profile.batch),
            f"for a micro-batch of {largest}:",
            table(headers, rows, lines=True),
        ]
        if len(profile.blocks) > _BLOCKS_SHOWN:
            lines.append(f" … and {len(profile.blocks) - _BLOCKS_SHOWN} more blocks")
        for whole in profile.whole:
            parts = sum(profile.total(q, 0, len(profile.blocks), whole.samples) for q in ("forward_s", "backward_s"))
            parts += profile.update_s(0, len(profile.blocks))
            one = whole.forward_s + whole.backward_s + whole.update_s
            lines.append(
                f"a whole step of {whole.samples} takes {seconds(one)}; the sum of the blocks is "
                f"{seconds(parts)} ({percent(parts / one - 1)} off)"
            )
        return "\n".join([*lines, *([f"saved to {self.path}"] if self.path else [])])

    def to_json(self) -> dict[str, Any]:
        return dict(files.to_json(self.profile))


def _out(profile: Profile, block: int, samples: int) -> float:
    return sum(c.bytes_per_sample * samples + c.fixed_bytes for c in profile.crossings if c.producer == block)


@dataclass(frozen=True)
class Described:
    """The answer of `cluster`."""

    cluster: Cluster
    path: str = ""

    def __str__(self) -> str:
        notes = "".join(f"\n  {note}" for note in self.cluster.notes)
        return describe(self.cluster) + notes + (f"\nsaved to {self.path}" if self.path else "")

    def to_json(self) -> dict[str, Any]:
        return dict(files.to_json(self.cluster))


@dataclass(frozen=True)
class Predicted:
    """The answer of `predict`."""

    prediction: Prediction
    profile: Profile
    cluster: Cluster
    trace: str = ""

    def __str__(self) -> str:
        p = self.prediction
        price = f", {significant(p.price_per_epoch)} USD" if p.price_per_epoch else ""
        parts = p.breakdown
        shown = ", ".join(f"{kind} {gib(size)}" for kind, size in parts.items() if size)
        where = f"rank {p.peak.rank} at {p.peak.op or 'the start'}"
        verdict = "fits" if p.fits else f"DOES NOT FIT: {gib(p.peak_bytes - p.limit_bytes)} over"
        lines = [
            model_line(self.profile, p.batch),
            cluster_lines(self.cluster),
            f"plan     {plan_text(p.plan)}",
            "",
            f"step     {seconds(p.step_s)}, {significant(p.samples_per_s)} {self.profile.sample}s/s",
            f"epoch    {seconds(p.epoch_s)}{price}",
            f"memory   {verdict}; {where} has {gib(p.peak_bytes)} of {gib(p.limit_bytes)} ({shown})",
            f"bubble   {percent(p.bubble)} of device time without compute",
            f"comm     {seconds(p.exposed_comm_s)} a step exposed",
            f"MFU      {mfu_words(p.mfu)} %",
            error_line([p]),
            mfu_line([p]),
        ]
        return "\n".join([*lines, *([f"trace    {self.trace} (open in ui.perfetto.dev)"] if self.trace else [])])

    def to_json(self) -> dict[str, Any]:
        return {"workload": self.profile.workload, "cluster": self.cluster.name, **self.prediction.to_json()}


@dataclass(frozen=True)
class Ran:
    """The answer of `run`: what happened, beside what was predicted."""

    prediction: Prediction
    step_seconds: tuple[float, ...]  # after the warm-up, each of its slowest rank; none: the run was not longer
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    out: str
    drift: float  # how many times slower the reference kernel is now than when the profile was made; 0: not known
    joined: Joined | None = None  # None: too few steps were recorded
    warm_up: int = 0  # steps at the beginning, which do not count

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
        if self.losses:
            lines.append(f"loss {self.losses[0]:.4f} → {self.losses[-1]:.4f} in {len(self.losses)} steps")
        if self.joined is not None:
            lines.append(str(self.joined))
        if self.peak_bytes:
            lines.append(self._memory())
        return "\n".join([*lines, f"logs, timeline and results are in {self.out}"])

    def summary(self) -> str:
        """Predicted and measured step, in one line."""
        words = f"predicted {seconds(self.prediction.step_s)} a step, measured "
        if self.step_s is None or self.error is None:
            least = self.warm_up + 1
            words += f"not known: the first {self.warm_up} steps warm up and do not count, so a run that tells it has "
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

    def _memory(self) -> str:
        """Predicted beside measured peak memory of the rank that is predicted to be fullest."""
        rank, expected, measured, context = self.memory
        row = [f"peak memory of rank {rank}", gib(expected), gib(measured)]
        if self.prediction.device == "cpu":
            note = "measured is the resident memory of the process, with Python, torch and all libraries; "
            note += f"predicted is tensors, and {gib(context)} for these" if context else "predicted is tensors alone"
        else:
            note = "both are what torch allocates on the device"
            note += f"; driver and libraries take {gib(context)} more" if context else ""
        return f"{table(['', '>predicted', '>measured'], [row], lines=True)}\n{note}"

    @property
    def memory(self) -> tuple[int, int, int, int]:
        """(rank, bytes predicted, bytes measured, bytes that the device's context takes) of the fullest rank.

        On a GPU torch counts its own allocations, so the context is in neither number; on a CPU the resident memory
        of the process has everything, so what is known of the process itself is in the prediction too.
        """
        p = self.prediction
        expected = p.peak_bytes if p.device == "cpu" else p.peak.bytes
        return p.peak.rank, expected, self.peak_bytes[p.peak.rank], p.peak_bytes - p.peak.bytes

    def to_json(self) -> dict[str, Any]:
        rank, expected, measured, _ = self.memory if self.peak_bytes else (0, 0, 0, 0)
        memory = {"rank": rank, "predicted_bytes": expected, "measured_bytes": measured} if self.peak_bytes else None
        return {
            "predicted": self.prediction.to_json(), "step_s": self.step_s, "step_seconds": list(self.step_seconds),
            "warm_up": self.warm_up, "losses": list(self.losses), "peak_bytes": list(self.peak_bytes),
            "memory": memory, "error": self.error, "corrected_error": self.corrected_error, "drift": self.drift,
            "out": self.out, "joined": self.joined.to_json() if self.joined is not None else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """The answer of a dry `run`: the job, and how to start it."""

    prediction: Prediction
    job: str
    command: str

    def __str__(self) -> str:
        p = self.prediction
        fits = "fits" if p.fits else "DOES NOT FIT"
        return (
            f"{plan_text(p.plan)}: predicted {seconds(p.step_s)} a step, {gib(p.peak_bytes)} of {gib(p.limit_bytes)} "
            f"({fits})\njob      {self.job}\nstart    {self.command}"
        )

    def to_json(self) -> dict[str, Any]:
        return {"predicted": self.prediction.to_json(), "job": self.job, "command": self.command}


@dataclass(frozen=True)
class RanElsewhere:
    """The answer of `run` on a machine that has started its ranks, but on which the results are not gathered."""

    host: str
    folder: str

    def __str__(self) -> str:
        return f"the results of this run are on {self.host}, in {self.folder}"

    def to_json(self) -> dict[str, Any]:
        return {"results": {"host": self.host, "folder": self.folder}}


@dataclass(frozen=True)
class Recommended:
    """The answer of `recommend`."""

    recommendation: Recommendation
    next: tuple[str, ...] = ()  # commands
    runs: tuple[Ran, ...] = ()

    def __str__(self) -> str:
        r = self.recommendation
        lines = [model_line(r.profile, r.batch), cluster_lines(r.cluster)]
        pruned = f"{r.pruned:,} not, as they cannot be among the best"
        lines.append(
            f"search   {r.considered:,} plans considered, {r.simulated:,} simulated, {pruned}; {seconds(r.seconds)}"
        )
        lines += ["", self._plans() if r.ranked else "nothing fits"]
        if r.ranked:
            lines += ["", "why", *(f" {place:2}  {row.why}" for place, row in enumerate(r.ranked, 1))]
        if r.note and r.ranked:
            lines += ["", r.note]
        if r.rejected:
            lines += ["", "does not fit"]
            lines += [
                f"  {title(row.prediction.plan)}: {gib(row.over_bytes)} over ({row.why}); try {row.change}"
                for row in r.rejected
            ]
        lines += ["", mfu_line([row.prediction for row in r.ranked] or [r.single])]
        if r.ranked:
            lines.append(error_line(row.prediction for row in r.ranked))
        for ran in self.runs:
            lines += ["", str(ran)]
        if self.runs:
            lines += ["", "predicted beside measured", _summary(self.runs)]
        return "\n".join([*lines, *(f"next     {line}" for line in self.next)])

    def _plans(self) -> str:
        ranked = [row.prediction for row in self.recommendation.ranked]
        priced = any(p.price_per_epoch for p in ranked)
        sample = self.recommendation.profile.sample
        headers = [">#", "plan", ">devices", ">step ms", f">{sample}s/s", ">epoch", *([">USD/epoch"] if priced else [])]
        headers += [">MFU %", ">peak GiB", ">limit", "rank, at", ">bubble %", ">exposed ms"]
        rows = [
            [
                str(place), title(p.plan), str(p.plan.world), milliseconds(p.step_s), number(p.samples_per_s),
                seconds(p.epoch_s), *([number(p.price_per_epoch)] if priced else []),
                mfu_words(p.mfu), gib_number(p.peak_bytes), gib_number(p.limit_bytes),
                f"{p.peak.rank}, {p.peak.op or 'start'}", f"{p.bubble * 100:.1f}", milliseconds(p.exposed_comm_s),
            ]
            for place, p in enumerate(ranked, 1)
        ]  # fmt: skip
        return table(headers, rows, lines=True)

    def to_json(self) -> dict[str, Any]:
        data = self.recommendation.to_json()
        return {**data, "next": list(self.next), "runs": [ran.to_json() for ran in self.runs]}


def _summary(runs: tuple[Ran, ...]) -> str:
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


@dataclass(frozen=True)
class Compared:
    """The answer of `compare`: trained alone and under the plan."""

    comparison: Comparison
    ran: Ran

    def __str__(self) -> str:
        found = self.comparison
        losses = [
            f"{alone:.6f}, {together:.6f}"
            for alone, together in zip(found.losses_alone, found.losses_together, strict=True)
        ]
        lines = [
            f"{found.plan}: {found.steps} steps in float64, against the same pieces one after the other in one process",
            f"losses alone, under the plan: {'; '.join(losses)}",
            table(
                ["", ">largest difference", "at"],
                [[d.what, f"{d.largest:.1e}", d.where] for d in found.differences],
                lines=True,
            ),
            "the same: what differs is the order of additions" if found.same else "NOT THE SAME",
        ]
        return "\n".join([*lines, "", str(self.ran)])

    def to_json(self) -> dict[str, Any]:
        found = self.comparison
        return {
            "plan": found.plan, "steps": found.steps, "batch": found.batch, "same": found.same,
            "differences": [{"what": d.what, "largest": d.largest, "where": d.where} for d in found.differences],
            "losses_alone": list(found.losses_alone), "losses_together": list(found.losses_together),
            "run": self.ran.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class SystemRow:
    """A system of the literature, and what is there of it."""

    group: str
    key: str
    name: str
    needs: str
    has: str
    tests: dict[str, list[str]]  # for every letter in `has`: the ids of the tests that back it
    choices: str | None


@dataclass(frozen=True)
class Systems:
    """The answer of `systems`."""

    rows: tuple[SystemRow, ...]

    def __str__(self) -> str:
        cells, group = [], ""
        for row in self.rows:
            backed = ", ".join(f"{letter} {len(ids)}" for letter, ids in row.tests.items())
            shown = row.group if row.group != group else ""
            group = row.group
            cells.append([shown, row.key, row.name, row.needs, row.has or "–", backed, row.choices or ""])
        done = sum(set(row.needs) <= set(row.has) for row in self.rows)
        text = table(["group", "key", "system", "needs", "has", "tests", "as a plan"], cells, lines=True)
        legend = "P predict, S solve, R run: a letter is there when a test whose id carries the key backs it"
        return f"{text}\n{done} of {len(self.rows)} have all they need. {legend}."

    def to_json(self) -> list[dict[str, Any]]:
        return list(files.to_json(self.rows))


@dataclass(frozen=True)
class Drawn:
    """The answer of `timeline`."""

    timelines: tuple[Timeline, ...]
    width: int = 100
    step: int | None = None
    joined: Joined | None = None
    trace: str = ""

    def __str__(self) -> str:
        lines = [draw(timeline, self.width, self.step) for timeline in self.timelines]
        if self.joined is not None:
            lines.append(str(self.joined))
        return "\n\n".join([*lines, *([f"trace: {self.trace} (open in ui.perfetto.dev)"] if self.trace else [])])

    def to_json(self) -> dict[str, Any]:
        return {
            "timelines": [files.to_json(timeline) for timeline in self.timelines],
            "joined": self.joined.to_json() if self.joined is not None else None,
        }
