"""Who waits for whom: the successors of every operation, worked out once a program.

Two things make an operation wait for another: it reads what the other makes, or it holds a resource that the other
comes before on. The third, that a rank's host has come to it, is kept by the lists themselves (and is enough where the
host waited for the other).

`stuck` plays the program without time: what is left over can never run, and says where a program deadlocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.ops import COLLECTIVES, COMPUTES
from trainplan.program.program import Bools, Ints, Program, Ragged, are, nonzero

Small = NDArray[np.int32]  # walking the graph is bound by memory, and no program has 2³¹ operations
_COMPUTE, _COLLECTIVE = are(COMPUTES), are(COLLECTIVES)
# What is known of an operation lies side by side: playing jumps from rank to rank, and misses the cache once a jump.
_OP = np.dtype([
    ("unmet", np.int32),  # how many it still waits for, and lists that must come to it
    ("successors", np.int32),  # where those that wait for it stand, from here …
    ("successors_end", np.int32),  # … to here
    ("attended", np.int32),  # how many collectives its host still waits for before it issues it
    ("waits", np.bool_),  # whether its host waits for it to end
], align=True)  # fmt: skip


@dataclass(frozen=True)
class Wiring:
    """The graph that the clock and the check walk."""

    successor_start: Small  # operation → operations that wait for it, as a ragged array
    successor_items: Small
    unmet: Small  # operation → how many operations it waits for, and lists that must come to it
    member_start: Small  # operation → ranks in whose lists it stands, as a ragged array
    member_items: Small
    free: Bools  # rank → decides by policy, so its list does not hold it back
    # Operation → how many collectives its host waits for before it issues it; empty where hosts wait for none.
    attended: Small


def wire(program: Program) -> Wiring:
    """The wiring of a program."""
    n = len(program)
    policies = np.array(program.policy or (0,) * program.world, dtype=np.int64)
    free = policies != 0
    groups = Ragged.of(program.groups)
    member_start, member_items = _members(program.rank, program.group, groups.start, groups.items)
    start, items, unmet = _successors(
        n, program.reads.start, program.reads.items, program.value_maker,
        program.lists.start, program.lists.items, program.holds.start, program.holds.items,
        program.resource_rank, program.waits, free, member_start, member_items,
    )  # fmt: skip
    return Wiring(start, items, unmet, member_start, member_items, free, _attended(program))


def _attended(program: Program) -> Small:
    """Operation → how many collectives its host waits for before it issues it; twice, if it reads two things of one."""
    if not program.hosts_attend:
        return np.zeros(0, np.int32)
    maker, reader = program.value_maker[program.reads.items], program.reads.owner
    found = (maker >= 0) & _COLLECTIVE[program.kind[maker]] & _COMPUTE[program.kind[reader]]
    return np.bincount(reader[found], minlength=len(program)).astype(np.int32)


@njit(cache=True)
def _members(rank: Ints, group: Ints, group_start: Ints, group_items: Ints) -> tuple[Small, Small]:
    """Operation → ranks that take part."""
    n = len(rank)
    start = np.zeros(n + 1, np.int32)
    for op in range(n):
        g = group[op]
        start[op + 1] = start[op] + (group_start[g + 1] - group_start[g] if g >= 0 else 1)
    items = np.empty(start[n], np.int32)
    for op in range(n):
        g = group[op]
        if g < 0:
            items[start[op]] = rank[op]
        else:
            for k in range(group_start[g + 1] - group_start[g]):
                items[start[op] + k] = group_items[group_start[g] + k]
    return start, items


@njit(cache=True)
def _successors(
    n: int, read_start: Ints, read_items: Ints, maker: Ints, list_start: Ints, list_items: Ints, hold_start: Ints,
    hold_items: Ints, resource_rank: Ints, waits: Bools, free: Bools, member_start: Small, member_items: Small,
) -> tuple[Small, Small, Small]:  # fmt: skip
    # Counted first, filled second: a counting sort of the edges by their tail.
    unmet = np.zeros(n, np.int32)
    start = np.zeros(n + 2, np.int32)
    world = len(list_start) - 1
    for op in range(n):
        for k in range(read_start[op], read_start[op + 1]):
            tail = maker[read_items[k]]
            if tail >= 0 and tail != op:
                start[tail + 2] += 1
                unmet[op] += 1
        for k in range(member_start[op], member_start[op + 1]):
            if not free[member_items[k]]:
                unmet[op] += 1
    # What a collective holds on each rank stands in the order of its ranks, nearly always: then nobody has to look
    # through what the others hold.
    tidy = np.ones(n, np.bool_)
    for op in range(n):
        for k in range(hold_start[op] + 1, hold_start[op + 1]):
            if resource_rank[hold_items[k]] < resource_rank[hold_items[k - 1]]:
                tidy[op] = False
    for fill in range(2):
        following = hold_start[:-1].copy()  # of a tidy operation: the first that it holds on a rank not yet looked at
        if fill == 1:
            for op in range(n):
                start[op + 2] += start[op + 1]
            items = np.empty(start[n + 1], np.int32)
            for op in range(n):
                for k in range(read_start[op], read_start[op + 1]):
                    tail = maker[read_items[k]]
                    if tail >= 0 and tail != op:
                        items[start[tail + 1]] = op
                        start[tail + 1] += 1
        last = np.full(len(resource_rank), -1, np.int64)
        for rank in range(world):
            if free[rank]:
                continue  # a policy decides on the resources of this rank, not the list
            for e in range(list_start[rank], list_start[rank + 1]):
                op = list_items[e]
                for k in range(following[op], hold_start[op + 1]):
                    resource = hold_items[k]
                    if resource_rank[resource] != rank:
                        if tidy[op] and resource_rank[resource] > rank:
                            break
                        continue
                    if tidy[op]:
                        following[op] = k + 1
                    before = last[resource]
                    last[resource] = op
                    if before < 0 or waits[before]:
                        continue  # nobody comes before; or the list does not come to this one until that is over
                    if fill == 0:
                        start[before + 2] += 1
                        unmet[op] += 1
                    else:
                        items[start[before + 1]] = op
                        start[before + 1] += 1
    return start[: n + 1], items, unmet


def stuck(program: Program, wiring: Wiring) -> Ints:
    """The operations that can never run; empty for a program that ends."""
    done = run_without_time(
        program.lists.start, program.lists.items, program.waits, wiring.free, wiring.unmet,
        wiring.successor_start, wiring.successor_items, wiring.member_start, wiring.member_items, wiring.attended,
        program.rank, _COLLECTIVE[program.kind],
    )  # fmt: skip
    return nonzero(~done)


@njit(cache=True)
def run_without_time(
    list_start: Ints, list_items: Ints, waits: Bools, free: Bools, unmet: Small, succ_start: Small, succ_items: Small,
    member_start: Small, member_items: Small, attended: Small, rank_of: Ints, collective: Bools,
) -> Bools:  # fmt: skip
    """Of every operation, whether it runs at all if nothing takes any time."""
    n, world = len(unmet), len(list_start) - 1
    done = np.zeros(n, np.bool_)
    ops = np.empty(n, _OP)
    attends, kept = len(attended) > 0, np.zeros(world, np.bool_)
    cursor = list_start[:-1].copy()
    stack = np.empty(n, np.int32)
    top = 0
    for op in range(n):
        at = ops[op]
        at.unmet, at.successors, at.successors_end, at.waits = unmet[op], succ_start[op], succ_start[op + 1], waits[op]
        at.attended = attended[op] if attends else 0
        if at.unmet == 0:
            stack[top] = op
            top += 1
    for rank in range(world):
        top = _come_to(rank, cursor, list_start, list_items, free, kept, ops, stack, top)
    while top > 0:
        top -= 1
        op = stack[top]
        done[op] = True
        at = ops[op]
        for k in range(at.successors, at.successors_end):
            after = ops[succ_items[k]]
            after.unmet -= 1
            if after.unmet == 0:
                stack[top] = succ_items[k]
                top += 1
            if attends and collective[op] and after.attended > 0:
                after.attended -= 1
                rank = rank_of[succ_items[k]]
                if after.attended == 0 and not kept[rank]:
                    top = _come_to(rank, cursor, list_start, list_items, free, kept, ops, stack, top)
        if at.waits:
            for k in range(member_start[op], member_start[op + 1]):
                kept[member_items[k]] = False
                top = _come_to(member_items[k], cursor, list_start, list_items, free, kept, ops, stack, top)
    return done


@njit(cache=True, inline="always")
def _come_to(
    rank: int, cursor: Ints, list_start: Ints, list_items: Ints, free: Bools, kept: Bools, ops: NDArray, stack: Small,
    top: int,
) -> int:  # fmt: skip
    """Let the host of a rank go on, up to and with the next operation that it waits for, or up to one before which it
    waits for collectives. What can run now is put on the stack, whose new height is returned."""
    if free[rank]:
        return top
    while cursor[rank] < list_start[rank + 1]:
        op = list_items[cursor[rank]]
        at = ops[op]
        if at.attended > 0:
            break
        cursor[rank] += 1
        at.unmet -= 1
        if at.unmet == 0:
            stack[top] = op
            top += 1
        if at.waits:
            kept[rank] = True
            break
    return top
