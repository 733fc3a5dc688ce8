"""Lockstep: all ranks of a replica compute, then all exchange, then all compute …, with a barrier after each.

That is how the thesis found torchgpipe to work (Jansen 2020, fig. 6.1): its clock ticks, and in a tick what a stage
needs is copied to it first, then all stages compute, and nothing is copied meanwhile. In tick k stage j has its turn
with micro-batch k − j; on the way back the same ticks come in the opposite order.

    phase     0     1      2      3      4         …             p = 2, m = 2: ticks 0, 1, 2 forward
    rank 0    F0  | SEND0 |  F1 | SEND1 |    |      | RECV1 | B1 | RECV0 | B0 |
    rank 1        | RECV0 |  F0 | RECV1 | F1 | B1 | SEND1  | B0 | SEND0 |    |

A step is a row of **phases**, each ended by a barrier that bears its number: with n = m + p − 1 ticks there are n to
compute in and n − 1 to exchange in between, and as many on the way back. What goes over several cuts (a skip
connection) is copied right before it is read, and its gradient right after it is made.

>>> phases = Phases(stages=2, micro_batches=2)
>>> phases.forward(1, 0), phases.activation(1, 0), phases.backward(1, 1), phases.gradient(1, 1), phases.count
(2, 1, 5, 6, 10)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.row import Row
from trainplan.program.lower.templates import messages
from trainplan.program.ops import SENDS, Kind
from trainplan.program.program import Ints
from trainplan.program.schedules import Order

Number = TypeVar("Number", int, Ints)
_F = int(Kind.F)


@dataclass(frozen=True)
class Phases:
    """The phases of a step: when each stage has its turn with each micro-batch."""

    stages: int
    micro_batches: int

    @property
    def ticks(self) -> int:
        """In each direction."""
        return self.micro_batches + self.stages - 1

    @property
    def count(self) -> int:
        return 2 * (2 * self.ticks - 1)

    def forward(self, stage: Number, micro: Number) -> Number:
        return 2 * (stage + micro)

    def activation(self, target: Number, micro: Number) -> Number:
        """What a stage reads comes right before its turn."""
        return self.forward(target, micro) - 1

    def backward(self, stage: Number, micro: Number) -> Number:
        return self.count - 1 - self.forward(stage, micro)

    def gradient(self, target: Number, micro: Number) -> Number:
        """What a stage has read gets its gradient right after its turn."""
        return self.backward(target, micro) + 1


def phases_of(layout: Layout) -> Phases:
    return Phases(layout.plan.depth, layout.plan.micro)


def apart_from(layout: Layout, stages: Sequence[int]) -> tuple[Row, ...]:
    """What a rank with these stages does apart from their passes."""
    rows = [row for stage in stages for row in messages(layout, stage, 0)]
    return (*rows, Row(Kind.BARRIER, stages[0], 0))


def in_phases(layout: Layout, order: Order, body: Ints, apart: Sequence[tuple[Row, int]]) -> tuple[Ints, Ints]:
    """The bodies of a rank's list, and their micro-batches (of barriers: their phases).

    `body`: those of the passes in their order; `apart`: the rows that stand by themselves, with their bodies.
    """
    key = "phases", tuple([row for row, _ in apart])
    counts, numbers, at = layout.orders.once(key, lambda: _in_turn(layout, order, key[1]))
    return np.concatenate([body, np.repeat([own for _, own in apart], counts)])[at], numbers


def _in_turn(layout: Layout, order: Order, apart: Sequence[Row]) -> tuple[list[int], Ints, Ints]:
    """How often each row comes that stands by itself; and in the order of the list, what everything is about, and where
    it stands among the passes and those rows, one after the other."""
    phases = phases_of(layout)
    stage, number = order[:, 2], order[:, 3]
    turn = np.where(order[:, 0] == _F, phases.forward(stage, number), phases.backward(stage, number))
    parts = [(number, 3 * turn + 1)]  # within a phase: sends, what waits, the barrier
    micro = np.arange(layout.plan.micro)
    for row in apart:
        if row.kind is Kind.BARRIER:
            every = np.arange(phases.count)
            parts.append((every, 3 * every + 2))
            continue
        # The stage further on reads the activation and makes its gradient.
        target = np.full(len(micro), max(row.stage, row.peer))
        there = row.kind in (Kind.SEND_F, Kind.RECV_F)
        turn = phases.activation(target, micro) if there else phases.gradient(target, micro)
        parts.append((micro, 3 * turn + (row.kind not in SENDS)))
    numbers, slots = (np.concatenate(column) for column in zip(*parts, strict=True))
    at = np.argsort(slots, kind="stable")
    return [len(about) for about, _ in parts[1:]], numbers[at], at
