"""What methods raise and lower, as a table: each number with its arrow, and what a survey says where it differs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainplan import files
from trainplan.report.table import table
from trainplan.study.influence import COLUMNS, METHODS, Influence, agrees, arrow
from trainplan.units import GIB, significant

TITLES = {
    "activations": ">activations", "weights": ">weights", "activation_gradients": ">activation grads",
    "weight_gradients": ">weight grads", "samples": ">samples", "flops": ">TFLOP", "peak_bytes": ">peak GiB",
}  # fmt: skip


@dataclass(frozen=True)
class Influences:
    """The answer of `study methods`."""

    found: tuple[Influence, ...]
    workload: str
    cluster: str
    batch: int
    made: str
    command: str
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = []
        for line in lines([asdict(row) for row in self.found]):
            rows.append([line["method"], *(line["cells"] or [""] * len(TITLES)), line["differs"]])
            rows.append([f"  {line['plan']}", *([""] * (len(TITLES) + 1))])
        words = [f"{self.workload} on {self.cluster}: a step of {self.batch}, beside one device or data parallelism"]
        words += [table(["method", *TITLES.values(), "survey says"], rows, lines=True), ""]
        words.append("GiB that all devices send together, to each other and to their hosts; the most samples that go")
        words.append("through a device and fit; ↑ ↓ = beside the method above that is compared with")
        return "\n".join([*words, *(f"written  {path}" for path in self.paths)])

    def to_json(self) -> dict[str, Any]:
        rest = {"made": self.made, "command": self.command, "workload": self.workload, "cluster": self.cluster}
        return rest | {"batch": self.batch, "rows": [asdict(row) for row in self.found]}

    def save(self, path: str) -> None:
        files.write(path, "methods", self.to_json())


def lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every method: its plan, its cells with arrows (none: there is no plan for it yet), and where a survey
    has other arrows."""
    known, found = {row["method"]: row for row in rows}, []
    for method in METHODS:
        row = known.get(method.name)
        if row is None:
            plan = f"not yet there: {', '.join(method.keys)}"
            found.append({"method": method.name, "plan": plan, "cells": [], "arrows": [], "differs": ""})
            continue
        beside = known.get(method.beside)
        arrows = [arrow(row[name], beside[name]) if beside else "" for name in COLUMNS]
        cells = [f"{_number(name, row[name])} {sign}".rstrip() for name, sign in zip(COLUMNS, arrows, strict=True)]
        found.append(
            {
                "method": method.name, "plan": row["plan"], "cells": cells, "arrows": arrows,
                "differs": _differs(method.survey.split(), arrows),
            }
        )  # fmt: skip
    return found


def _differs(survey: list[str], arrows: list[str]) -> str:
    """The columns of which a survey says something else, and what."""
    pairs = zip(COLUMNS, survey, arrows, strict=False)
    others = [f"{TITLES[name].strip('>')} {theirs}" for name, theirs, ours in pairs if not agrees(ours, theirs)]
    return ", ".join(others)


def _number(name: str, value: float) -> str:
    if name == "samples":
        return f"{value}"
    if name == "flops":
        return significant(value / 1e12)
    return significant(value / GIB) if value else "0"
