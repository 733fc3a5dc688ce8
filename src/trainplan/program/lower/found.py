"""Where the operations are: from what an operation is to its number, as arrays over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numba import njit

from trainplan.lasting import lasting
from trainplan.program.lower.buckets import kept
from trainplan.program.lower.distinct import distinct
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.rows import Table
from trainplan.program.ops import COLLECTIVES, SHARED_OUT, Kind
from trainplan.program.program import Bools, Ints, are, nonzero
from trainplan.program.text import WITHOUT_MICRO_BATCH

_WHOLE, _SHARED_OUT, _COLLECTIVE = are(WITHOUT_MICRO_BATCH), are(SHARED_OUT), are(COLLECTIVES)
_NORM, _REDUCE_GRAD, _BARRIER = int(Kind.NORM), int(Kind.REDUCE_GRAD), int(Kind.BARRIER)
NEVER = np.iinfo(np.int64).max


# What a pass begins and ends with: tables of `Found.passes`.
FIRST_FORWARD, FINAL_FORWARD, FIRST_BACK, FINAL_BACK, GATHERING, GIVING = range(6)
_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
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
        self.places = len(layout.replicas) * steps * plan.pieces
        # Rows of several replicas, or of several bodies, are the same operation for other places.
        names = table.kind << _KIND | table.stage << _STAGE | table.peer + 1 << _PEER | table.unit
        first, line = distinct(names)
        self._line = dict(zip(names[first].tolist(), range(len(first)), strict=True))
        # What replicas do together is each one's, whichever of them it stands for.
        sharers = min(plan.sharers, len(layout.replicas)) if plan.zero else 1
        # Of every operation; its replica among those that have lists, which are the first, or all of them.
        self.kind, self.rank, self.unit, self.replica_of, self.numbers, self.passes, single = _laid_out(
            table.kind, table.rank, table.unit, table.stage, table.replica, row, step, piece, line, _WHOLE,
            _SHARED_OUT, len(first), steps, plan.pieces, self.places, plan.depth, sharers,
        )  # fmt: skip
        self.step = step
        # What comes once: by (kind, stage, unit) and rank; what all copies do together, whichever stands for it.
        self._once: dict[tuple[int, int, int, int], int] = {}  # → a row of `_by_step`
        used = np.zeros(len(table.kind), dtype=np.int64)
        used[row[single]] = 1
        own = nonzero(used > 0)
        columns = (own, table.kind[own], table.stage[own], table.unit[own], table.rank[own], table.replica[own])
        for at, kind, stage, unit, rank, replica_of in zip(*[column.tolist() for column in columns], strict=True):
            where = rank
            if kind == _NORM:
                stage, where = 0, layout.answering(replica_of)
            elif _COLLECTIVE[kind]:
                across = kind == _REDUCE_GRAD and layout.units[stage] and unit < layout.first_tie
                where = replica_of % plan.sharers if across else -1
            used[at] = self._once.setdefault((kind, stage, unit, where), len(self._once))
        self._by_step = np.full((len(self._once) + 1, steps), -1, dtype=np.int64)  # the last row stays empty
        self._by_step[used[row[single]], step[single]] = single
        self.barriers = np.full((len(layout.replicas), steps, int(phase.max(initial=0)) + 1), -1, dtype=np.int64)
        if layout.in_phases:
            met = nonzero(self.kind == _BARRIER)
            self.barriers[self.replica_of[met], step[met], phase[met]] = met  # of a replica, in a step, after a phase
        places = np.arange(self.places)
        self.replica = places // (plan.pieces * steps)  # of every place, among those that have lists
        self.piece = places % plan.pieces
        self._sizes, which = layout.kinds_of_amount
        sizes = tuple(self._sizes)
        self._tables: dict[Hashable, Ints] = kept(layout.profile, ("tables", plan.bounds, sizes), dict)
        self.size = which[np.array(layout.replicas)[self.replica], self.piece]
        self._seen: dict[tuple[int, ...], Bools] = {}  # lines → whether each micro-batch takes one of them

    # -- of micro-batches -------------------------------------------------------------------------------------------

    def ops(self, kind: Kind, stages: Sequence[int], peers: Sequence[int] = (), units: Sequence[int] = ()) -> Ints:
        """The operation of every place, a row for each stage (with its peer and its unit)."""
        return self.numbers[self.lines(kind, stages, peers, units)]

    def lines(
        self, kind: Kind, stages: Sequence[int], peers: Sequence[int] = (), units: Sequence[int] = ()
    ) -> list[int]:
        """The rows of `numbers` that these are in."""
        number, find = int(kind) << _KIND, self._line.get
        if not peers and not units:
            return [find(number | stage << _STAGE, -1) for stage in stages]
        names = zip(stages, peers or (-1,) * len(stages), units or (0,) * len(stages), strict=True)
        return [find(number | s << _STAGE | p + 1 << _PEER | unit, -1) for s, p, unit in names]

    def named(self, kinds: Sequence[Kind], stages: Sequence[int], units: Sequence[int]) -> Ints:
        """The same of several kinds."""
        names = zip(kinds, stages, units, strict=True)
        return self.numbers[[self._line.get(kind << _KIND | stage << _STAGE | unit, -1) for kind, stage, unit in names]]

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
        part._finds_none, part._ends = self._finds_none, self._ends  # which take all places to find out
        part.numbers, part.places = self.numbers[:, chosen], int(chosen.sum())
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
        return found.take(self.size, axis=1) if len(self._sizes) > 1 else np.repeat(found, self.places, axis=1)

    def all_by_size(self, of: Callable[[int, Any], tuple[int, ...]], count: int, name: Hashable) -> list[Ints]:
        """The same of several numbers at once."""
        found = self._tables.get(name)
        if found is None:
            table = [[of(thing, size) for size in self._sizes] for thing in range(count)]
            found = self._tables[name] = np.ascontiguousarray(np.array(table, dtype=np.int64).transpose(2, 0, 1))
        several = len(self._sizes) > 1
        return [own.take(self.size, axis=1) if several else np.repeat(own, self.places, axis=1) for own in found]

    # -- of copies of stages (in the order of `Layout.holdings`) and steps: of the passes that each copy sees ----------

    def earliest(self, which: int) -> Ints:
        """The first operation of all its passes, of these (`passes`); `NEVER` where there is none."""
        return self._ends[0][which]

    def latest(self, which: int) -> Ints:
        """The last one; -1 where there is none."""
        return self._ends[1][which]

    @property
    def first_place(self) -> Ints:
        """The place whose pass is the first to add to gradients of weights."""
        return self._ends[2]

    def latest_of(
        self, copies: Sequence[int], lines: Sequence[int], again: Sequence[int], second: Sequence[int]
    ) -> Ints:
        """The same of operations in other rows of `numbers`, one row for each of these copies: in `lines`, or of passes
        that are recomputed in `again`; or, where a pass has such an operation, in `second`. (Either may be none.)"""
        _, replica, _ = self.layout.held
        none = (-1,) * len(lines)
        first, other, late = (np.array(own, dtype=np.int64) for own in (lines, again or lines, second or none))
        found: Ints = _latest_of(
            self.numbers, first, other, late, self.recomputed, self._sees[copies], replica[copies], self.steps
        )
        return found

    @lasting
    def _ends(self) -> tuple[Ints, Ints, Ints]:
        stage, replica, _ = self.layout.held
        return _ends_of(self.passes, stage, replica, self._sees, self.steps)

    @lasting
    def _sees(self) -> Bools:
        """Whether a copy sees a micro-batch (or a slice of one)."""
        layout = self.layout
        if layout.plan.lines == 1:
            return np.ones((len(layout.holdings), layout.plan.pieces), dtype=bool)
        takes = np.zeros((len(layout.holdings), layout.plan.lines), dtype=bool)
        for number, holding in enumerate(layout.holdings):
            takes[number, list(holding.lines)] = True
        return takes.take(layout.line_of, axis=1)

    # -- the same of some copies ------------------------------------------------------------------------------------

    def own(self, of: Ints, holdings: Sequence[Holding], empty: int = -1) -> Ints:
        """Of what has a row for each of these copies (or one for all), the entries of the micro-batches that each copy
        sees: (copy, step, micro-batch); `empty` elsewhere."""
        layout = self.layout
        if len(of) != len(holdings):
            of = np.broadcast_to(of, (len(holdings), self.places))
        table = of.reshape(len(holdings), len(layout.replicas), self.steps, layout.plan.pieces)
        if len(layout.replicas) == 1:
            table = table[:, 0]
        else:
            table = table[np.arange(len(holdings)), [h.replica for h in holdings]]
        if layout.plan.lines == 1:
            return table if empty == -1 else np.where(table >= 0, table, empty)
        for h in holdings:
            if h.lines not in self._seen:
                self._seen[h.lines] = np.isin(layout.line_of, h.lines)
        mine = np.array([self._seen[h.lines] for h in holdings])
        return np.where(mine[:, None, :] & (table >= 0), table, empty)

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


@njit(cache=True)
def _laid_out(
    row_kind: Ints, row_rank: Ints, row_unit: Ints, row_stage: Ints, row_replica: Ints, row: Ints, step: Ints,
    piece: Ints, line: Ints, whole: Bools, shared: Bools, lines: int, steps: int, pieces: int, places: int,
    stages: int, sharers: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:  # fmt: skip
    """Kind, rank, unit and replica of every operation, from its row; the operation of every line and place, where one
    line more stays empty (which is line -1); and of the passes of every stage and place the first and the final one of
    forward, the first and the final one of backward, the one that first adds to gradients of weights, and the one after
    which those of what came in are there; and at last the operations that come once a step, but for barriers.

    Operations are in the order of their lists. A pass may come in pieces, one after the other; or backward in a part
    for the input (I) and one for the weights (W).
    """
    count = len(row)
    kind, rank = np.empty(count, np.int64), np.empty(count, np.int64)
    unit, replica = np.empty(count, np.int64), np.empty(count, np.int64)
    numbers, passes = np.full((lines + 1, places), -1, np.int64), np.full((6, stages, places), -1, np.int64)
    single, singles = np.empty(count, np.int64), 0
    for op in range(count):
        r = row[op]
        kind[op], rank[op], unit[op], replica[op] = row_kind[r], row_rank[r], row_unit[r], row_replica[r]
        if whole[kind[op]]:
            if kind[op] != _BARRIER:
                single[singles] = op
                singles += 1
            continue
        place = (replica[op] * steps + step[op]) * pieces + piece[op]
        if place >= places or (kind[op] <= _W and row_stage[r] >= stages):
            raise IndexError("an operation of a replica, a micro-batch or a stage that there is none of")
        numbers[line[r], place] = op
        if shared[kind[op]]:
            before = replica[op] % sharers  # of those that share with it
            for other in range(-before, sharers - before):
                numbers[line[r], place + other * steps * pieces] = op
        if kind[op] > _W:
            continue
        own = passes[:, row_stage[r], place]
        if kind[op] == _F:
            if own[FIRST_FORWARD] < 0:
                own[FIRST_FORWARD] = op
            own[FINAL_FORWARD] = op
        if (kind[op] == _B or kind[op] == _I) and own[FIRST_BACK] < 0:
            own[FIRST_BACK] = op
        if kind[op] == _B or kind[op] == _W:
            own[FINAL_BACK] = op
            if own[GATHERING] < 0:
                own[GATHERING] = op
        if kind[op] == _B or (kind[op] == _I and own[GIVING] < 0):
            own[GIVING] = op
    return kind, rank, unit, replica, numbers, passes, single[:singles]


@njit(cache=True)
def _ends_of(passes: Ints, stage: Ints, replica: Ints, sees: Bools, steps: int) -> tuple[Ints, Ints, Ints]:
    """Of every copy in every step the first and the last operation, of all of `passes`; and the place of the first that
    adds to gradients."""
    copies, pieces = sees.shape
    first = np.full((len(passes), copies, steps), NEVER, np.int64)
    last, place = np.full((len(passes), copies, steps), -1, np.int64), np.zeros((copies, steps), np.int64)
    for copy_ in range(copies):
        for step in range(steps):
            begin = (replica[copy_] * steps + step) * pieces
            place[copy_, step] = begin
            for piece in range(pieces):
                if not sees[copy_, piece]:
                    continue
                for which in range(len(passes)):
                    op = passes[which, stage[copy_], begin + piece]
                    if op < 0:
                        continue
                    last[which, copy_, step] = max(last[which, copy_, step], op)
                    if op < first[which, copy_, step]:
                        first[which, copy_, step] = op
                        if which == GATHERING:
                            place[copy_, step] = begin + piece
    return first, last, place


@njit(cache=True)
def _latest_of(
    numbers: Ints, lines: Ints, again: Ints, second: Ints, recomputed: Bools, sees: Bools, replica: Ints, steps: int
) -> Ints:
    """`Found.latest_of`."""
    pieces = sees.shape[1]
    last = np.full((len(lines), steps), -1, np.int64)
    for k in range(len(lines)):
        for step in range(steps):
            begin = (replica[k] * steps + step) * pieces
            for piece in range(pieces):
                if sees[k, piece]:
                    place = begin + piece
                    op = numbers[second[k], place]
                    if op < 0:
                        op = numbers[again[k] if recomputed[place] else lines[k], place]
                    last[k, step] = max(last[k, step], op)
    return last
