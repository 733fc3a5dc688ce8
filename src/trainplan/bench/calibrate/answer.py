"""What `trainplan calibrate` answers: the constants that moved, and how right unseen runs are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainplan.bench.calibrate.calibrate import Calibration, Error
from trainplan.report.table import table
from trainplan.units import percent, some


@dataclass(frozen=True)
class Calibrated:
    """The answer of `calibrate`."""

    found: Calibration
    machines: tuple[str, ...]
    left_out: tuple[str, ...]
    path: str  # of the file that was written; "": none was
    asked: str  # for; "": for none

    def __str__(self) -> str:
        found = self.found
        lines = [f"cluster  {found.cluster.name}", *(f"machine  {machine}" for machine in self.machines)]
        lines += [f"left out {why}" for why in self.left_out]
        rows = [_cells(error) for error in (found.fitted, *found.held_out)]
        headers = ["error of steps", ">runs", ">median before", ">after", ">mean before", ">after", ">worst", ">after"]
        lines += ["", table(headers, rows, lines=True)]
        if len(found.splits) > 1:
            rows = [_cells(error) for error in found.splits]
            lines += ["", "calibrated without each of these, and held against it", table(headers, rows, lines=True)]
        moved = [change for change in found.changes if change.moved]
        if moved:
            rows = [[c.name, c.what, *c.told, _times(c.before, c.after), str(c.joins), c.why] for c in moved]
            lines += ["", table(["constant", "", ">before", ">after", ">change", ">joins", ""], rows, lines=True)]
        stayed: dict[str, list[str]] = {}
        for change in found.changes:
            if not change.moved:
                stayed.setdefault(change.why, []).append(change.name)
        lines += ["", *(f"as before, since {why}: {', '.join(names)}" for why, names in stayed.items())]
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        found = self.found
        worse = [error for error in found.held_out if error.worse]
        if self.path:
            told = f"written  {self.path}; to use it: --cluster {self.path}"
            return told if found.helps else f"{told} (forced: {_worse(worse)})"
        if not any(change.moved for change in found.changes):
            return "nothing is to be changed: no constant makes runs more right that it was not fitted on"
        if worse:
            return f"kept as it was: {_worse(worse)}" + (f", so {self.asked} is not written" if self.asked else "")
        return "to write it: --output cluster.yaml"

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "cluster": found.cluster.name, "machines": list(self.machines), "left_out": list(self.left_out),
            "helps": found.helps, "written": self.path, "fitted": asdict(found.fitted),
            "held_out": [asdict(error) for error in found.held_out],
            "splits": [asdict(error) for error in found.splits],
            "constants": [asdict(change) for change in found.changes],
        }  # fmt: skip


def _cells(error: Error) -> list[str]:
    pairs = [f"{value:+.1%}" for value in error.worst]
    sizes = [percent(value) for pair in (error.median, error.mean) for value in pair]
    return [error.of, str(error.runs), *sizes, *pairs]


def _times(before: float, after: float) -> str:
    return f"× {after / before:.2f}" if before else "from nought"


def _worse(worse: list[Error]) -> str:
    told = [f"{percent(e.mean[0])} → {percent(e.mean[1])} {e.of} ({some(e.runs, 'run')})" for e in worse]
    return f"mean errors get worse: {', '.join(told)}" if told else "nothing was to be changed"
