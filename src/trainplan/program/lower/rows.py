"""The list of every rank: templates repeated in the order of the schedule.

A list holds the same few rows over and over, for one micro-batch after the other. So the distinct rows are kept once
(`Table`), and an entry of a list is the number of its row, a micro-batch and a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.templates import Row, templates
from trainplan.program.ops import Kind
from trainplan.program.program import Ints
from trainplan.program.schedules import SCHEDULES
from trainplan.program.text import WITHOUT_MICRO_BATCH

# What an operation of a schedule becomes: the template of a stage that is put in its place.
_HEAD, _FORWARD, _FIRST, _LATER, _LAST, _TAIL = range(6)
_BODIES = 6


@dataclass(frozen=True)
class Table:
    """The distinct rows, one array a field."""

    kind: Ints
    stage: Ints
    replica: Ints
    rank: Ints  # of the program
    unit: Ints
    peer: Ints  # other stage of a message, -1
    adds: Ints  # of a backward pass, how many times it goes over the gradients: `CostClass.accumulate`
    last: Ints  # 1: the backward pass that completes the gradients


@dataclass(frozen=True)
class Entries:
    """The lists of all ranks, one after the other."""

    table: Table
    row: Ints  # of `table`
    micro: Ints
    step: Ints
    start: Ints  # of the list of each rank


def entries(layout: Layout, steps: int) -> Entries:
    """The lists of all ranks of all replicas."""
    plan = layout.plan
    table, body_start, body_length = _table(layout)
    orders = [_bodies(order) for order in SCHEDULES[plan.schedule](plan.pp, plan.micro)]
    pieces = sorted((layout.local(r, s), number, s) for number, r in enumerate(layout.replicas) for s in range(plan.pp))
    body = np.concatenate([np.tile(orders[s][0], steps) + _BODIES * (number * plan.pp + s) for _, number, s in pieces])
    micro = np.concatenate([np.tile(orders[s][1], steps) for _, _, s in pieces])
    step = np.concatenate([np.repeat(np.arange(steps), len(orders[s][0])) for _, _, s in pieces])
    # Every body becomes its rows: from the first of them, counting up.
    length = body_length[body]
    begin = np.concatenate([[0], np.cumsum(length)])
    row = np.repeat(body_start[body] - begin[:-1], length) + np.arange(begin[-1])
    lists = np.cumsum([0] + [steps * len(orders[s][0]) for _, _, s in pieces])
    # What is about the whole batch has no micro-batch, also where it stands among the rows of one.
    whole = np.isin(table.kind, WITHOUT_MICRO_BATCH)
    micro = np.where(whole[row], 0, np.repeat(micro, length))
    return Entries(table, row, micro, np.repeat(step, length), begin[lists])


def _bodies(order: Ints) -> tuple[Ints, Ints]:
    """One step of a rank: which template comes after which, and for which micro-batch."""
    backward = np.flatnonzero(order[:, 0] != Kind.F)
    body = np.full(len(order) + 2, _FORWARD, dtype=np.int64)
    body[0], body[-1] = _HEAD, _TAIL
    body[1 + backward], body[1 + backward[0]], body[1 + backward[-1]] = _LATER, _FIRST, _LAST
    return body, np.concatenate([[0], order[:, 2], [0]])


def _table(layout: Layout) -> tuple[Table, Ints, Ints]:
    """The distinct rows, and where the rows of each (replica, stage, body) begin and how many they are."""
    rows: list[tuple[int, ...]] = []
    start, length = [], []
    shapes = [templates(layout, stage) for stage in range(layout.plan.pp)]
    # A pass adds to gradients that an earlier pass left, or that our own buckets keep from step to step. In the last
    # pass DDP copies each gradient into its bucket, which costs about the same.
    several, kept = layout.plan.micro > 1, layout.plan.dp > 1 and not layout.observed
    once, later = int(kept), int(several or kept)
    for replica in layout.replicas:
        for stage, shape in enumerate(shapes):
            bodies: list[tuple[tuple[Row, ...], int, bool]] = [
                (shape.head, 0, False),
                (shape.forward, 0, False),
                (shape.backward, once, False),
                (shape.backward, 1, False),
                (shape.last_backward, later + layout.observed, True),
                (shape.tail, 0, False),
            ]
            rank = layout.local(replica, stage)
            for template, adds, last in bodies:
                start.append(len(rows))
                length.append(len(template))
                rows += [(row.kind, stage, replica, rank, row.unit, row.peer, adds, last) for row in template]
    columns = np.array(rows, dtype=np.int64).T
    return Table(*columns), np.array(start), np.array(length)
