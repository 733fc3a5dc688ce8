"""What a table of steps says about predictions that are right but for one constant. No torch here.

The constant is a factor, for machines that are all a bit slower than predicted; or, where layers were timed one by one,
the seconds that each of them waits for the device and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from statistics import mean, median
from typing import Any

from scipy.stats import kendalltau, spearmanr

Named = tuple[str, float, float]  # of whom, predicted, measured seconds


@dataclass(frozen=True)
class Timed:
    """Layers that were timed one by one, and each one's forward pass until the device was idle again."""

    name: str
    layers: int
    forward: tuple[float, float]  # predicted, measured seconds of all of them
    backward: tuple[float, float] = (0.0, 0.0)

    @property
    def wait_s(self) -> float:
        """What a layer takes longer than predicted."""
        predicted, measured = self.forward
        return (measured - predicted) / self.layers

    def after(self, wait_s: float) -> Named:
        """Its seconds, if every layer waits so long."""
        predicted, measured = (ahead + back for ahead, back in zip(self.forward, self.backward, strict=True))
        return self.name, predicted + self.layers * max(0.0, wait_s), measured


def ratios(rows: Sequence[Named], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Order, ratios, and errors with one constant, which for every row is that of the *other* rows.

    >>> found = ratios([("a", 1.0, 2.0), ("b", 2.0, 4.0), ("c", 4.0, 8.0)])
    >>> found["constant"], round(found["mean"], 9), found["rank"]
    (2.0, 0.0, 1.0)
    """
    logs = _logs(rows)
    total, count = sum(logs), len(rows)
    errors = [exp((total - own) / (count - 1) - own) - 1 for own in logs]
    plain = {name: round(exp(-own) - 1, 4) for (name, _, _), own in zip(rows, logs, strict=True)}  # without a constant
    return {"rows": count, "constant": exp(total / count), "plain": plain} | _scores(rows, errors, left_out)


def waits(rows: Sequence[Timed], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """The same, where the constant is how long a layer waits: for every row the median of the *other* rows.

    >>> found = waits([Timed(name, n, (n * 1.0, n * 1.5)) for name, n in (("a", 1), ("b", 2), ("c", 4))])
    >>> found["wait_s"], found["mean"], found["rank"]
    (0.5, 0.0, 1.0)
    """
    own = [row.wait_s for row in rows]
    told = [row.after(median(own[:place] + own[place + 1 :])) for place, row in enumerate(rows)]
    errors = [exp(-off) - 1 for off in _logs(told)]
    return {"rows": len(rows), "wait_s": median(own)} | _scores(told, errors, left_out)


def _logs(rows: Sequence[Named]) -> list[float]:
    return [log(measured / predicted) for _, predicted, measured in rows]


def _scores(rows: Sequence[Named], errors: Sequence[float], left_out: Sequence[str]) -> dict[str, Any]:
    off = [abs(error) for error in errors]
    pairs = [exp(abs(a - b)) - 1 for a, b in combinations(_logs(rows), 2)]
    worst = max(range(len(rows)), key=lambda number: off[number])
    predicted, measured = [row[1] for row in rows], [row[2] for row in rows]
    whole = sum(measured) / sum(predicted)
    misplaced = sum(abs(whole * p - m) for p, m in zip(predicted, measured, strict=True)) / 2 / sum(measured)
    return {
        "mean": mean(off), "median": median(off), "worst": off[worst],
        "worst_is": rows[worst][0], "ratios": mean(pairs), "rank": float(spearmanr(predicted, measured).statistic),
        "misplaced": misplaced,  # seconds that are at the wrong row, of all
        "kendall": float(kendalltau(predicted, measured).statistic), "left_out": sorted(set(left_out)),
        "errors": {name: error for (name, _, _), error in zip(rows, errors, strict=True)},
    }  # fmt: skip
