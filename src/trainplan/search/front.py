"""Plans of a search, lowest bound first, as far as it looked at them."""

from __future__ import annotations

import heapq
from collections.abc import Collection

import numpy as np

from trainplan.program.program import Ints
from trainplan.search.columns import Space
from trainplan.search.floor import Floats

Cut = tuple[float, int, tuple[int, ...]]  # bound, row, cuts


class Front:
    """Some rows of a space: those that were not looked at yet, those that are cut, and those set aside."""

    def __init__(self, order: Ints, bounds: Floats) -> None:
        """`bounds`: of these rows, lowest first."""
        self.order, self.bounds, self.place = order, bounds, 0
        self.cut: list[Cut] = []  # a heap
        self.aside: list[tuple[float, int]] = []  # such as are too much work

    @property
    def lowest(self) -> float:
        """The lowest bound; without end where nothing is left."""
        first = float(self.bounds[self.place]) if self.place < len(self.order) else np.inf
        return min(first, self.cut[0][0]) if self.cut else first

    @property
    def fresh(self) -> bool:
        """Whether the lowest bound is that of a row which was not cut yet."""
        return not self.cut or self.cut[0][0] > self.lowest

    def next(self) -> int:
        """Of those that were not cut yet, the first."""
        self.place += 1
        return int(self.order[self.place - 1])

    def push(self, cut: Cut) -> None:
        heapq.heappush(self.cut, cut)

    def pop(self) -> Cut:
        return heapq.heappop(self.cut)

    def left(self, done: Collection[int]) -> Floats:
        """The bounds of all rows that were not simulated, nor ruled out."""
        rows = zip(self.bounds[self.place :].tolist(), self.order[self.place :].tolist(), strict=True)
        untouched = [bound for bound, row in rows if row not in done]
        return np.array(untouched + [bound for bound, row, *_ in (*self.cut, *self.aside) if row not in done])


def smaller(space: Space, order: Ints, bounds: Floats) -> list[Front]:
    """The plans that use one node, and those that use every larger number of devices but all; where there are some."""
    ranks, inside = space.ranks[order], len(space.cluster.nodes[0].devices)
    counts = [count for count in np.unique(ranks).tolist() if inside < count < ranks.max()]
    of = [ranks <= inside, *(ranks == count for count in counts)] if ranks.max(initial=0) > inside else []
    return [Front(order[own], bounds[own]) for own in of if own.any()]
