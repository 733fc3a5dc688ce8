"""The list of every rank: templates repeated in the order of the schedule, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.templates import Row, templates
from trainplan.program.ops import Kind
from trainplan.program.program import Ints
from trainplan.program.schedules import SCHEDULES


@dataclass
class Entries:
    """Entries of lists, one array a field; sorted by rank, then by place in its list."""

    rank: Ints
    replica: Ints
    step: Ints
    stage: Ints
    kind: Ints
    unit: Ints
    peer: Ints  # other stage of a message
    micro: Ints
    adds: Ints  # 1: a backward pass that adds to gradients that are there
    last: Ints  # 1: belongs to the backward pass that completes the gradients

    def __len__(self) -> int:
        return len(self.kind)


def entries(layout: Layout, steps: int) -> Entries:
    """The lists of all ranks of all replicas."""
    lists = SCHEDULES[layout.plan.schedule](layout.plan.pp, layout.plan.micro)
    stages = [_stage_rows(layout, stage, order) for stage, order in enumerate(lists)]
    # Of one step of one replica; then repeated for the steps, and for the replicas on other ranks.
    pieces: list[tuple[int, int, int, Ints]] = []
    for replica in layout.replicas:
        for stage, rows in enumerate(stages):
            pieces.append((layout.local(replica, stage), replica, stage, rows))
    pieces.sort(key=lambda piece: piece[0])
    lengths = np.array([piece[3].shape[1] for piece in pieces], dtype=np.int64)
    times = lengths * steps
    table = np.concatenate([np.tile(piece[3], (1, steps)) for piece in pieces], axis=1)
    step = np.concatenate([np.repeat(np.arange(steps), length) for length in lengths])
    return Entries(
        rank=np.repeat([piece[0] for piece in pieces], times),
        replica=np.repeat([piece[1] for piece in pieces], times),
        step=step,
        stage=np.repeat([piece[2] for piece in pieces], times),
        kind=table[0], unit=table[1], peer=table[2], micro=table[3], adds=table[4], last=table[5],
    )  # fmt: skip


def _stage_rows(layout: Layout, stage: int, order: Ints) -> Ints:
    """Rows kind, unit, peer, micro, adds, last of one stage in one step."""
    shape = templates(layout, stage)
    backward = np.flatnonzero(order[:, 0] == Kind.B)
    which = np.where(order[:, 0] == Kind.F, 0, 1)
    which[backward[-1]] = 2
    bodies = [_table(shape.forward), _table(shape.backward), _table(shape.last_backward)]
    lengths = np.array([body.shape[1] for body in bodies])[which]
    head, tail = _table(shape.head), _table(shape.tail)
    start = head.shape[1] + np.concatenate([[0], np.cumsum(lengths)])
    rows = np.zeros((6, int(start[-1]) + tail.shape[1]), dtype=np.int64)
    rows[:3, : head.shape[1]] = head
    rows[:3, start[-1] :] = tail
    for number, body in enumerate(bodies):
        chosen = which == number
        places = start[:-1][chosen][:, None] + np.arange(body.shape[1])[None, :]
        rows[:3, places] = body[:, None, :]
        rows[3, places] = order[chosen, 2][:, None]
        rows[5, places] = int(number == 2)
    rows[4, start[backward[0] + 1] :] = 1  # every backward pass after the first of the step
    return rows


def _table(template: tuple[Row, ...]) -> Ints:
    return np.array([[row.kind, row.unit, row.peer] for row in template], dtype=np.int64).reshape(-1, 3).T
