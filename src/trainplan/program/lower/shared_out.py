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

import numpy as np

from trainplan.program.lower.away import piece_of
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints


def shares(layout: Layout, weights: Ints, stepped: Ints) -> tuple[Ints, Ints]:
    """Of the bytes of weights and the number of trained elements of every copy of a stage: what is there of them all
    the time."""
    weights, stepped = weights.copy(), stepped.copy()
    for number, holding in enumerate(layout.holdings):
        for unit in layout.units[holding.stage]:
            whole = sum(unit.counts)
            weights[number] += (unit.share_bytes if layout.plan.zero == 3 else unit.bytes) - whole * unit.item
            stepped[number] += unit.own(holding.replica % layout.plan.sharers) - whole
    return weights, stepped


def gathered(ledger: Ledger, found: Found, homes: Ints) -> None:
    """Weights: from when they are gathered until the last piece of the pass that reads them.

    Where they stay, the passes after the first find them; otherwise every piece reads what was gathered for it.
    """
    layout = found.layout
    for stage in layout.stages:
        units, count = layout.units[stage], len(layout.sections[stage])
        if not units:
            continue
        home = np.broadcast_to(homes[stage], (len(units), found.places))
        there = found.ops(Kind.GATHER_F, [stage] * len(units), units=range(len(units)))
        _after_step(ledger, found, stage, there)
        forward = [_ops(found, Kind.F, stage, [piece] * len(units)) for piece in range(count)]
        if layout.plan.zero < 3:
            first = np.array([forward[unit.first][number] for number, unit in enumerate(units)])
            made = there >= 0
            ledger.add(Value.WEIGHTS, 0, home[made], there[made], np.full(made.sum(), -1), (first[made],))
            continue
        back = found.ops(Kind.GATHER_B, [stage] * len(units), units=range(len(units)))
        for number, unit in enumerate(units):
            own = unit.bytes
            reads = [forward[piece][0] for piece in range(unit.first, unit.last + 1)]
            again = [
                op for piece in reversed(range(unit.first, unit.last + 1)) for op in _backward(found, stage, piece)
            ]
            if (back[number] >= 0).any():
                ledger.add(Value.WEIGHTS, own, homes[stage], there[number], reads[-1], tuple(reads))
                ledger.add(Value.WEIGHTS, own, homes[stage], back[number], _end(again), tuple(again))
            else:  # backward starts with what forward ended with
                ledger.add(Value.WEIGHTS, own, homes[stage], there[number], _end(again), (*reads, *again))


def _end(ops: list[Ints]) -> Ints:
    """The last of these that there is."""
    last = ops[-1]
    for op in reversed(ops):
        last = np.where(last >= 0, last, op)
    return last


def _begin(ops: list[Ints]) -> Ints:
    """The first of these that there is."""
    return _end(ops[::-1])


def _ops(found: Found, kind: Kind, stage: int, units: list[int]) -> Ints:
    """The pieces of passes; those of a pass that comes whole are all the same operation."""
    cut, whole = found.ops(kind, [stage] * len(units), units=units), found.ops(kind, [stage] * len(units))
    return np.where(cut >= 0, cut, whole)


def _backward(found: Found, stage: int, piece: int) -> list[Ints]:
    """The operations of the backward passes of a piece that read weights, in order; -1 where a pass has none such."""
    layout, pieces = found.layout, found.layout.sections[stage]
    plain = found.ops(Kind.B, [stage], units=[len(pieces) - 1 - piece])[0]
    if not layout.recomputes:
        return [plain]
    rows = [np.where(found.recomputed, -1, plain)]
    for block in reversed(range(*pieces[piece])):
        for kind in (Kind.R, Kind.B):
            rows.append(np.where(found.recomputed, found.ops(kind, [stage], units=[block])[0], -1))
    return rows


def _after_step(ledger: Ledger, found: Found, stage: int, gathers: Ints) -> None:
    """The first gathers of a step come after the step before it: until then nobody's share is new."""
    layout = found.layout
    holdings = [h for h in layout.holdings if h.stage == stage]
    step = found.once(Kind.STEP, holdings)
    for unit in gathers:
        table = unit.reshape(len(layout.replicas), found.steps, layout.plan.pieces)
        first = _first(layout, stage)
        for number, holding in enumerate(holdings):
            following = table[number, 1:, first]
            before = step[number, :-1]
            ledger.add(Value.TOKEN, 0, np.full(len(before), holding.rank), before, following, (following,))


def _first(layout: Layout, stage: int) -> int:
    """The micro-batch that goes forward through a stage first."""
    for order in layout.orders:
        rows = np.flatnonzero((order[:, 2] == stage) & (order[:, 0] == Kind.F))
        if len(rows):
            return int(layout.piece(order)[rows[0]])
    raise AssertionError("a stage that nobody runs")


