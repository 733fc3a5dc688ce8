"""Where the operations are: from what an operation is to its number, as arrays over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any

import numpy as np

from trainplan.lasting import lasting
from trainplan.program.lower.buckets import kept
from trainplan.program.lower.distinct import distinct
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.passes import (
    FINAL_BACK,
    FINAL_FORWARD,
    FIRST_BACK,
    FIRST_FORWARD,
    GATHERING,
    GIVING,
    passes_of,
)
from trainplan.program.lower.rows import Table
from trainplan.program.ops import COLLECTIVES, SHARED_OUT, Kind
from trainplan.program.program import Bools, Ints, are, nonzero
from trainplan.program.text import WITHOUT_MICRO_BATCH

_WHOLE, _SHARED_OUT, _COLLECTIVE = are(WITHOUT_MICRO_BATCH), are(SHARED_OUT), are(COLLECTIVES)
_NORM, _REDUCE_GRAD, _BARRIER = int(Kind.NORM), int(Kind.REDUCE_GRAD), int(Kind.BARRIER)
NEVER = np.iinfo(np.int64).max

# What an operation is, as one number: its kind, stage, peer (or -1) and unit have 5 bits, 14, 14 and 30.
_KIND, _STAGE, _PEER = 58, 44, 30


class Found:
    """Numbers of operations by kind, stage, peer and unit.

    Of operations on micro-batches a look-up gives one row for each stage that is asked for and one column for each
    place, which is a (replica, step, micro-batch): so the same entry of two look-ups belongs to the same micro-batch.
    Where sequences are cut, the slices of a micro-batch have a place each, side by side.
    Of what comes once a step there is a row for each copy of a stage (`Holding`) and a column for each step.
    -1: there is no such operation.
    """

    def __init__(
        self, layout: Layout, steps: int, table: Table, row: Ints, piece: Ints, step: Ints, phase: Ints
    ) -> None:  # fmt: skip
        self.layout, self.steps = layout, steps
        plan = layout.plan
        # Of every operation; its replica among those that have lists, which are the first, or all of them.
        self.kind, self.rank, self.unit, self.replica_of = (
            column[row] for column in (table.kind, table.rank, table.unit, table.replica)
        )  # fmt: skip
        self.step = step
        # Of every place.
        self.places = len(layout.replicas) * steps * plan.pieces
        places = np.arange(self.places)
        self.replica, self.piece = places // (steps * plan.pieces), places % plan.pieces
        self._sizes, which = layout.kinds_of_amount
        self.size = which[np.array(layout.replicas)[self.replica], self.piece]
        self._tables: dict[Hashable, Ints] = kept(layout.profile, ("tables", plan.bounds, tuple(self._sizes)), dict)

        place = (self.replica_of * steps + step) * plan.pieces + piece
        self._line, self._numbers = self._of_micro_batches(table, row, place)
        self.passes = passes_of(self.kind, table.stage[row], place, plan.depth, self.places)
        self._once, self._by_step = self._once_a_step(table, row)
        self.barriers = np.full((len(layout.replicas), steps, int(phase.max(initial=0)) + 1), -1, dtype=np.int64)
        if layout.in_phases:
            met = nonzero(self.kind == _BARRIER)
            self.barriers[self.replica_of[met], step[met], phase[met]] = met  # of a replica, in a step, after a phase

    def _of_micro_batches(self, table: Table, row: Ints, place: Ints) -> tuple[dict[int, int], Ints]:
        """From what an operation is to a line of numbers; and these, by line and place."""
        # Rows of several replicas, or of several bodies, are the same operation for other places.
        names = table.kind << _KIND | table.stage << _STAGE | table.peer + 1 << _PEER | table.unit
        first, line = distinct(names)
        numbers = np.full((len(first) + 1, self.places), -1, dtype=np.int64)  # the last line, which is -1, stays empty
        ops = nonzero(~_WHOLE[self.kind])
        numbers[line[row[ops]], place[ops]] = ops
        # What replicas do together is each one's, whichever of them it stands for.
        plan = self.layout.plan
        sharers = min(plan.sharers, len(self.layout.replicas)) if plan.zero else 1
        if sharers > 1:
            ops = ops[_SHARED_OUT[self.kind[ops]]]
            apart = self.steps * plan.pieces  # places of one replica and the next
            of_first = place[ops] - self.replica_of[ops] % sharers * apart
            for sharer in range(sharers):
                numbers[line[row[ops]], of_first + sharer * apart] = ops
        return dict(zip(names[first].tolist(), range(len(first)), strict=True)), numbers

    def _once_a_step(self, table: Table, row: Ints) -> tuple[dict[tuple[int, int, int, int], int], Ints]:
        """From kind, stage, unit and rank (of what all copies do together: -1, whichever of them it stands for) to a
        line of numbers; and these, by line and step."""
        layout = self.layout
        ops = nonzero(_WHOLE[self.kind] & (self.kind != _BARRIER))
        first, which = distinct(row[ops])  # every step has the same rows
        rows = row[ops[first]]
        lines: dict[tuple[int, int, int, int], int] = {}
        line = []  # of each row
        columns = (table.kind[rows], table.stage[rows], table.unit[rows], table.rank[rows], table.replica[rows])
        for kind, stage, unit, rank, replica in zip(*[column.tolist() for column in columns], strict=True):
            where = rank
            if kind == _NORM:
                stage, where = 0, layout.answering(replica)
            elif _COLLECTIVE[kind]:
                across = kind == _REDUCE_GRAD and layout.units[stage] and unit < layout.first_tie
                where = replica % layout.plan.sharers if across else -1
            line.append(lines.setdefault((kind, stage, unit, where), len(lines)))
        numbers = np.full((len(lines) + 1, self.steps), -1, dtype=np.int64)  # the last line, which is -1, stays empty
        numbers[np.array(line, dtype=np.int64)[which], self.step[ops]] = ops
        return lines, numbers

    # -- of micro-batches -------------------------------------------------------------------------------------------

    def ops(self, kind: Kind, stages: Sequence[int], peers: Sequence[int] = (), units: Sequence[int] = ()) -> Ints:
        """The operation of every place, a row for each stage (with its peer and its unit)."""
        return self.named((kind,) * len(stages), stages, units, peers)

    def named(
        self, kinds: Sequence[Kind], stages: Sequence[int], units: Sequence[int] = (), peers: Sequence[int] = ()
    ) -> Ints:
        """The same of several kinds."""
        count, line = len(stages), self._line.get
        names = zip(kinds, stages, peers or (-1,) * count, units or (0,) * count, strict=True)
        return self._numbers[[line(k << _KIND | s << _STAGE | p + 1 << _PEER | u, -1) for k, s, p, u in names]]

    def backward(self, stages: Sequence[int], final: bool) -> Ints:
        """The first or the final operation of the backward pass of every place: it may be cut into units, or into a
        part for the input and one for the weights."""
        return self._of(FINAL_BACK if final else FIRST_BACK, stages)

    def forward(self, stages: Sequence[int], final: bool = True) -> Ints:
        """The final or the first operation of the forward pass of every place: it may be cut into pieces."""
        return self._of(FINAL_FORWARD if final else FIRST_FORWARD, stages)

    def gathering(self, stages: Sequence[int]) -> Ints:
        """The operation of every place that (first) adds to the gradients of the weights."""
        return self._of(GATHERING, stages)

    def giving(self, stages: Sequence[int]) -> Ints:
        """The operation of every place after which the gradients of what came in are there."""
        return self._of(GIVING, stages)

    def _of(self, which: int, stages: Sequence[int]) -> Ints:
        found = self.passes[which]
        return found if stages == self.layout.stages else found[list(stages)]

    def homes(self) -> Ints:
        """The rank of every stage at every place."""
        return np.ascontiguousarray(self.layout.local_ranks[self.replica, self.layout.line_of[self.piece]].T)

    def adds(self, stages: Sequence[int]) -> Bools:
        """Whether the backward pass of every place finds gradients that it adds to; the first of a step does where
        buckets keep them."""
        if self.layout.plan.zero > 1:  # what a pass makes is scattered before the next one
            return np.zeros((len(stages), self.places), dtype=bool)
        return ~self._finds_none[self.gathering(stages)]

    @lasting
    def _finds_none(self) -> Bools:
        """Operation → whether it is the first of its step to add to the gradients of its weights."""
        layout = self.layout
        fresh = [n for n, h in enumerate(layout.holdings) if not layout.bucketed(h.stage) or layout.gathers]
        first = np.zeros(len(self.kind), dtype=bool)
        if fresh:
            first[self.earliest(GATHERING)[fresh]] = True
        return first

    @property
    def recomputed(self) -> Bools:
        """Whether the passes of every place are recomputed."""
        return self.layout.recomputed[self.piece]

    def only(self, chosen: Bools) -> Found:
        """The same with nothing but the chosen places, for look-ups by micro-batch."""
        part = copy(self)
        part.passes = self.passes[:, :, chosen]
        part._finds_none = self._finds_none  # which takes all places to find out
        part._numbers, part.places = self._numbers[:, chosen], int(chosen.sum())
        part.replica, part.piece, part.size = self.replica[chosen], self.piece[chosen], self.size[chosen]
        return part

    def by_size(self, of: Callable[[int, Any], float], count: int, name: Hashable = None) -> Ints:
        """of(thing, samples) for so many things and every place, worked out once for each size that occurs.

        `name`: of what follows from the profile, the cuts, the sizes and this name alone. Many plans have these in
        common, so it is worked out once for all of them.
        """
        found = self._tables.get(name)
        if found is None:
            table = [[round(of(thing, size)) for size in self._sizes] for thing in range(count)]
            found = np.array(table, dtype=np.int64).reshape(count, len(self._sizes))
            if name is not None:
                self._tables[name] = found
        return found.take(self.size, axis=1)

    def all_by_size(self, of: Callable[[int, Any], tuple[int, ...]], count: int, name: Hashable) -> list[Ints]:
        """The same of several numbers at once."""
        found = self._tables.get(name)
        if found is None:
            table = [[of(thing, size) for size in self._sizes] for thing in range(count)]
            found = self._tables[name] = np.ascontiguousarray(np.array(table, dtype=np.int64).transpose(2, 0, 1))
        return list(found.take(self.size, axis=2))

    # -- of copies of stages ----------------------------------------------------------------------------------------

    def own(self, of: Ints, holdings: Sequence[Holding], empty: int = -1) -> Ints:
        """Of what has a row for each of these copies (or one for all), the entries of the micro-batches that each copy
        sees: (copy, step, micro-batch); `empty` elsewhere."""
        layout, count = self.layout, len(holdings)
        by_replica = np.broadcast_to(of, (count, self.places)).reshape(
            count, len(layout.replicas), self.steps, layout.plan.pieces
        )
        table = by_replica[np.arange(count), [h.replica for h in holdings]]
        there = table >= 0
        if layout.plan.lines > 1:
            takes = np.array([[line in h.lines for line in range(layout.plan.lines)] for h in holdings])
            there &= takes[:, None, layout.line_of]
        return np.where(there, table, empty)

    def earliest(self, which: int) -> Ints:
        """Of every copy (in the order of `Layout.holdings`) and step the first operation of the passes that it sees, of
        these (`passes`); `NEVER` where there is none."""
        return self._seen(which, NEVER).min(axis=2)

    def latest(self, which: int) -> Ints:
        """The last one; -1 where there is none."""
        return self._seen(which, -1).max(axis=2)

    @lasting
    def first_place(self) -> Ints:
        """The place whose pass is the first to add to gradients of weights."""
        _, replica, _ = self.layout.held
        begin = (replica[:, None] * self.steps + np.arange(self.steps)) * self.layout.plan.pieces
        return begin + self._seen(GATHERING, NEVER).argmin(axis=2)

    def _seen(self, which: int, empty: int) -> Ints:
        stage, _, _ = self.layout.held
        return self.own(self.passes[which, stage], self.layout.holdings, empty)

    # -- of what comes once a step -----------------------------------------------------------------------------------

    def once(self, kind: Kind, holdings: Sequence[Holding], unit: int = 0) -> Ints:
        """Of operations that every copy does once a step."""
        number = int(kind)
        return self._by_step[[self._once.get((number, h.stage, unit, h.rank), -1) for h in holdings]]

    def numbered(self, kind: Kind, stage: int, unit: int, rank: int) -> Ints:
        """Of operations that come once a step, of that number on a rank."""
        return self._by_step[self._once.get((int(kind), stage, unit, rank), -1)]

    def last(self, rank: int) -> Ints:
        """The last operation of every step that a rank does by itself."""
        ops = nonzero(self.alone & (self.rank == rank))
        found = np.full(self.steps, -1, dtype=np.int64)
        np.maximum.at(found, self.step[ops], ops)
        return found

    @property
    def alone(self) -> Bools:
        """Operation → whether one rank does it by itself."""
        return ~_COLLECTIVE[self.kind]

    def shared(self, kind: Kind, stages: Sequence[int], units: Sequence[int] = ()) -> Ints:
        """Of collectives over all copies of a stage, once a step: a row for each stage that is asked for."""
        pairs = zip(stages, units or (0,) * len(stages), strict=True)
        return self._by_step[[self._once.get((int(kind), stage, unit, -1), -1) for stage, unit in pairs]]

    def across(self, holdings: Sequence[Holding], units: Sequence[int]) -> Ints:
        """The sums over groups of replicas, of what each of these copies has a share of."""
        size = self.layout.plan.sharers
        names = [(_REDUCE_GRAD, h.stage, u, h.replica % size) for h, u in zip(holdings, units, strict=True)]
        return self._by_step[[self._once.get(name, -1) for name in names]]

    def norm(self, holdings: Sequence[Holding]) -> Ints:
        """The sum of squares of each copy's replica."""
        names = [(_NORM, 0, 0, self.layout.answering(h.replica)) for h in holdings]
        return self._by_step[[self._once.get(name, -1) for name in names]]
