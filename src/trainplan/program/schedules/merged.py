"""Several stages on a rank, as any placement table says: their lists become one.

An order that writes a list for each stage (1F1B of four stages, say) is played with a rank for each set of stages that
share one. Everything takes one unit of time; in every unit a rank does one operation, of those that come next on one of
its stages and for which everything is there. Where several are: backward (B, I) before forward before W, then the
earlier micro-batch, then the earlier stage. In the order in which it does them they become its list.

    1F1B of stages on ranks 0 1 1 0        rank 0   0F0 0F1 0F2 3F0 3B0 3F1 3B1 0F3 0B0 …
                                           rank 1   1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 …

**It never deadlocks.** Let an operation *need* the one before it in the list of its stage and what it reads. With a
rank for each stage the order runs to its end, so that no operation needs itself in a circle. Then, as long as any are
left, there is one of them that needs none of the others; it comes next on its stage and everything is there, so that
its rank does it or another one in that unit. Hence every unit does something, and the play comes to an end. And the
merged lists run to their end, too: the unit in which an operation was done is larger than that of everything it needs,
and than that of the operation before it in its rank's list; so nothing waits for itself in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Ints, Order

_TURN = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}  # who goes first


def merged(alone: Sequence[Order], table: Sequence[int]) -> list[Order]:
    """The lists of the ranks of a table, from the lists that its stages have on ranks of their own.

    >>> from trainplan.program.schedules.naive import naive
    >>> from trainplan.program.schedules.order import Size
    >>> rank = merged(naive(Size(3, 1)), (0, 1, 0))[0]
    >>> [f"{stage}{Kind(kind).name}{micro}" for kind, _, stage, micro, _ in rank.tolist()]
    ['0F0', '2F0', '2B0', '0B0']
    """
    every = np.concatenate(alone)
    start = np.cumsum([0, *(len(order) for order in alone)])
    turn = np.array([_TURN.get(kind, -1) for kind in Kind])[every[:, 0]]
    unit = _play(turn, every[:, 3].copy(), start, np.array(table), int(every[:, 3].max()) + 1)
    home = np.repeat(np.array(table), np.diff(start))
    return [every[own][np.argsort(unit[own])] for own in (np.flatnonzero(home == r) for r in sorted(set(table)))]


@njit(cache=True)
def _play(turn: Ints, micro: Ints, start: Ints, table: Ints, micro_batches: int) -> Ints:
    """The unit of time in which each operation is done."""
    stages, ranks, count = len(start) - 1, table.max() + 1, len(turn)
    unit = np.full(count, -1, np.int64)
    cursor = start[:-1].copy()
    there = np.zeros((2, stages, micro_batches), np.bool_)  # done backward (0), and forward (1)
    chosen = np.empty(ranks, np.int64)  # the stage that each rank works on
    done = now = 0
    while done < count:
        chosen[:] = -1
        for stage in range(stages):
            op = cursor[stage]
            if op == start[stage + 1]:
                continue
            way = turn[op]
            before = stage - 1 if way == 1 else stage + 1 if way == 0 else -1
            if 0 <= before < stages and not there[way, before, micro[op]]:
                continue
            other = chosen[table[stage]]
            if other >= 0:
                rival = cursor[other]
                if turn[rival] < way or (turn[rival] == way and micro[rival] <= micro[op]):
                    continue
            chosen[table[stage]] = stage
        for rank in range(ranks):
            stage = chosen[rank]
            if stage < 0:
                continue
            op = cursor[stage]
            unit[op] = now
            cursor[stage] += 1
            if turn[op] < 2:
                there[turn[op], stage, micro[op]] = True
            done += 1
        now += 1
    return unit