def scattered(ledger: Ledger, found: Found, homes: Ints) -> None:
    """Gradients: from the pieces of backward that complete them, over their sums, to the step."""
    layout, zero = found.layout, found.layout.plan.zero
    for stage in layout.stages:
        units = layout.units[stage]
        holdings = [h for h in layout.holdings if h.stage == stage]
        if not units:
            continue
        rank = np.array([h.rank for h in holdings])
        never = np.full(len(holdings), -1, dtype=np.int64)
        kept = sum(unit.bytes if zero == 1 else unit.share_bytes for unit in units)
        ledger.add(Value.GRADIENTS, kept, rank, never, never)
        scatter = found.ops(Kind.SCATTER_GRAD, [stage] * len(units), units=range(len(units)))
        for number, unit in enumerate(units):
            op, done = scatter[number], scatter[number] >= 0
            made = _completes(found, stage, unit.first)[done]
            home = homes[stage][done]
            if zero == 1:
                ledger.add(Value.TOKEN, 0, home, made, op[done], (op[done],))
            else:
                _unit_gradients(ledger, found, homes[stage], stage, number, op)
            if layout.backend.name != "nccl":
                # What the others send lies side by side until it is summed; and before that gradients that lie apart
                # are copied together.
                room = unit.bytes - unit.share_bytes if zero == 1 else unit.bytes
                ledger.add(Value.COMMUNICATION, room, home, made, op[done], late=True)
            if zero > 1 and unit.first > 1:  # no more than two units are on their way at once
                later = _begin(_backward(found, stage, unit.first - 2))[done]
                ledger.add(Value.TOKEN, 0, home, op[done], later, (later,))
            _to_the_step(ledger, found, holdings, number, op)


def _unit_gradients(ledger: Ledger, found: Found, home: Ints, stage: int, number: int, scatter: Ints) -> None:
    """The gradients of a unit: they come with the piece of backward that makes them, or block by block where blocks go
    back one by one: recomputed, or as sections of their own."""
    layout = found.layout
    unit, again = layout.units[stage][number], (found.recomputed | layout.offloads) & (scatter >= 0)
    plain = ~again & (scatter >= 0)
    made = _completes(found, stage, unit.first)
    ledger.add(Value.GRADIENTS, unit.bytes, home[plain], made[plain], scatter[plain], (scatter[plain],))
    if not again.any():
        return
    known = {p.name: p for p in layout.parameters[stage]}
    sizes = dict.fromkeys([min(b for name in unit.names for b in known[name].blocks)], unit.bytes)
    for name in unit.names:
        block = max(known[name].blocks)
        sizes[block] = sizes.get(block, 0) + known[name].bytes
        sizes[min(sizes)] -= known[name].bytes  # what is left for the first is what the shares are filled up with
    for block, size in sizes.items():
        op = found.ops(Kind.B, [stage], units=[block])[0]
        if layout.offloads:
            section = found.ops(Kind.B, [stage], units=[piece_of(layout, stage, block)])[0]
            op = np.where(found.recomputed, op, section)
        op = op[again]
        ledger.add(Value.GRADIENTS, size, home[again], op, scatter[again], (scatter[again],))


def _to_the_step(ledger: Ledger, found: Found, holdings: list, number: int, scatter: Ints) -> None:
    """A share of a sum is read by the step, and by the norm; of what groups of replicas have, by their sum first."""
    layout = found.layout
    step, norm = found.once(Kind.STEP, holdings), found.norm(holdings)
    across = found.across(holdings, [number] * len(holdings))
    own = scatter.reshape(len(layout.replicas), found.steps, layout.plan.pieces)
    for place, holding in enumerate(holdings):
        for s in range(found.steps):
            ops = own[place, s][own[place, s] >= 0]
            until, reader, also = (np.full(len(ops), of[place, s]) for of in (step, across, norm))
            if across[place, s] >= 0:
                ledger.add(Value.TOKEN, 0, holding.rank, ops, reader, (reader,))
            else:
                ledger.add(Value.TOKEN, 0, holding.rank, ops, until, (also, until))
        if (across[place] >= 0).all():
            home = np.full(found.steps, holding.rank)
            ledger.add(Value.TOKEN, 0, home, across[place], step[place], (norm[place], step[place]))


def _completes(found: Found, stage: int, piece: int) -> Ints:
    """The operation of every pass after which the gradients of a unit that starts with this piece are complete."""
    layout, pieces = found.layout, found.layout.sections[stage]
    if layout.splits:
        second = found.ops(Kind.W, [stage])[0]
        return np.where(second >= 0, second, found.backward([stage], final=True)[0])
    plain = found.ops(Kind.B, [stage], units=[len(pieces) - 1 - piece])[0]
    if not layout.recomputes:
        return plain
    by_block = found.ops(Kind.B, [stage], units=[pieces[piece][0]])[0]
    return np.where(found.recomputed, by_block, plain)
