"""The answers of `trainplan bench`: what was measured, and how good predictions and recommendations were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trainplan import files
from trainplan.bench.results import Outcome
from trainplan.bench.scores import Errors, Judged, Pick, Summary
from trainplan.report.picture import blank, save
from trainplan.report.table import milliseconds, table
from trainplan.units import percent, some


@dataclass(frozen=True)
class Benched:
    """The answer of `bench run`."""

    outcomes: tuple[Outcome, ...]
    folder: str
    unfinished: bool
    again: str  # the command that goes on, or looks at the results
    left_out: tuple[str, ...] = ()  # cases that cannot be made here, and why

    def __str__(self) -> str:
        rows = [_case(outcome) for outcome in self.outcomes if outcome.results]
        headers = ["case", ">ran", ">failed", ">too big", "fastest", ">measured ms", ">predicted ms", ">noise"]
        lines = [table(headers, rows, lines=True), ""] if rows else []
        failures = [(o.name, r.asked, r.failure) for o in self.outcomes for r in o.results if r.failure]
        lines += [f"{name}: {asked}: {why}" for name, asked, why in failures]
        lines += [f"left out {why}" for why in self.left_out]
        lines += [""] * bool(failures or self.left_out)
        left = sum(not outcome.results for outcome in self.outcomes) - len(self.left_out)
        if self.unfinished:
            lines.append(f"time is up, and {some(left, 'case')} not begun; to go on:")
        else:
            lines.append(f"written  {self.folder}; to join it with the predictions:")
        return "\n".join([*lines, f"  {self.again}"])

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder, "unfinished": self.unfinished, "next": self.again, "left_out": list(self.left_out),
            "cases": [files.to_json(outcome) for outcome in self.outcomes],
        }  # fmt: skip


def _case(outcome: Outcome) -> list[str]:
    ran, failed = outcome.ran, [result for result in outcome.results if result.failure]
    too_big = sum(result.too_big for result in failed)
    cells = [outcome.name, str(len(ran)), str(len(failed) - too_big), str(too_big)]
    if not ran:
        return [*cells, "–", "–", "–", "–"]
    best = ran[0]
    floor = median(result.row.noise_floor for result in ran if result.row)
    seconds = [milliseconds(best.measured_s or 0.0), milliseconds(best.predicted_s)]
    return [*cells, best.asked, *seconds, percent(floor)]


@dataclass(frozen=True)
class Scored:
    """The answer of `bench accuracy`."""

    machines: tuple[str, ...]
    errors: dict[str, tuple[Errors, ...]]  # by system, network, data set, operation; all
    cases: tuple[Judged, ...]
    summaries: tuple[Summary, ...]
    rule: tuple[str, ...]  # the constant one: these systems, in this order
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"machine  {machine}" for machine in self.machines]
        for group, rows in self.errors.items():
            cells = [[e.group, str(e.count), percent(e.median), f"{e.worst:+.1%}", percent(e.noise)] for e in rows]
            lines += ["", table([group, ">runs", ">median error", ">worst", ">noise floor"], cells, lines=True)]
        if self.cases:
            lines += ["", *self._contests()]
        return "\n".join([*lines, *(f"written  {path}" for path in self.paths)])

    def _contests(self) -> list[str]:
        rows = [
            [case.name, case.best, milliseconds(case.best_s), percent(case.within),
             *(_pick(case.picks[way]) for way in ("ours", "thesis", "constant"))]
            for case in self.cases
        ]  # fmt: skip
        headers = ["case", "fastest", ">ms", ">within", "ours", "thesis", "constant rule"]
        lines = [table(headers, rows, lines=True), ""]
        for row in self.summaries:
            if not row.cases:
                lines.append(f"{_WAYS[row.way]}: nothing to propose (it needs results with a profile)")
                continue
            told = f"{row.hits} of {row.cases} hits ({row.hits / row.cases:.0%})"
            if row.mean_regret is not None and row.worst_regret is not None:
                told += f", mean regret {percent(row.mean_regret)}, worst {percent(row.worst_regret)}"
            told += f", {some(row.did_not_run, 'pick')} did not run" if row.did_not_run else ""
            lines.append(f"{_WAYS[row.way]}: {told}")
        rest = "".join(f"; where that did not run or was not tried, {system}" for system in self.rule[1:])
        lines.append(f"the constant rule, chosen knowing the results: always {self.rule[0]}{rest}" if self.rule else "")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "machines": list(self.machines),
            "errors": {group: [asdict(row) for row in rows] for group, rows in self.errors.items()},
            "cases": [asdict(case) for case in self.cases],
            "summaries": [asdict(row) for row in self.summaries],
            "rule": list(self.rule),
        }


_WAYS = {"ours": "ours", "thesis": "the thesis's equations", "constant": "the best constant rule"}


def _pick(pick: Pick) -> str:
    if not pick.system:
        return "–"
    told = "did not run" if pick.regret is None else f"+{100 * pick.regret:.1f} %"
    return f"{pick.system} {told}{'' if pick.hit else ' ✗'}"


def draw(points: Sequence[tuple[str, float, float]], cases: Sequence[Judged], path: str) -> None:
    """Predicted over measured seconds, by kind of plan; and the regret of each way to pick, the largest first."""
    figure = blank(11, 4.5)
    left, right = figure.subplots(1, 2)
    for kind in sorted({kind for kind, _, _ in points}):
        own = [(measured, predicted) for name, predicted, measured in points if name == kind]
        left.scatter(*zip(*own, strict=True), s=14, label=kind)
    ends = [min(m for _, _, m in points), max(m for _, _, m in points)]
    left.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.9, 1.1):
        left.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.5, linestyle="--")
    left.set(xscale="log", yscale="log", xlabel="measured seconds of a step", ylabel="predicted")
    left.legend(fontsize=6, ncols=2)
    for way, title in _WAYS.items():
        regrets = sorted(
            (100 * (case.picks[way].regret or 0.0) for case in cases if case.picks[way].system), reverse=True
        )
        right.plot(range(1, len(regrets) + 1), regrets, marker="o", markersize=3, label=title)
    right.set(xlabel="cases, the worst first", ylabel="regret, %")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    save(figure, path, "--picture")
