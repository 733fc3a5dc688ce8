"""What does not fit: by how much, and the smallest change that makes it fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainplan.errors import PlanError
from trainplan.plan.plan import WORDS, Plan
from trainplan.plan.text import brief
from trainplan.predict.predict import Prediction
from trainplan.search.answer import REJECTED, Rejected, overfull
from trainplan.search.best_first import WORK, Outcome, cost
from trainplan.search.changes import smallest_change
from trainplan.search.hopeless import Hopeless
from trainplan.solve.resolve import draft
from trainplan.units import gib

_PLAIN = {"zero": 0, "recompute": WORDS["recompute"].index("none"), "tp": 1, "spread": 0, "pairs": 1}
HINTS = WORK / 2  # passes that are simulated to find changes


def rejected(found: Outcome, fastest: float) -> list[Rejected]:
    """A row for each number of stages and order of work none of whose plans fit without a change, on as many devices
    as there are.

    One stage (what everybody tries first) is always among them. Those that might have been faster than the winner come
    first, then those that are least over.
    """
    hints = _Hints(found)
    shown = [hints.predict(found.space.sketch(row)) for row in _plainest(found)[:REJECTED]]
    shown = [p for p in shown if not p.fits]
    if not shown and not found.fitting:
        shown = found.standing.over[:REJECTED] or [hints.predict(found.space.sketch(0))]
    shown.sort(key=lambda p: (p.step_s >= fastest, p.fullness))
    return [Rejected(p, overfull(p), hints.change(p)) for p in shown]


def _plainest(found: Outcome) -> list[int]:
    """Rows that stand for what does not fit: of every number of stages and order of work, on as many devices as do not,
    with as many micro-batches as are worth trying for speed."""
    space = found.space
    over = ~found.known.fits
    simulated = {found.standing.rows[id(p)] for p in found.over}
    over[[row for row in simulated if row >= 0]] = True
    plain = np.ones(len(space), dtype=bool)
    for field, value in _PLAIN.items():
        plain &= space.column(field) == value
    pp, schedule, dp, micro = (space.column(field) for field in ("pp", "schedule", "dp", "micro"))
    rows = np.flatnonzero(plain)
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for row, *kind in np.column_stack([rows, pp[rows], schedule[rows], dp[rows]]).tolist():
        kinds.setdefault((kind[0], kind[1], kind[2]), []).append(row)
    chosen: dict[tuple[int, int], int] = {}
    for (stages, order, _), own in sorted(kinds.items(), key=lambda item: -item[0][2]):
        if all(over[row] for row in own) and (stages, order) not in chosen:
            few = [row for row in own if micro[row] <= 4 * max(1, stages)] or own
            chosen[stages, order] = max(few, key=lambda row: int(micro[row]) if stages > 1 else -int(micro[row]))
    return sorted(chosen.values(), key=lambda row: (pp[row] > 1, found.known.bytes[row], schedule[row]))


class _Hints:
    """Predictions of plans and of changes to them, as long as that is not too much work."""

    def __init__(self, found: Outcome) -> None:
        self.found, self.left = found, HINTS
        self.known: dict[tuple[Plan, int], Prediction] = {}
        self.hopeless = Hopeless(found.tables(0).profile, found.space.cluster)
        self.ruled_out: set[tuple[Plan, int]] = set()

    def predict(self, sketch: Plan, batch: int | None = None) -> Prediction:
        space = self.found.space
        key = sketch, batch or space.batch
        if key not in self.known:
            self.left -= cost(sketch)
            self.known[key] = draft(replace(sketch, stages=()), space.cluster, key[1], self.found.tables(0))
        return self.known[key]

    def change(self, p: Prediction) -> str:
        """The smallest that makes a plan fit; where that would be too much work to find, one that is known to."""

        def attempt(sketch: Plan, batch: int) -> Prediction | None:
            if self.left < cost(sketch) or (sketch, batch) in self.ruled_out:
                return None
            if (sketch, batch) not in self.known and self.hopeless(sketch, batch):
                # As much as if it had been simulated: what is found is the same, and sooner.
                self.left -= cost(sketch)
                self.ruled_out.add((sketch, batch))
                return None
            try:
                return self.predict(sketch, batch)
            except PlanError:
                return None

        found = smallest_change(p, self.found.space.cluster.world, attempt)
        if self.left < cost(p.plan) and self.found.fitting and "more memory" in found:
            best = self.found.fitting[0]
            return f"{brief(best.plan)} (peak {gib(best.peak_bytes)})"
        return found
