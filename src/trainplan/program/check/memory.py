"""Values.

4. *alive*: an operation makes, reads and frees only what is on its rank, after it was made and before it is freed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check.view import Fault, View, where
from trainplan.program.program import Bools, Ints
from trainplan.program.wiring import Small

# What may be wrong with a value, and with the reading of one: bits.
_MADE_ELSEWHERE, _FREED_ELSEWHERE, _FREED_FIRST = 1, 2, 4
_READ_ELSEWHERE, _READ_FIRST, _READ_LAST = 1, 2, 4


def alive(view: View) -> Iterator[Fault]:
    program, wiring = view.program, view.wiring
    maker, end, rank = program.value_maker, program.value_end, program.value_rank
    reads = program.reads
    values, readings = judge(
        rank, maker, end, reads.start, reads.items, view.listed, wiring.member_start, wiring.member_items,
        view.member_place,
    )  # fmt: skip
    for bit, ops, does in ((_MADE_ELSEWHERE, maker, "makes"), (_FREED_ELSEWHERE, end, "frees")):
        for v in where(values & bit):
            why = f"{program.name(ops[v])} {does} a value of rank {rank[v]}, not of its own"
            yield Fault("alive", int(ops[v]), why)
    for v in where(values & _FREED_FIRST):
        yield Fault(
            "alive", int(end[v]), f"{program.name(end[v])} frees what {program.name(maker[v])} makes only later"
        )
    for i in where(readings):
        op, v = int(reads.owner[i]), int(reads.items[i])
        if readings[i] & _READ_ELSEWHERE:
            why = f"reads a value of rank {rank[v]}, where it does not run"
        elif readings[i] & _READ_FIRST:
            why = f"reads what {program.name(maker[v])} makes only later on its rank"
        else:
            why = f"reads what {program.name(end[v])} has freed already"
        yield Fault("alive", op, f"{program.name(op)} {why}")


@njit(cache=True)
def judge(
    value_rank: Ints, maker: Ints, end: Ints, read_start: Ints, read_items: Ints, listed: Bools, member_start: Small,
    member_items: Small, member_place: Small,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:  # fmt: skip
    """What is wrong with every value, and with every reading. Messages, which are on no rank, are for `matched`."""
    values, readings = np.zeros(len(maker), np.uint8), np.zeros(len(read_items), np.uint8)
    made = np.full(len(maker), -1, np.int32)  # places in the list of the value's rank
    freed = np.full(len(maker), np.iinfo(np.int32).max, np.int32)
    for v in range(len(maker)):
        rank = value_rank[v]
        if rank < 0:
            continue
        if maker[v] >= 0:
            made[v] = _place(maker[v], rank, member_start, member_items, member_place)
            if made[v] < 0:
                values[v] |= _MADE_ELSEWHERE
        if end[v] >= 0:
            freed[v] = _place(end[v], rank, member_start, member_items, member_place)
            if freed[v] < 0:
                values[v] |= _FREED_ELSEWHERE
            elif listed[rank] and freed[v] < made[v]:
                values[v] |= _FREED_FIRST
    for op in range(len(read_start) - 1):
        for k in range(read_start[op], read_start[op + 1]):
            v = read_items[k]
            rank = value_rank[v]
            if rank < 0:
                continue
            place = _place(op, rank, member_start, member_items, member_place)
            if place < 0:
                readings[k] = _READ_ELSEWHERE
            elif listed[rank] and maker[v] >= 0 and made[v] >= place:
                readings[k] = _READ_FIRST
            elif listed[rank] and 0 <= freed[v] < place:
                readings[k] = _READ_LAST
    return values, readings


@njit(cache=True)
def _place(op: int, rank: int, member_start: Small, member_items: Small, member_place: Small) -> int:
    """The place of an operation in the list of a rank; -1 where it does not stand there."""
    for k in range(member_start[op], member_start[op + 1]):
        if member_items[k] == rank:
            return int(member_place[k])
    return -1
