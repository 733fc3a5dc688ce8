"""Where the operations are: from what an operation is to its number, as arrays over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.rows import Table
from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints


class Found:
    """Numbers of operations by kind, stage, peer and unit.

    A look-up gives one row for each stage that is asked for and one column for each place, which is a (replica, step,
    micro-batch): so the same entry of two look-ups belongs to the same micro-batch. -1: there is no such operation.
    """

    def __init__(self, layout: Layout, steps: int, table: Table, row: Ints, micro: Ints, step: Ints) -> None:
        self.layout, self.steps = layout, steps
        self.kind, self.rank, self.step = table.kind[row], table.rank[row], step  # of every operation
        plan = layout.plan
        self.places = len(layout.replicas) * steps * plan.micro
        # Rows of several replicas, or of several bodies, are the same operation for other places.
        names = zip(table.kind.tolist(), table.stage.tolist(), table.peer.tolist(), table.unit.tolist(), strict=True)
        self._line: dict[tuple[int, int, int, int], int] = {}
        line = np.array([self._line.setdefault(name, len(self._line)) for name in names], dtype=np.int64)
        # One line more, which stays empty: line -1.
        self._numbers = np.full((len(self._line) + 1, self.places), -1, dtype=np.int64)
        replica = np.searchsorted(layout.replicas, table.replica)
        self._numbers[line[row], (replica[row] * steps + step) * plan.micro + micro] = np.arange(len(row))
        place = np.arange(self.places)
        self.replica = place // (plan.micro * steps)
        samples = np.array(layout.sizes, dtype=np.int64)[np.array(layout.replicas)[self.replica], place % plan.micro]
        self._sizes, self._size = np.unique(samples, return_inverse=True)

    def ops(self, kind: Kind, stages: Sequence[int], peers: Sequence[int] = (), units: Sequence[int] = ()) -> Ints:
        """The operation of every place, a row for each stage (with its peer and its unit)."""
        names = zip(stages, peers or (-1,) * len(stages), units or (0,) * len(stages), strict=True)
        return self._numbers[[self._line.get((int(kind), *name), -1) for name in names]]

    def backward(self, stages: Sequence[int], final: bool) -> Ints:
        """The first or the final operation of the backward pass of every place: it may be cut into units."""
        layout = self.layout
        if layout.recomputes:
            bounds = [layout.plan.bounds[stage] for stage in stages]
            return self.ops(Kind.B, stages, units=[first if final else last - 1 for first, last in bounds])
        whole = self.ops(Kind.B, stages)
        if not final:
            return whole
        cut = self.ops(Kind.B, stages, units=[max(0, len(layout.buckets[stage]) - 1) for stage in stages])
        return np.where(cut >= 0, cut, whole)

    def adds(self, stages: Sequence[int]) -> Bools:
        """Whether the backward pass of every place finds gradients that it adds to; the first of a step does where
        buckets keep them."""
        begin = self.passes(self.backward(stages, final=False))
        first = begin == begin.min(axis=2, keepdims=True)
        if self.layout.plan.dp > 1 and not self.layout.gathers:
            first[:] = False
        return np.asarray(~first.reshape(len(stages), self.places))

    def once(self, kind: Kind, stages: Sequence[int], units: Sequence[int] = ()) -> Ints:
        """Of operations that come once a step: a column for each (replica, step)."""
        return self.ops(kind, stages, units=units)[:, :: self.layout.plan.micro]

    def shared(self, kind: Kind, stages: Sequence[int], units: Sequence[int] = ()) -> Ints:
        """Of collectives over all replicas, which are found under the first: the same number for each of them."""
        return np.tile(self.once(kind, stages, units)[:, : self.steps], (1, len(self.layout.replicas)))

    def passes(self, ops: Ints) -> Ints:
        """The operations of every step together: (stage, replica and step, micro-batch)."""
        return ops.reshape(len(ops), len(self.layout.replicas) * self.steps, self.layout.plan.micro)

    def by_size(self, of: Callable[[int, int], float], count: int) -> Ints:
        """of(thing, samples) for so many things and every place, worked out once for each size that occurs."""
        table = [[round(of(thing, int(size))) for size in self._sizes] for thing in range(count)]
        return np.array(table, dtype=np.int64).reshape(count, len(self._sizes))[:, self._size]
