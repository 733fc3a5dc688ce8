"""What we know of our own error: read from the measurements that are kept with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

from trainplan.plan.plan import Plan


@dataclass(frozen=True)
class Accuracy:
    """How far predictions of this kind were off where we measured them."""

    kind: str  # single, dp, pipeline
    median: float | None  # relative; None: never measured
    worst: float | None
    runs: int
    source: str

    def __str__(self) -> str:
        if self.median is None or self.worst is None:
            return f"not measured for {self.kind} ({self.source})"
        return f"median {self.median:.0%}, worst {self.worst:.0%} over {self.runs} runs ({self.source})"


def plan_kind(plan: Plan) -> str:
    """The kind of plan that errors are grouped by.

    >>> from trainplan.plan.plan import plan
    >>> plan_kind(plan(dp=4)), plan_kind(plan(dp=2, pp=2, stages=(1,), blocks=2))
    ('dp', 'dp × pipeline')
    """
    if plan.pp == 1:
        return "single" if plan.dp == 1 else "dp"
    return "pipeline" if plan.dp == 1 else "dp × pipeline"


@cache
def _table() -> dict[str, dict[str, object]]:
    path = package_files("trainplan").joinpath("bench", "accuracy.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def known_error(plan: Plan, profile_kind: str, device: str = "cpu", compiled: bool = False) -> Accuracy:
    """The error that we measured for plans of this kind with such profiles: what was measured on CPUs says nothing of
    GPUs, and eager blocks nothing of compiled ones."""
    kind = plan_kind(plan)
    row = _table().get(f"{profile_kind} {device} {'compiled' if compiled else 'eager'} {kind}")
    if row is None:
        return Accuracy(kind, None, None, 0, f"{profile_kind} profile")
    return Accuracy(kind, float(row["median"]), float(row["worst"]), int(row["runs"]), str(row["source"]))  # type: ignore[arg-type, call-overload]
