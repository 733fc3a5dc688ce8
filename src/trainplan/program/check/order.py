"""Order: nobody waits for ever.

7. *ends*: no operation waits for itself in a circle: the program runs to its end.
8. *ordered*: there is one order of all collectives that every rank keeps to, also of collectives of different groups.
   Nothing orders these but the lists; and where two ranks issue two of them in opposite orders, each may wait in the
   one that the other comes to last. (NCCL does: a collective keeps its device until all members have come.)
9. *apart*: between ranks that meet at barriers, a message is sent and received between the same two: nothing goes on
   over a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check.view import Fault, View
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Bools, Ints, Program, nonzero
from trainplan.program.wiring import stuck

_BARRIER, _MESSAGE = int(Kind.BARRIER), int(Value.MESSAGE)


def ends(view: View) -> Iterator[Fault]:
    program = view.program
    left = stuck(program, view.wiring)
    if not len(left):
        return
    never = np.zeros(len(program), dtype=bool)
    never[left] = True
    for rank in range(program.world):
        waiting = [int(op) for op in program.lists.row(rank) if never[op]]
        if not waiting:
            continue
        op = waiting[0]
        missing = [int(program.value_maker[v]) for v in program.reads.row(op)]
        missing = [m for m in missing if m >= 0 and never[m]]
        if missing:
            at = int(program.rank[missing[0]])
            head = next(int(other) for other in program.lists.row(at) if never[other])
            why = f"rank {rank} waits at {program.name(op)} for {program.name(missing[0])} of rank {at}, "
            yield Fault(
                "ends", op, why + (f"which waits at {program.name(head)}" if head != missing[0] else "which waits too")
            )
        else:
            yield Fault("ends", op, f"rank {rank} waits for ever at {program.name(op)}")


def ordered(view: View) -> Iterator[Fault]:
    program = view.program
    if in_order(program.lists.start, program.lists.items, program.group, view.listed):
        return
    after: dict[int, dict[int, int]] = {}  # collective → the one that a rank issues next → that rank
    entries = nonzero((program.group[view.entry_op] >= 0) & view.listed[view.entry_rank])
    op, rank = view.entry_op[entries], view.entry_rank[entries]
    for i in nonzero(rank[1:] == rank[:-1]).tolist():
        after.setdefault(int(op[i]), {}).setdefault(int(op[i + 1]), int(rank[i]))
    circle = _circle(after)
    if len({int(program.group[one]) for one in circle}) < 2:
        return  # none; or of one group, whose members then wait for ever: `ends` has found it
    for one, following in pairwise([*circle, circle[0]]):
        why = f"rank {after[one][following]} issues {_named(program, one)} before {_named(program, following)}"
        yield Fault("ordered", one, why + ("; nothing else orders them" if following == circle[0] else ""))


def apart(view: View) -> Iterator[Fault]:
    program = view.program
    barrier = program.kind == _BARRIER
    if not barrier.any():
        return
    meets = np.full(program.world, -1, dtype=np.int64)  # rank → the group that it meets at barriers
    for group in np.unique(program.group[barrier]).tolist():
        meets[list(program.groups[group])] = group
    before, takers, givers = _over_barriers(
        program.lists.start, program.lists.items, barrier, program.rank, meets, program.value_kind,
        program.value_maker, program.reads.start, program.reads.items,
    )  # fmt: skip
    for taker, giver in zip(takers.tolist(), givers.tolist(), strict=True):
        gives, takes = (f"{program.name(op)} after {before[op]} barriers" for op in (giver, taker))
        yield Fault("apart", taker, f"{gives}, {takes}: the message goes on over a barrier")


@njit(cache=True)
def _over_barriers(
    list_start: Ints, list_items: Ints, barrier: Bools, rank: Ints, meets: Ints, value_kind: NDArray[np.uint8],
    maker: Ints, read_start: Ints, read_items: Ints,
) -> tuple[Ints, Ints, Ints]:  # fmt: skip
    """How many barriers stand before every operation in its list; and who takes and gives what goes on over one, where
    both meet at the same."""
    before = np.zeros(len(rank), np.int64)
    for r in range(len(list_start) - 1):
        met = 0
        for e in range(list_start[r], list_start[r + 1]):
            met += barrier[list_items[e]]
            before[list_items[e]] = met
    takers, givers, count = np.empty(len(read_items), np.int64), np.empty(len(read_items), np.int64), 0
    for op in range(len(rank)):
        for k in range(read_start[op], read_start[op + 1]):
            by = maker[read_items[k]]
            if value_kind[read_items[k]] != _MESSAGE or by < 0 or before[op] == before[by]:
                continue
            if meets[rank[op]] >= 0 and meets[rank[op]] == meets[rank[by]]:
                takers[count], givers[count] = op, by
                count += 1
    return before, takers[:count], givers[:count]


@njit(cache=True)
def in_order(list_start: Ints, list_items: Ints, group: Ints, listed: Bools) -> bool:
    """Whether there is an order of all collectives that the lists of all ranks keep to: nearly always there is."""
    ops = len(group)
    start, waits = np.zeros(ops + 2, np.int64), np.zeros(ops, np.int64)
    following = np.full(len(list_items), -1, np.int64)  # list entry → the collective that its rank issues next
    for rank in range(len(list_start) - 1):
        last = -1
        for e in range(list_start[rank], list_start[rank + 1] if listed[rank] else list_start[rank]):
            if group[list_items[e]] < 0:
                continue
            if last >= 0:
                following[last] = list_items[e]
                start[list_items[last] + 2] += 1
                waits[list_items[e]] += 1
            last = e
    for op in range(ops):
        start[op + 2] += start[op + 1]
    after = np.empty(start[ops + 1], np.int64)
    for e in range(len(list_items)):
        if following[e] >= 0:
            after[start[list_items[e] + 1]] = following[e]
            start[list_items[e] + 1] += 1
    ready, top = np.empty(ops, np.int64), 0
    for op in range(ops):
        if waits[op] == 0:
            ready[top] = op
            top += 1
    done = 0
    while top > 0:
        top -= 1
        done += 1
        op = ready[top]
        for k in range(start[op], start[op + 1]):
            waits[after[k]] -= 1
            if waits[after[k]] == 0:
                ready[top] = after[k]
                top += 1
    return done == ops


def _circle(after: dict[int, dict[int, int]]) -> list[int]:
    """Operations each of which comes before the next, and the last before the first; empty where there are none."""
    state: dict[int, int] = {}  # 1: on the way, 2: leads to no circle
    for root in after:
        path = [root] if root not in state else []
        ways = [iter(after[root])] if path else []
        state.setdefault(root, 1)
        while path:
            op = next(ways[-1], -1)
            if op < 0:
                state[path.pop()] = 2
                ways.pop()
            elif state.get(op) == 1:
                return path[path.index(op) :]
            elif op not in state:
                state[op] = 1
                path.append(op)
                ways.append(iter(after.get(op, ())))
    return []


def _named(program: Program, op: int) -> str:
    return f"{program.name(op)} of ranks {', '.join(map(str, program.members(op)))}"
