"""Memory of what replicas share out: weights that come and go, and gradients on their way to whoever steps them.

                 weights                gradients                            optimizer states
zero=1           whole                  whole                                a share
zero=2           whole                  a share; a unit's, until scattered   a share
zero=3           a share; a unit's      a share; a unit's, until scattered   a share
                 while it is read

The shares of a unit are equally long, so what several lie in is a little longer than the weights. Weights that several
stages hold stay whole on all of them, as do those that are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainplan.lasting import lasting
from trainplan.program.lower.away import piece_of
from trainplan.program.lower.buckets import kept
from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.rows import Entries
from trainplan.program.lower.units import Unit
from trainplan.program.ops import COMPUTES, Kind, Value
from trainplan.program.program import Bools, Ints, are, nonzero

_COMPUTE, _GATHER = are(COMPUTES), are((Kind.GATHER_F, Kind.GATHER_B))

_F = int(Kind.F)


def shares(layout: Layout, weights: Ints, stepped: Ints) -> tuple[Ints, Ints]:
    """Of the bytes of weights and the number of trained elements of every copy of a stage: what is there of them all
    the time."""
    weights, stepped = weights.copy(), stepped.copy()
    for number, holding in enumerate(layout.holdings):
        for unit in layout.units[holding.stage]:
            whole = unit.count
            weights[number] += (unit.share_bytes if layout.plan.zero == 3 else unit.bytes) - whole * unit.item
            stepped[number] += unit.own(holding.replica % layout.plan.sharers) - whole
    return weights, stepped


class Shared:
    """Every unit of every stage: its operations at every place, one row a unit."""

    def __init__(self, found: Found, homes: Ints) -> None:
        layout = found.layout
        pairs = [(stage, number) for stage in layout.stages for number in range(len(layout.units[stage]))]
        self.found, self.layout = found, layout
        self.stages, self.numbers = [stage for stage, _ in pairs], [number for _, number in pairs]
        self.units: list[Unit] = [layout.units[stage][number] for stage, number in pairs]
        self.homes = homes[self.stages]
        self.bytes = np.array([[unit.bytes] for unit in self.units], dtype=np.int64)
        # Stages that are shared out have one copy in every replica.
        shape = (layout.plan.depth, len(layout.replicas))
        self.rank = np.array([h.rank for h in layout.holdings], dtype=np.int64).reshape(shape)[self.stages]
        self.step = found.once(Kind.STEP, layout.holdings).reshape(*shape, found.steps)[self.stages]

    def ops(self, kind: Kind) -> Ints:
        """Gathers or scatters."""
        return self.found.ops(kind, self.stages, units=self.numbers)

    def by_replica(self, ops: Ints) -> Ints:
        """By unit, replica, step and micro-batch."""
        return ops.reshape(len(ops), len(self.layout.replicas), self.found.steps, self.layout.plan.pieces)

    def forward(self, units: Sequence[int], pieces: list[int]) -> Ints:
        """The pieces of forward passes; those of a pass that comes whole are all the same operation."""
        stages = [self.stages[unit] for unit in units]
        cut, whole = self.found.ops(Kind.F, stages, units=pieces), self.found.ops(Kind.F, stages)
        return np.where(cut >= 0, cut, whole)

    def backward(self, ranges: Sequence[tuple[int, int, int]]) -> tuple[Ints, list[int]]:
        """The operations of backward passes that read weights, of (unit, first piece, last piece): in the order in
        which they come, -1 where a pass has none such; and of each the number of its range."""
        layout, recomputes = self.layout, self.layout.recomputes
        of, kinds, stages, units = list[int](), list[Kind](), list[int](), list[int]()
        for number, (unit, first, last) in enumerate(ranges):
            stage = self.stages[unit]
            sections = layout.sections[stage]
            for piece in range(last, first - 1, -1):
                names = [(Kind.B, len(sections) - 1 - piece)]
                if recomputes:
                    names += [(kind, block) for block in reversed(range(*sections[piece])) for kind in (Kind.R, Kind.B)]
                kinds += [kind for kind, _ in names]
                units += [at for _, at in names]
                of += [number] * len(names)
                stages += [stage] * len(names)
        found = self.found.named(kinds, stages, units)
        if recomputes:  # of a pass that is, the blocks; of another the sections
            again = [kind is Kind.R for kind in kinds]
            starts = np.array([not r and not before for r, before in zip(again, [False, *again[:-1]], strict=True)])
            found = np.where(starts[:, None] == self.found.recomputed, -1, found)
        return found, of

    @lasting
    def completing(self) -> Ints:
        """The operation of every pass after which the gradients of each unit are complete."""
        layout, found = self.layout, self.found
        if layout.splits:
            second = found.ops(Kind.W, self.stages)
            return np.where(second >= 0, second, found.backward(self.stages, final=True))
        cut = [layout.sections[stage] for stage in self.stages]
        pieces = [len(own) - 1 - unit.first for own, unit in zip(cut, self.units, strict=True)]
        plain = found.ops(Kind.B, self.stages, units=pieces)
        if not layout.recomputes:
            return plain
        blocks = [own[unit.first][0] for own, unit in zip(cut, self.units, strict=True)]
        return np.where(found.recomputed, found.ops(Kind.B, self.stages, units=blocks), plain)


def gathered(ledger: Ledger, shared: Shared) -> None:
    """Weights: from when they are gathered until the last piece of the pass that reads them.

    Where they stay, the passes after the first find them; otherwise every piece reads what was gathered for it.
    """
    layout = shared.layout
    there = shared.ops(Kind.GATHER_F)
    _after_step(ledger, shared, there)
    units = range(len(shared.units))
    if layout.plan.zero < 3:
        first = shared.forward(units, [unit.first for unit in shared.units])
        made = there >= 0
        never = np.full(int(made.sum()), -1)
        ledger.add(Value.WEIGHTS, 0, shared.homes[made], there[made], never, (first[made],))
        return
    back = shared.ops(Kind.GATHER_B)
    pieces = [(n, piece) for n, unit in enumerate(shared.units) for piece in range(unit.first, unit.last + 1)]
    of = [number for number, _ in pieces]
    reads = shared.forward(of, [piece for _, piece in pieces])
    again, of_again = shared.backward([(n, unit.first, unit.last) for n, unit in enumerate(shared.units)])
    over = np.maximum.reduceat(again, np.searchsorted(of_again, units))  # the last: later ones have higher numbers
    twice = np.asarray((back >= 0).any(axis=1))  # elsewhere backward starts with what forward ended with
    last = reads[np.searchsorted(of, units, side="right") - 1]
    numbers = ledger.add(Value.WEIGHTS, shared.bytes, shared.homes, there, np.where(twice[:, None], last, over))
    ledger.reads(reads, numbers[of])
    once = numbers.copy()
    some = nonzero(twice)
    once[some] = ledger.add(Value.WEIGHTS, shared.bytes[some], shared.homes[some], back[some], over[some])
    ledger.reads(again, once[of_again])


def in_stream(ledger: Ledger, lists: Entries, ops: Ints) -> None:
    """A device gathers what it is asked to once it has come to that point: after whatever it computes before, in the
    order of its list. (Collectives of torch wait for the stream that they are called in.) So its host may be far ahead,
    and no more weights are there at once than the list has side by side. `ops`: the operation of every entry."""
    kind, rank = lists.table.kind[lists.row], lists.table.rank[lists.row]
    entry = np.arange(len(kind))
    computed = np.maximum.accumulate(np.where(_COMPUTE[kind], entry, -1))
    gathers = nonzero(_GATHER[kind])
    gathers = gathers[computed[gathers] >= lists.start[rank[gathers]]]  # the first of a list come after nothing
    ledger.add(Value.TOKEN, 0, rank[gathers], ops[computed[gathers]], ops[gathers], (ops[gathers],))


def _after_step(ledger: Ledger, shared: Shared, gathers: Ints) -> None:
    """The first gathers of a step come after the step before it: until then nobody's share is new."""
    layout = shared.layout
    first = layout.orders.once(("first", len(layout.plan.slices)), lambda: _first(layout))[shared.stages]
    following = shared.by_replica(gathers)[np.arange(len(gathers)), :, 1:, first]
    ledger.add(Value.TOKEN, 0, shared.rank[:, :, None], shared.step[:, :, :-1], following, (following,))


