"""What a table of steps says about predictions that are right but for one constant. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import exp, log
from statistics import mean, median
from typing import Any

from scipy.stats import kendalltau, spearmanr

Named = tuple[str, float, float]  # of whom, predicted, measured seconds


def ratios(rows: Sequence[Named], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Order, ratios, and errors with one constant, which for every row is that of the *other* rows.

    >>> found = ratios([("a", 1.0, 2.0), ("b", 2.0, 4.0), ("c", 4.0, 8.0)])
    >>> found["constant"], found["mean"], found["rank"]
    (2.0, 0.0, 1.0)
    """
    logs = [log(measured / predicted) for _, predicted, measured in rows]
    total, count = sum(logs), len(rows)
    errors = [exp((total - own) / (count - 1) - own) - 1 for own in logs]
    off = [abs(error) for error in errors]
    pairs = [exp(abs(a - b)) - 1 for a, b in combinations(logs, 2)]
    worst = max(range(count), key=lambda number: off[number])
    predicted, measured = [row[1] for row in rows], [row[2] for row in rows]
    whole = sum(measured) / sum(predicted)
    misplaced = sum(abs(whole * p - m) for p, m in zip(predicted, measured, strict=True)) / 2 / sum(measured)
    return {
        "rows": count, "constant": exp(total / count), "mean": mean(off), "median": median(off), "worst": off[worst],
        "worst_is": rows[worst][0], "ratios": mean(pairs), "rank": float(spearmanr(predicted, measured).statistic),
        "misplaced": misplaced,  # seconds that are at the wrong row, of all
        "kendall": float(kendalltau(predicted, measured).statistic), "left_out": sorted(set(left_out)),
        "errors": {name: error for (name, _, _), error in zip(rows, errors, strict=True)},
    }  # fmt: skip
