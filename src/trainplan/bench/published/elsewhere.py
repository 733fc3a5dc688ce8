"""How sure a step is that is predicted for a machine of which nobody here has measured anything.

Each published table of steps has rows that were predicted as for anybody who asks, with no constant fitted to any of
them. How far these are off, over all tables, is what is told of such predictions: every table counts as much as every
other, whether it has ten rows or hundreds. Neither how near a device is to one that was measured nor which system runs
on it says more: the H100, whose rates are nearest to the H200's, is the one whose steps were furthest off (FSDP's, by
28 % in the median).

Not among them are layers and collectives that were timed by themselves, which are no steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

GRIDS, SHARDED = "vtrain_single_node_subset.csv", "llm_foundry_mpt_subset.csv"
NETWORKS = (
    "timm_train_rtx3090_subset.csv", "pytorch_gpu_benchmark_ryujaehun_subset.csv", "lambda_labs_pytorch_subset.csv",
)  # fmt: skip
AS_ASKED = "no labelled row, scaled from the H200"  # of the grids
HALF, MOST = 0.5, 0.9  # shares of steps that are told of


def as_asked(data: dict[str, Any]) -> dict[str, list[float]]:
    """By table, the errors of its rows, from what `bench published` has found."""
    found = {
        GRIDS: list(data[GRIDS][AS_ASKED]["errors"]),
        SHARDED: [e for row in data[SHARDED].values() if isinstance(row, dict) for e in row["scaled"]["errors"]],
    }
    for name in NETWORKS:
        found[name] = [error for row in data[name].values() for error in row["plain"].values()]
    return found


def within(tables: Iterable[Sequence[float]], share: float) -> float:
    """The least error within which that share of rows is, if all tables count alike.

    >>> within([[0.1, -0.2], [0.3, 0.3, 0.3, 0.4]], 0.5), within([[0.1, -0.2], [0.3, 0.3, 0.3, 0.4]], 0.9)
    (0.2, 0.4)
    """
    rows = sorted((abs(error), 1 / len(table)) for table in tables for error in table)
    left = share * sum(weight for _, weight in rows)
    for error, weight in rows:
        left -= weight
        if left <= 1e-9:
            return error
    raise ValueError("no rows")


def told(errors: dict[str, list[float]]) -> dict[str, Any]:
    """What these tables have us tell, rounded up to a thousandth, so that no fewer are inside."""
    tables = list(errors.values())
    half, most, all_ = (ceil(1000 * within(tables, share)) / 1000 for share in (HALF, MOST, 1.0))
    return {
        "median": half, "within": most, "worst": all_, "runs": sum(map(len, tables)),
        "source": f"{len(tables)} published tables, of machines that nobody here has; docs/accuracy.md",
    }  # fmt: skip


def inside(table: Sequence[float], error: float) -> float:
    """The share of a table's rows that are no further off.

    >>> inside([0.1, -0.2, 0.3, 0.4], 0.2)
    0.5
    """
    return sum(abs(own) <= error for own in table) / len(table)