def _first(layout: Layout) -> Ints:
    """Of every stage the micro-batch that goes forward through it first."""
    first = np.zeros(layout.plan.depth, dtype=np.int64)
    for order in layout.orders:
        rows = nonzero(order[:, 0] == _F)[::-1]
        first[order[rows, 2]] = layout.piece(order)[rows]  # of equal places the last counts
    return first


def scattered(ledger: Ledger, shared: Shared) -> None:
    """Gradients: from the pieces of backward that complete them, over their sums, to the step."""
    layout, zero = shared.layout, shared.layout.plan.zero
    held = [h for h in layout.holdings if layout.units[h.stage]]
    rank, never = np.array([h.rank for h in held]), np.full(len(held), -1, dtype=np.int64)
    kept = [sum(unit.bytes if zero == 1 else unit.share_bytes for unit in layout.units[h.stage]) for h in held]
    ledger.add(Value.GRADIENTS, np.array(kept), rank, never, never)
    scatter = shared.ops(Kind.SCATTER_GRAD)
    done = scatter >= 0
    made, op, home = shared.completing[done], scatter[done], shared.homes[done]
    if zero == 1:
        ledger.add(Value.TOKEN, 0, home, made, op, (op,))
    else:
        _unit_gradients(ledger, shared, scatter)
    if layout.backend.name != "nccl":
        # What the others send lies side by side until it is summed; and before that gradients that lie apart are
        # copied together.
        room = np.array([[unit.bytes - unit.share_bytes if zero == 1 else unit.bytes] for unit in shared.units])
        ledger.add(Value.COMMUNICATION, np.broadcast_to(room, done.shape)[done], home, made, op, late=True)
    later = [(number, unit.first - 2) for number, unit in enumerate(shared.units) if zero > 1 and unit.first > 1]
    if later:  # no more than two units are on their way at once
        rows, of = shared.backward([(number, piece, piece) for number, piece in later])
        begin = np.minimum.reduceat(np.where(rows >= 0, rows, NEVER), np.searchsorted(of, range(len(later))))
        own = [number for number, _ in later]
        chosen = done[own]
        then = np.where(begin == NEVER, -1, begin)[chosen]
        ledger.add(Value.TOKEN, 0, shared.homes[own][chosen], scatter[own][chosen], then, (then,))
    _to_the_step(ledger, shared, scatter)


