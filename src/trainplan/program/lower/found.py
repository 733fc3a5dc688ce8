"""Where the operations are: from what an operation is to its number, as arrays over micro-batches."""

from __future__ import annotations

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.program.program import Ints


class Found:
    """Numbers of operations by kind, stage, peer and unit.

    Every look-up is an array over all (replica, step, micro-batch), so that entry k of two look-ups belongs to the
    same micro-batch; -1 where there is no such operation.
    """

    def __init__(
        self, layout: Layout, steps: int, kind: Ints, stage: Ints, unit: Ints, micro: Ints, peer: Ints, replica: Ints,
        step: Ints,
    ) -> None:  # fmt: skip
        self.layout, self.steps = layout, steps
        self.places = len(layout.replicas) * steps * layout.plan.micro
        self._units = int(unit.max(initial=0)) + 1
        key = self._key(kind, stage, peer, unit)
        # Which keys occur, numbered in order: the rows of a dense table with one column a place.
        used = np.zeros(self._key(len(Kind), 0, 0, 0), dtype=np.int64)
        used[key] = 1
        self._row = np.cumsum(used) - 1
        self._row[used == 0] = -1
        self._table = np.full((int(used.sum()), self.places), -1, dtype=np.int64)
        place = (replica * steps + step) * layout.plan.micro + micro
        self._table[self._row[key], place] = np.arange(len(kind))
        k = np.arange(self.places)
        self.micro = k % layout.plan.micro
        self.step = k // layout.plan.micro % steps
        self.replica = k // (layout.plan.micro * steps)

    def _key(self, kind: Ints | int, stage: Ints | int, peer: Ints | int, unit: Ints | int) -> Ints:
        stages = self.layout.plan.pp
        return ((kind * stages + stage) * (stages + 1) + peer + 1) * self._units + unit  # type: ignore[return-value]

    def ops(self, kind: Kind, stage: int, peer: int = -1, unit: int = 0) -> Ints:
        """The operation of every place, or -1."""
        row = self._row[self._key(int(kind), stage, peer, unit)] if unit < self._units else -1
        return self._table[row] if row >= 0 else np.full(self.places, -1, dtype=np.int64)

    def backward(self, stage: int, final: bool) -> Ints:
        """The first or the final operation of the backward pass of every place: it may be cut into units."""
        layout = self.layout
        first, last = layout.plan.bounds[stage]
        if layout.recomputes:
            return self.ops(Kind.B, stage, unit=first if final else last - 1)
        whole = self.ops(Kind.B, stage)
        if not final or len(layout.buckets[stage]) < 2:
            return whole
        cut = self.ops(Kind.B, stage, unit=len(layout.buckets[stage]) - 1)
        return np.where(cut >= 0, cut, whole)

    def once(self, kind: Kind, stage: int, unit: int = 0) -> Ints:
        """Of an operation that comes once a step: one number for each (replica, step)."""
        return self.ops(kind, stage, unit=unit).reshape(-1, self.layout.plan.micro)[:, 0]
