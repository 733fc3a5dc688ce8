"""The list of every rank: templates repeated in the order of the schedule.

A list holds the same few rows over and over, for one micro-batch after the other. So the distinct rows are kept once
(`Table`), and an entry of a list is the number of its row, a micro-batch and a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from trainplan.program.lower.bodies import Bodies, stage_rows
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.loads import INPUT_MESSAGES, fed
from trainplan.program.lower.phases import apart_from, in_phases
from trainplan.program.lower.serving import around, servers
from trainplan.program.lower.templates import decided_backward, head, stepping_forward, tail
from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints, are, nonzero
from trainplan.program.schedules import Order
from trainplan.program.text import WITHOUT_MICRO_BATCH

# What an operation of a schedule becomes: which template of its stage and line is put in its place. Of the passes that
# gather the gradients of a stage, the first finds none, and the last completes them. Each of these is there for a whole
# pass and, so many further on, for the second part of one or for one that is recomputed (there are never both).
_FORWARD, _FIRST_FORWARD, _INPUT, _FIRST, _LATER, _LAST, _ONLY = range(7)
_OTHERWISE = 4
_F, _B, _I, _W, _BARRIER = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W), int(Kind.BARRIER)
_WHOLE = are((*WITHOUT_MICRO_BATCH, Kind.SEND_G, Kind.RECV_G, Kind.SEND_W, Kind.RECV_W, *INPUT_MESSAGES))


@dataclass(frozen=True)
class Table:
    """The distinct rows, one array a field."""

    kind: Ints
    stage: Ints
    replica: Ints
    line: Ints
    rank: Ints  # of the program
    unit: Ints
    peer: Ints  # other stage of a message, -1
    adds: Ints  # of a backward pass: how often gradients are added to, or copied
    last: Ints  # 1: the backward pass that completes the gradients; or the first forward pass of a step
    again: Ints  # 1: of a pass that is recomputed, whose units are blocks
    size: Ints  # bytes of several parts that travel together
    cut: Ints  # 1: of a forward pass whose units are blocks
    alike: Ints  # the first row that says the same: rows of several variants of a pass are often equal


@dataclass(frozen=True)
class Entries:
    """The lists of all ranks, one after the other."""

    table: Table
    row: Ints  # of `table`
    piece: Ints  # a micro-batch, or a slice of one: `Layout.piece`
    step: Ints
    phase: Ints  # of a barrier: which phase of its step it ends; otherwise 0
    start: Ints  # of the list of each rank


def entries(layout: Layout, steps: int) -> Entries:
    """The lists of all ranks of all replicas."""
    bodies = Bodies(layout)
    # Rank; of every step the bodies, the pieces (of barriers: phases), and how many steps ago it was they are of.
    lists: list[tuple[int, list[tuple[Ints, Ints, Ints]]]] = []
    shapes = stage_rows(layout)
    first = {
        (r, *way): bodies.add_stage(rows, *way, r, layout.local(r, *way))
        for r in layout.replicas
        for way, rows in shapes.items()
    }
    variants = layout.orders.once(
        ("variants", layout.plan.recompute, len(layout.plan.slices)),
        lambda: [_variants(order, layout.recomputed[layout.piece(order)]) for order in layout.orders],
    )
    by_rank: dict[int, list[int]] = {}
    for number, holding in enumerate(layout.holdings):
        by_rank.setdefault(holding.rank, []).append(number)
    ways = layout.orders.once(("ways", layout.plan.lines, len(layout.plan.slices)), lambda: _by_way(layout))
    for replica in layout.replicas:
        base = np.array([first[replica, *way] for way in shapes], dtype=np.int64)
        for order, (way, pieces), variant in zip(layout.orders, ways, variants, strict=True):
            rank = layout.local(replica, int(order[0, 2]), int(order[0, 1]))
            held = [layout.holdings[number] for number in by_rank[rank]]
            before = bodies.add(head(layout, held), replica, rank)
            after = bodies.add(tail(layout, held), replica, rank)
            body, of = np.empty(len(pieces), dtype=np.int64), pieces
            body[0], body[-1] = before, after
            np.add(base[way], variant, out=body[1:-1])
            if layout.in_phases:
                own = apart_from(layout, [holding.stage for holding in held])
                apart = [(row, bodies.add((row,), replica, rank)) for row in own]
                inner, about = in_phases(layout, order, body[1:-1], apart)
                body = np.concatenate([[before], inner, [after]]).astype(np.int64)
                of = np.concatenate([[0], about, [0]]).astype(np.int64)
            early, late = around(layout, bodies, replica, rank)
            if early or late:
                body = np.concatenate([early, body, late]).astype(np.int64)
                of = np.concatenate([[0] * len(early), of, [0] * len(late)]).astype(np.int64)
            each = [(body, of, np.zeros(len(body), dtype=np.int64))] * steps
            if layout.decides:
                each = _decided(bodies, order, body, of, variant, held, steps)
            lists.append((rank, fed(layout, bodies, held, each)))
    for rank, body, of in servers(layout, bodies):
        lists.append((rank, [(body, of, np.zeros(len(body), dtype=np.int64))] * steps))
    lists.sort(key=lambda one: one[0])
    size = np.array(bodies.length)
    body = np.concatenate([b for _, each in lists for b, _, _ in each])
    piece = np.concatenate([m for _, each in lists for _, m, _ in each]).astype(np.int64)
    lengths = [len(b) for _, each in lists for b, _, _ in each]
    step = np.repeat([number for _, each in lists for number in range(len(each))], lengths)
    step -= np.concatenate([ago for _, each in lists for _, _, ago in each])
    table = Table(*bodies.rows())
    ends = np.cumsum([0] + [sum(len(b) for b, _, _ in each) for _, each in lists])
    whole, barrier = _WHOLE[table.kind], table.kind == _BARRIER
    columns = _as_rows(body, piece, step, ends, np.cumsum(size) - size, size, whole, barrier)
    return Entries(table, *columns)


@njit(cache=True)
def _as_rows(
    body: Ints, piece: Ints, step: Ints, ends: Ints, start: Ints, size: Ints, whole: Bools, barrier: Bools
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Every body becomes its rows, from the first of them on: `Entries`, but for the table. What is about the whole
    batch has no micro-batch, also where it stands among the rows of one."""
    begin = np.zeros(len(body) + 1, np.int64)
    for k in range(len(body)):
        begin[k + 1] = begin[k] + size[body[k]]
    count = begin[-1]
    rows, pieces = np.empty(count, np.int64), np.zeros(count, np.int64)
    steps, phases = np.empty(count, np.int64), np.zeros(count, np.int64)
    for k in range(len(body)):
        for number in range(size[body[k]]):
            entry, row = begin[k] + number, start[body[k]] + number
            rows[entry], steps[entry] = row, step[k]
            if barrier[row]:
                phases[entry] = piece[k]
            if not whole[row]:
                pieces[entry] = piece[k]
    return rows, pieces, steps, phases, begin[ends]


