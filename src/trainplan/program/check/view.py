"""A program as the rules see it: with the places of operations in lists, and several columns as one number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from trainplan.lasting import lasting
from trainplan.program.program import Bools, Ints, Program, nonzero
from trainplan.program.wiring import Small, Wiring


@dataclass(frozen=True)
class Fault:
    """A place where a program breaks a rule."""

    rule: str
    op: int  # -1: no single operation is at fault
    why: str


@dataclass(frozen=True)
class View:
    """A program with what several rules need."""

    program: Program
    wiring: Wiring
    entry_op: Ints  # every list entry: its operation, rank and place in that list
    entry_rank: Ints
    place: Ints  # of operations with one rank

    @lasting
    def exact(self) -> Ints:
        """What an operation is about, as one number."""
        return pack(self.program, "job", "step", "pipeline", "stage", "micro_batch", "slice", "unit")

    @lasting
    def batch(self) -> Ints:
        """The same for all units of a micro-batch on a stage."""
        return pack(self.program, "job", "step", "pipeline", "stage", "micro_batch", "slice")

    @lasting
    def passed(self) -> Ints:
        """What both ends of a message are about, as one number."""
        return pack(self.program, "job", "step", "pipeline", "micro_batch", "slice")

    @lasting
    def listed(self) -> Bools:
        """Rank → its list says what comes before what."""
        return ~self.wiring.free

    @lasting
    def member_place(self) -> Small:
        """For every entry of `wiring.member_items`, the place of the operation in the list of that rank."""
        lists, wiring = self.program.lists, self.wiring
        return _member_places(lists.start, lists.items, wiring.member_start, wiring.member_items)


@njit(cache=True)
def _member_places(list_start: Ints, list_items: Ints, member_start: Small, member_items: Small) -> Small:
    found = np.full(len(member_items), -1, np.int32)
    ahead = member_start[:-1].copy()  # groups are in the order of ranks, nearly always: so this member is next
    for rank in range(len(list_start) - 1):
        for e in range(list_start[rank], list_start[rank + 1]):
            op = list_items[e]
            k = ahead[op]
            if k < member_start[op + 1] and member_items[k] == rank:
                found[k] = e - list_start[rank]
                ahead[op] += 1
                continue
            for k in range(member_start[op], member_start[op + 1]):
                if member_items[k] == rank:
                    found[k] = e - list_start[rank]
    return found


def where(mask: np.ndarray) -> list[int]:
    """The places where something is wrong."""
    return list(nonzero(mask).tolist())


def pack(program: Program, *columns: str) -> Ints:
    """Several columns as one number, so that rows can be compared and sorted."""
    return np.asarray(_packed(tuple([np.ascontiguousarray(getattr(program, column)) for column in columns])))


@njit(cache=True)
def _packed(columns: tuple[Ints, ...]) -> Ints:
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        top = 0
        for number in column:
            top = max(top, number)
        if top > 0:
            for row in range(len(column)):
                key[row] = key[row] * (top + 1) + column[row]
    return key


def close(key: Ints) -> Ints:
    """The keys, or where they are few and far apart (ticks of a lockstep) their places: a table of all between them
    would be larger than what it is for.

    >>> close(np.array([3, 1, 3])).tolist(), close(np.array([10**9, 5, 10**9])).tolist()
    ([3, 1, 3], [1, 0, 1])
    """
    if key.max(initial=0) < 8 * len(key):
        return key
    return np.asarray(np.unique(key, return_inverse=True)[1], dtype=np.int64)


def maker(program: Program, value: int) -> str:
    """Who makes a value, by name."""
    found = int(program.value_maker[value])
    return program.name(found) if found >= 0 else "nobody"
