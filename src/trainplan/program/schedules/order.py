"""The order of work on one rank, as schedules write it down.

An order is an array with one row an operation: kind, pipeline, stage, micro-batch, slice. Schedules do not append row
by row (a search makes thousands of lists of 10⁵ rows); they give every operation a **slot**, a number that says when
its turn is compared with the others on its rank, or they write the *pattern* of kinds and stages and let the
micro-batches be counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainplan.lasting import lasting
from trainplan.program.ops import Kind

Order = NDArray[np.int64]
Ints = NDArray[np.int64]
COLUMNS = ("kind", "pipeline", "stage", "micro_batch", "slice")


@dataclass(frozen=True)
class Size:
    """What a schedule is a function of."""

    ranks: int
    micro_batches: int
    chunks: int = 1  # stages a rank
    pairs: int = 1  # of pipelines in opposite directions
    slices: int = 1  # parts of every sequence
    spread: tuple[int, ...] = ()  # ranks of each stage, where they differ; `ranks` then counts the stages

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


class Orders(tuple[Order, ...]):
    """The orders of all ranks of a replica, which many plans share, with what was worked out of them."""

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is made of these orders, made once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @lasting
    def _known(self) -> dict[Hashable, Any]:
        return {}


def rows(
    kind: Kind, stage: int | Ints, micro_batch: Ints, pipeline: int | Ints = 0, slice_: int | Ints = 0
) -> NDArray[np.int64]:
    """Operations of one kind; what is one number stands for all of them.

    >>> rows(Kind.F, 2, np.arange(2)).tolist()
    [[0, 0, 2, 0, 0], [0, 0, 2, 1, 0]]
    """
    found = np.empty((len(micro_batch), len(COLUMNS)), dtype=np.int64)
    found[:, 0], found[:, 1], found[:, 2], found[:, 3], found[:, 4] = kind, pipeline, stage, micro_batch, slice_
    return found


def by_slot(*parts: tuple[Order, Ints]) -> Order:
    """The operations of all parts, in the order of their slots.

    >>> forward, backward = rows(Kind.F, 0, np.arange(2)), rows(Kind.B, 0, np.arange(2))
    >>> by_slot((forward, np.array([0, 2])), (backward, np.array([1, 3])))[:, 0].tolist()    # F0 B0 F1 B1
    [0, 1, 0, 1]
    """
    slots = np.concatenate([slot for _, slot in parts])
    return np.concatenate([part for part, _ in parts])[np.argsort(slots, kind="stable")]


def counted(
    sorts: Sequence[tuple[Kind, int, int]], pattern: Sequence[tuple[str, int]], micro_batches: Sequence[Ints]
) -> Order:
    """The operations of a pattern in which the n-th of its sort is for the n-th micro-batch.

    A sort is (kind, pipeline, stage), and the pattern says how often which of them follow each other: ("01", 3) is the
    first and the second, three times. `micro_batches[pipeline]` are those that the pipeline sees, in order.

    >>> counted([(Kind.F, 0, 1), (Kind.B, 0, 1)], [("0", 1), ("01", 1), ("1", 1)], [np.array([4, 5])])[:, 3].tolist()
    [4, 5, 4, 5]
    """
    sort = np.concatenate([np.tile(np.array([int(c) for c in word]), times) for word, times in pattern])
    found = np.zeros((len(sort), len(COLUMNS)), dtype=np.int64)
    found[:, :3] = np.array(sorts)[sort]
    for number, (_, pipeline, _) in enumerate(sorts):
        places = np.flatnonzero(sort == number)
        found[places, 3] = micro_batches[pipeline][: len(places)]
    return found


def in_turn(alone: Sequence[Order], spread: Sequence[int]) -> list[Order]:
    """The orders of all ranks of stages that have several, from the list that each stage has alone: micro-batch t is
    for rank t mod r of a stage with r. Legal again, since every rank does a part of a legal list in the same order.

    >>> stages = [rows(Kind.F, stage, np.arange(3)) for stage in range(2)]
    >>> [order[:, 3].tolist() for order in in_turn(stages, (2, 1))]
    [[0, 2], [1], [0, 1, 2]]
    """
    orders = []
    for order, ranks in zip(alone, spread, strict=True):
        lines = order.copy()
        lines[:, 1] = order[:, 3] % math.lcm(*spread)
        orders += [lines[order[:, 3] % ranks == turn] for turn in range(ranks)]
    return orders


def only(order: Order, micro_batches: int) -> Order:
    """The order without the micro-batches beyond so many: legal again, since whole micro-batches go."""
    return order[order[:, 3] < micro_batches]
