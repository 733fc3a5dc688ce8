"""Order: nobody waits for ever.

7. *ends*: no operation waits for itself in a circle: the program runs to its end.
8. *ordered*: there is one order of all collectives that every rank keeps to, also of collectives of different groups.
   Nothing orders these but the lists; and where two ranks issue two of them in opposite orders, each may wait in the
   one that the other comes to last. (NCCL does: a collective keeps its device until all members have come.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trainplan.program.check.view import Fault, View
from trainplan.program.program import Program
from trainplan.program.wiring import stuck


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
    after: dict[int, dict[int, int]] = {}  # collective → the one that a rank issues next → that rank
    for rank in np.flatnonzero(view.listed).tolist():
        row = program.lists.row(rank)
        row = row[program.group[row] >= 0].tolist()
        for before, op in pairwise(row):
            after.setdefault(before, {}).setdefault(op, rank)
    circle = _circle(after)
    if len({int(program.group[op]) for op in circle}) < 2:
        return  # none; or of one group, whose members then wait for ever: `ends` has found it
    for op, following in pairwise([*circle, circle[0]]):
        why = f"rank {after[op][following]} issues {_named(program, op)} before {_named(program, following)}"
        yield Fault("ordered", op, why + ("; nothing else orders them" if following == circle[0] else ""))


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
