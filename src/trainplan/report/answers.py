"""What each command answers: a value that prints as text for people and as JSON for programs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.describe import describe
from trainplan.cluster.notes import IN_TABLE
from trainplan.plan.text import brief, title
from trainplan.predict.occupancy import Occupancy
from trainplan.predict.predict import MEMORY_MARGIN, Prediction
from trainplan.profile.profile import Profile
from trainplan.program.timeline import Timeline
from trainplan.report.joined import Joined
from trainplan.report.lines import cluster_lines, epoch_words, error_line, mfu_line, mfu_words, model_line, search_lines
from trainplan.report.ran import Ran, summary
from trainplan.report.table import gib_number, milliseconds, number, table
from trainplan.report.timeline import draw
from trainplan.search.answer import Recommendation
from trainplan.units import MIB, count, gib, percent, seconds, significant

if TYPE_CHECKING:
    from trainplan.engine.compare import Comparison

_BLOCKS_SHOWN = 60
_TOLD = 1e-3  # of a step, that it waits for hosts at least where this is told


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
        notes = "".join(f"\n  {note}" for note in self.cluster.notes if not note.startswith(IN_TABLE))
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
        over = f": {gib(p.over_bytes)} over" if p.over_bytes else ": a host has too little for what is offloaded"
        if p.tensors_fit:
            over = f", though tensors would{over}"
        verdict = "fits" if p.fits else f"DOES NOT FIT{over}"
        lines = [
            model_line(self.profile, p.batch, p.plan.precision),
            cluster_lines(self.cluster),
            f"plan     {brief(p.plan)}",
            *([f"cut by   {p.plan.cut_by}"] if p.plan.cut_by else []),
            "",
            f"step     {seconds(p.step_s)}, {significant(p.samples_per_s)} {self.profile.sample}s/s",
            f"epoch    {seconds(p.epoch_s)}{price} ({epoch_words(self.profile)})",
            f"memory   {verdict}; {where} has {gib(p.peak_bytes)} of {gib(p.limit_bytes)} ({shown})",
            *([f"host     {gib(p.host_bytes)} of activations in the memory of a node"] if p.host_bytes else []),
            *([_occupancy(p.occupancy), _margin(p.occupancy)] if p.occupancy else []),
            f"bubble   {percent(p.bubble)} of device time without compute",
            *([_issued(p)] if p.host_s > _TOLD * p.step_s else []),
            f"comm     {seconds(p.exposed_comm_s)} a step exposed",
            f"MFU      {mfu_words(p.mfu)} %",
            error_line([p]),
            mfu_line([p]),
        ]
        return "\n".join([*lines, *([f"trace    {self.trace} (open in ui.perfetto.dev)"] if self.trace else [])])

    def to_json(self) -> dict[str, Any]:
        about = {"workload": self.profile.workload, "cluster": self.cluster.name, "notes": list(self.profile.notes)}
        return {**about, **self.profile.epoch, **self.prediction.to_json()}


def _issued(p: Prediction) -> str:
    """What a step waits for its hosts. (A pass takes at least as long as it is being issued, so that is no bubble.)"""
    share = f"{seconds(p.host_s)} a step ({percent(p.host_s / p.step_s)})"
    return f"issue    {share} waiting for hosts to issue passes; inside of these it is not in the bubble"


def _margin(found: Occupancy) -> str:
    """What is left of a device's memory, or what is short."""
    if found.over:
        return f"margin   none: {found.words}"
    return f"margin   {found.words}; the tensors of a plan that fits leave {percent(MEMORY_MARGIN)} free"


def _occupancy(found: Occupancy) -> str:
    """Memory as the tools of a GPU show it."""
    rows = [
        [name, gib_number(taken.allocated), gib_number(taken.reserved), gib_number(taken.visible)]
        for name, taken in found.rows
    ]
    return table([f"rank {found.rank}", ">allocated GiB", ">reserved", ">nvidia-smi"], rows)


@dataclass(frozen=True)
class Recommended:
    """The answer of `recommend`."""

    recommendation: Recommendation
    next: tuple[str, ...] = ()  # commands
    runs: tuple[Ran, ...] = ()

    def __str__(self) -> str:
        r = self.recommendation
        lines = [model_line(r.profile, r.batch), cluster_lines(r.cluster)]
        lines += search_lines(r)
        lines += ["", self._plans() if r.ranked else _nothing(r)]
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
        lines += [
            "",
            f"epoch    {epoch_words(r.profile)}",
            mfu_line([row.prediction for row in r.ranked] or [r.single]),
        ]
        if r.ranked:
            lines.append(error_line(row.prediction for row in r.ranked))
        for ran in self.runs:
            lines += ["", str(ran)]
        if self.runs:
            lines += ["", "predicted beside measured", summary(self.runs)]
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


def _nothing(r: Recommendation) -> str:
    """Why there is no table."""
    if not r.missed:
        return r.note
    near = "; ".join(f"{title(row.prediction.plan)} {row.by}" for row in r.missed)
    return f"nothing keeps to what was asked. The nearest: {near}"


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
        exactness = found.exactness
        rounding = "" if exactness.double else ", and rounding"
        lines = [
            f"{found.plan}: {found.steps} steps, against the same pieces one after the other in one process",
            f"both in {exactness}",
            *([f"not in float64: {exactness.why}"] if exactness.why else []),
            f"losses alone, under the plan: {'; '.join(losses)}",
            table(
                ["", ">largest difference", ">allowed", "at"],
                [[d.what, f"{d.largest:.1e}", f"{d.allowed:.0e}", d.where] for d in found.differences],
                lines=True,
            ),
            f"the same: what differs is the order of additions{rounding}" if found.same else "NOT THE SAME",
        ]
        return "\n".join([*lines, "", str(self.ran)])

    def to_json(self) -> dict[str, Any]:
        found = self.comparison
        return {
            "plan": found.plan, "steps": found.steps, "batch": found.batch, "same": found.same,
            "compared_in": found.exactness.to_json(),
            "differences": [
                {"what": d.what, "largest": d.largest, "allowed": d.allowed, "where": d.where}
                for d in found.differences
            ],
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
    step: int | None = None  # the first that is drawn; None: the first there is
    steps: int = 1
    joined: Joined | None = None
    trace: str = ""
    csv: str = ""
    again: str = ""  # the plan line that takes that file back

    def __str__(self) -> str:
        lines = [draw(timeline, self.width, self.step, self.steps) for timeline in self.timelines]
        if self.joined is not None:
            lines.append(str(self.joined))
        if self.csv:
            lines.append(f"order of work: {self.csv} (edit it, and give it back)\n  --plan {shlex.quote(self.again)}")
        return "\n\n".join([*lines, *([f"trace: {self.trace} (open in ui.perfetto.dev)"] if self.trace else [])])

    def to_json(self) -> dict[str, Any]:
        return {
            "timelines": [files.to_json(timeline) for timeline in self.timelines],
            "joined": self.joined.to_json() if self.joined is not None else None,
            **({"csv": self.csv, "plan": self.again} if self.csv else {}),
        }