def _unit_gradients(ledger: Ledger, shared: Shared, scatter: Ints) -> None:
    """The gradients of units: they come with the piece of backward that makes them, or block by block where blocks go
    back one by one: recomputed, or as sections of their own."""
    layout, found = shared.layout, shared.found
    again: Bools = (found.recomputed | layout.offloads) & (scatter >= 0)
    plain = ~again & (scatter >= 0)
    if plain.any():
        size = np.broadcast_to(shared.bytes, plain.shape)[plain]
        op = scatter[plain]
        ledger.add(Value.GRADIENTS, size, shared.homes[plain], shared.completing[plain], op, (op,))
    if not again.any():
        return
    parts = [(n, *part) for n in range(len(shared.units)) for part in _by_block(shared, n).items()]
    of, blocks = [number for number, _, _ in parts], [block for _, block, _ in parts]
    stages = [shared.stages[number] for number in of]
    ops = found.ops(Kind.B, stages, units=blocks)
    if layout.offloads:
        pieces = [piece_of(layout, stage, block) for stage, block in zip(stages, blocks, strict=True)]
        ops = np.where(found.recomputed, ops, found.ops(Kind.B, stages, units=pieces))
    chosen, sizes = again[of], np.array([[size] for _, _, size in parts])
    until = scatter[of][chosen]
    size = np.broadcast_to(sizes, chosen.shape)[chosen]
    ledger.add(Value.GRADIENTS, size, shared.homes[of][chosen], ops[chosen], until, (until,))


def _by_block(shared: Shared, number: int) -> dict[int, int]:
    """Bytes of a unit's gradients by the block that makes them. The first has what the shares are filled up with."""
    layout, stage = shared.layout, shared.stages[number]
    key = "unit by block", layout.plan.bounds[stage], layout.plan.bucket, layout.plan.sharers, shared.numbers[number]
    found: dict[int, int] = kept(layout.profile, key, lambda: _worked_out_by_block(shared, number))
    return found


def _worked_out_by_block(shared: Shared, number: int) -> dict[int, int]:
    unit, known = shared.units[number], shared.layout.parameter_of[shared.stages[number]]
    sizes = dict.fromkeys([min(b for name in unit.names for b in known[name].blocks)], unit.bytes)
    for name in unit.names:
        block = max(known[name].blocks)
        sizes[block] = sizes.get(block, 0) + known[name].bytes
        sizes[min(sizes)] -= known[name].bytes
    return sizes


def _to_the_step(ledger: Ledger, shared: Shared, scatter: Ints) -> None:
    """A share of a sum is read by the step, and by the norm; of what groups of replicas have, by their sum first."""
    layout, found = shared.layout, shared.found
    holdings, count = layout.holdings, len(layout.replicas)
    shape = (layout.plan.depth, count, found.steps)
    norm = found.norm(holdings).reshape(shape)[shared.stages]
    across = np.full(norm.shape, -1, dtype=np.int64)
    if layout.plan.sharers < layout.plan.dp:
        own = [holdings[stage * count + place] for stage in shared.stages for place in range(count)]
        across = found.across(own, np.repeat(shared.numbers, count).tolist()).reshape(norm.shape)
    ops = shared.by_replica(scatter)
    *places, _ = at = np.nonzero(ops >= 0)
    of = tuple(places)
    op, home, until, also, reader = ops[at], shared.rank[of[:2]], shared.step[of], norm[of], across[of]
    straight = reader < 0
    end = np.where(straight, until, reader)
    ledger.add(Value.TOKEN, 0, home, op, end, (np.where(straight, also, -1), end))
    summed = (across >= 0).all(axis=2)
    if summed.any():
        step, also = shared.step[summed], norm[summed]
        home = np.repeat(shared.rank[summed][:, None], found.steps, axis=1)
        ledger.add(Value.TOKEN, 0, home, across[summed], step, (also, step))
