"""The clock plays a program: given seconds for every operation, when does each start and end?

An operation starts when (1) what it reads has been made, (2) its resources are free, (3) the host of its rank has
issued it: hosts go through their lists in order, spend `issue` seconds on an operation, and stop at one that they
wait for until it ends. It ends `run` seconds later, but never before the host has finished issuing it.

Two ways of playing, with the same answer where both apply:

* `_play_lists`: every order is fixed by the lists, so each operation's times follow from those before it: one pass
  over the graph, in any order that respects it. This is what a search uses.
* `events.play`: in the order of time, with an event queue. It is needed where a rank decides by a policy, and where
  communication slows down compute on the same rank, since then a duration depends on what goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Slowdown
from trainplan.errors import ProgramError
from trainplan.predict import events
from trainplan.program.ops import RECEIVES, SPECS, Kind
from trainplan.program.program import Program
from trainplan.program.timeline import Event, Timeline
from trainplan.program.wiring import Wiring, wire

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """When each operation of a program starts and ends, and the order in which they ended."""

    program: Program
    start: Floats
    end: Floats
    order: NDArray[np.int64]

    @cached_property
    def position(self) -> NDArray[np.int64]:
        """The place of each operation in the order."""
        position = np.empty(len(self.order), dtype=np.int64)
        position[self.order] = np.arange(len(self.order))
        return position

    @property
    def makespan(self) -> float:
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0

    def timeline(self) -> Timeline:
        """As a timeline, for people and for joining with a measured one."""
        program = self.program
        found = []
        for i in np.lexsort((self.position, self.start)):
            op = program.op(i)
            text = str(op)
            for rank in op.ranks:
                found.append(Event(text, op.key.kind.name, rank, float(self.start[i]), float(self.end[i]), op.bytes))
        return Timeline("predicted", program.world, program.steps, tuple(found), program.title)


def play(
    program: Program,
    run: Floats,
    issue: Floats | None = None,
    slowdown: Slowdown | None = None,
    wiring: Wiring | None = None,
) -> Played:
    """Play a program whose operations take `run` seconds each (and their hosts `issue` seconds to issue)."""
    wiring = wiring or wire(program)
    run = np.ascontiguousarray(run, dtype=np.float64)
    issue = np.zeros(len(program)) if issue is None else np.ascontiguousarray(issue, dtype=np.float64)
    slows = slowdown is not None and slowdown != Slowdown()
    if slows or wiring.free.any():
        start, end, order = events.play(program, wiring, run, issue, slowdown or Slowdown())
    else:
        start, end, order = _play_lists(
            program.lists.start, program.lists.items, program.waits, wiring.successor_start, wiring.successor_items,
            wiring.unmet, wiring.member_start, wiring.member_items, run, issue,
        )  # fmt: skip
    if len(order) < len(program):
        raise ProgramError(
            f"program {program.title or 'without a title'}",
            f"{len(program) - len(order)} of {len(program)} operations never run: it deadlocks",
            "program.check.check, which shows where",
        )
    return Played(program, start, end, order)


@njit(cache=True)
def _play_lists(
    list_start: NDArray, list_items: NDArray, waits: NDArray, succ_start: NDArray, succ_items: NDArray,
    unmet0: NDArray, member_start: NDArray, member_items: NDArray, run: Floats, issue: Floats,
) -> tuple[Floats, Floats, NDArray]:  # fmt: skip
    n = len(run)
    world = len(list_start) - 1
    start, end = np.zeros(n), np.zeros(n)
    order = np.empty(n, np.int64)
    done = 0
    unmet = unmet0.copy()
    host = np.zeros(world)  # when the host of a rank is free to issue
    cursor = list_start[:-1].copy()
    stack = np.empty(n, np.int32)
    top = 0
    # `start` holds the latest end among predecessors until the operation runs; `end` the time it was fully issued.
    for rank in range(world):
        top = _issue(rank, cursor, list_start, list_items, waits, unmet, host, start, end, issue, stack, top)
    while top > 0:
        top -= 1
        op = stack[top]
        over = max(start[op] + run[op], end[op])
        end[op] = over
        order[done] = op
        done += 1
        for k in range(succ_start[op], succ_start[op + 1]):
            after = succ_items[k]
            if over > start[after]:
                start[after] = over
            unmet[after] -= 1
            if unmet[after] == 0:
                stack[top] = after
                top += 1
        if waits[op]:
            for k in range(member_start[op], member_start[op + 1]):
                rank = member_items[k]
                if over > host[rank]:
                    host[rank] = over
                top = _issue(rank, cursor, list_start, list_items, waits, unmet, host, start, end, issue, stack, top)
    return start, end, order[:done]


@njit(cache=True, inline="always")
def _issue(
    rank: int, cursor: NDArray, list_start: NDArray, list_items: NDArray, waits: NDArray, unmet: NDArray, host: Floats,
    start: Floats, end: Floats, issue: Floats, stack: NDArray, top: int,
) -> int:  # fmt: skip
    """Let the host of a rank go on, up to and with the next operation that it waits for."""
    while cursor[rank] < list_start[rank + 1]:
        op = list_items[cursor[rank]]
        cursor[rank] += 1
        if host[rank] > start[op]:
            start[op] = host[rank]
        host[rank] += issue[op]
        if host[rank] > end[op]:
            end[op] = host[rank]
        unmet[op] -= 1
        if unmet[op] == 0:
            stack[top] = op
            top += 1
        if waits[op]:
            break
    return top


def seconds_by_kind(program: Program, table: dict[Kind, float]) -> Floats:
    """Seconds for every operation from one number a kind; receiving takes none unless it is named."""
    by_kind = np.zeros(len(Kind))
    for kind, value in table.items():
        by_kind[kind] = value
    missing = [k.name for k in Kind if k not in table and k not in RECEIVES and (program.kind == k).any()]
    if missing:
        raise ProgramError("seconds_by_kind", f"no seconds were given for {', '.join(missing)}", f"adding {missing[0]}")
    return by_kind[program.kind]


def compute_seconds(played: Played) -> Floats:
    """Seconds of compute on each rank."""
    program = played.program
    lanes = np.array([SPECS[kind].lane for kind in Kind])
    compute = lanes[program.kind] == 0
    spent = (played.end - played.start)[compute]
    return np.asarray(np.bincount(program.rank[compute], weights=spent, minlength=program.world), dtype=np.float64)


def bubble(played: Played) -> float:
    """Share of rank-seconds without compute: 1 − Σ busy / (ranks · makespan)."""
    return 1.0 - float(compute_seconds(played).sum()) / (played.program.world * played.makespan)