def _decided(
    bodies: Bodies, order: Order, body: Ints, of: Ints, variant: Ints, held: Sequence[Holding], steps: int
) -> list[tuple[Ints, Ints, Ints]]:  # fmt: skip
    """The same of every step where the exchange is decided while running: with the agenda of a stage in the pass that
    completes its gradients; and where steps cross, with the steps of blocks in the first forward pass after them."""
    layout, replica, rank = bodies.layout, held[0].replica, held[0].rank
    completing = np.isin(variant, (_LAST, _ONLY, _LAST + _OTHERWISE, _ONLY + _OTHERWISE))
    found = []
    for step in range(steps):
        # What stands in each place of the list: the bodies, what each is about, and how many steps ago that was.
        places = [[(int(b), int(piece), 0)] for b, piece in zip(body, of, strict=True)]
        places[-1] = [(bodies.add(tail(layout, held, final=step == steps - 1), replica, rank), 0, 0)]
        for holding in (h for h in held if layout.buckets[h.stage]):
            own = order[:, 2] == holding.stage
            (place,) = nonzero(completing & own).tolist()
            again = layout.recomputes and int(variant[place]) > _ONLY
            kind = Kind.R if again else Kind(int(order[place, 0]))
            agenda = layout.agenda(step, holding.stage)
            rest = decided_backward(layout, holding.stage, int(order[place, 1]), holding.lines[0], kind, agenda)
            number = bodies.add(rest, replica, rank, adds=1, last=True, again=again)
            places[1 + place] = [(number, places[1 + place][0][1], 0)]  # behind the head
            if layout.crosses:
                (first,) = nonzero((variant == _FIRST_FORWARD) & own).tolist()
                places[1 + first] = [
                    (bodies.add((row,), replica, rank, cut=True), places[1 + first][0][1], int(row.kind is Kind.STEP))
                    for row in stepping_forward(layout, holding.stage, holding.lines[0], steps=step > 0)
                ]
        columns = np.array([one for own in places for one in own], dtype=np.int64)
        found.append((columns[:, 0], columns[:, 1], columns[:, 2]))
    return found


def _by_way(layout: Layout) -> list[tuple[Ints, Ints]]:
    """For every rank of a replica the way (by its place in `stage_rows`) of each operation of its order; and what each
    is about, with nothing before the first and after the last, where its list has what comes once a step."""
    lines = layout.plan.lines
    return [
        (order[:, 2] * lines + order[:, 1], np.concatenate([[0], layout.piece(order), [0]]).astype(np.int64))
        for order in layout.orders
    ]


def _variants(order: Order, recomputed: Bools) -> Ints:
    """Which template each operation of a rank becomes; `recomputed`: whether what it is about is."""
    return _variant(order[:, 0], order[:, 2], recomputed, int(order[:, 2].max()) + 1)


@njit(cache=True)
def _variant(kind: Ints, stage: Ints, recomputed: Bools, stages: int) -> Ints:
    """The same."""
    variant = np.full(len(kind), _FORWARD, np.int64)
    seen = np.zeros(stages, np.bool_)
    first, last = np.full(stages, -1, np.int64), np.full(stages, -1, np.int64)
    for k in range(len(kind)):
        if kind[k] == _F and not seen[stage[k]]:
            seen[stage[k]], variant[k] = True, _FIRST_FORWARD
        elif kind[k] == _I:
            variant[k] = _INPUT
        elif kind[k] == _B or kind[k] == _W:
            variant[k] = _LATER
            if first[stage[k]] < 0:
                first[stage[k]] = k
            last[stage[k]] = k
    for own in range(stages):
        if first[own] >= 0:
            variant[first[own]], variant[last[own]] = _FIRST, _LAST
            if first[own] == last[own]:
                variant[first[own]] = _ONLY
    for k in range(len(kind)):
        if kind[k] == _W or (kind[k] == _B and recomputed[k]):
            variant[k] += _OTHERWISE
    return variant
