"""Playing a program in the order of time, for what the lists alone do not decide.

Two things need it. A rank with a **policy** takes the best of what is ready whenever it is free. And **slow-downs**:
while a rank sends, receives, copies or takes part in a collective, its compute goes on at 1/slowdown of its speed, so
the end of a compute operation moves whenever communication on its rank starts or stops. An event that has been
overtaken is recognised by its version number and dropped.
"""

# Compiled code: to numba a numpy integer and a Python one are the same.
# mypy: disable-error-code="assignment, arg-type, misc"

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Slowdown
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.policies import goes_before
from trainplan.program.program import Program
from trainplan.program.wiring import Wiring

Floats = NDArray[np.float64]
_START, _END = 0, 1
# What an operation does to compute beside it.
_QUIET, _MESSAGE, _COLLECTIVE, _COPY, _COMPUTE = 0, 1, 2, 3, 4


def play(
    program: Program, wiring: Wiring, run: Floats, issue: Floats, slowdown: Slowdown
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Start, end and order of completion; the order is short where the program deadlocks."""
    noise = np.zeros(len(Kind), dtype=np.int64)
    for kind, spec in SPECS.items():
        if spec.lane is Lane.COMPUTE:
            noise[kind] = _COMPUTE
        elif spec.lane is Lane.LINK:
            noise[kind] = _MESSAGE if kind.name.startswith("SEND") else _QUIET
        elif spec.lane is Lane.GROUP:
            noise[kind] = _COLLECTIVE
        elif spec.lane in (Lane.COPY_IN, Lane.COPY_OUT):
            noise[kind] = _COPY
    priority = program.priority if program.priority is not None else np.zeros(len(program), dtype=np.int64)
    policy = np.array(program.policy or (0,) * program.world, dtype=np.int64)
    factors = np.array([slowdown.send, slowdown.receive, slowdown.collective, slowdown.copy])
    return _play(
        program.lists.start, program.lists.items, program.waits, wiring.successor_start, wiring.successor_items,
        wiring.unmet, wiring.member_start, wiring.member_items, wiring.free, policy, priority, program.rank,
        program.peer,
        noise[program.kind], factors, run, issue,
    )  # fmt: skip


@njit(cache=True)
def _play(
    list_start: NDArray, list_items: NDArray, waits: NDArray, succ_start: NDArray, succ_items: NDArray,
    unmet0: NDArray, member_start: NDArray, member_items: NDArray, free: NDArray, policy: NDArray, priority: NDArray,
    rank_of: NDArray, peer_of: NDArray, noise: NDArray, factors: Floats, run: Floats, issue: Floats,
) -> tuple[Floats, Floats, NDArray]:  # fmt: skip
    n, world = len(run), len(list_start) - 1
    unmet = unmet0.copy()
    start, end = np.zeros(n), np.zeros(n)
    ready = np.zeros(n)  # when everything that an operation waits for is there
    issued = np.zeros(n)  # when its host has finished issuing it
    order = np.empty(n, np.int64)
    done = 0
    host = np.zeros(world)
    cursor = list_start[:-1].copy()
    # Compute on each rank: the operation that runs, what is left of it, since when at what speed.
    running = np.full(world, -1, np.int64)
    left, since, factor = np.zeros(world), np.zeros(world), np.ones(world)
    version = np.zeros(n, np.int64)
    active = np.zeros((world, 4), np.int64)  # sends, receives, collectives, copies that go on
    busy = np.zeros(world, np.bool_)  # of ranks with a policy
    waiting = [np.int64(0) for _ in range(0)]  # operations that are ready on ranks with a policy
    serial = 0
    queue = [(0.0, 0, np.int64(0), 0, np.int64(0)) for _ in range(0)]

    todo = np.empty(n, np.int64)
    top = 0
    for op in range(n):
        if unmet[op] == 0:
            todo[top] = op
            top += 1
    for rank in range(world):
        top = _issue(rank, cursor, list_start, list_items, waits, unmet, host, ready, issued, issue, todo, top, free)
    now = 0.0
    while True:
        # What has become ready: on a rank with a policy it queues up, elsewhere it starts when its host issued it.
        while top > 0:
            top -= 1
            op = todo[top]
            if free[rank_of[op]] and noise[op] == 4:
                waiting.append(op)
            else:
                heapq.heappush(queue, (max(ready[op], now), serial, op, 0, np.int64(0)))
                serial += 1
        # It decides when all that happens at this moment has happened, so that simultaneous arrivals are seen together.
        settled = len(queue) == 0 or queue[0][0] > now
        for rank in range(world):
            if settled and free[rank] and not busy[rank]:
                best = -1
                for k in range(len(waiting)):
                    op = waiting[k]
                    if rank_of[op] == rank and (
                        best < 0
                        or goes_before(
                            policy[rank], ready[op], priority[op], op,
                            ready[waiting[best]], priority[waiting[best]], waiting[best],
                        )
                    ):  # fmt: skip
                        best = k
                if best >= 0:
                    busy[rank] = True
                    heapq.heappush(queue, (max(ready[waiting[best]], now), serial, waiting[best], 0, np.int64(0)))
                    serial += 1
                    waiting.pop(best)
        if len(queue) == 0:
            break
        now, _, op, what, stamp = heapq.heappop(queue)
        if what == 1 and stamp != version[op]:
            continue
        rank = rank_of[op]
        if what == 0:
            start[op] = now
            if noise[op] == 4:
                running[rank], left[rank], since[rank] = op, run[op], now
                factor[rank] = _factor(active, rank, factors)
                heapq.heappush(queue, (max(now + left[rank] * factor[rank], issued[op]), serial, op, 1, version[op]))
            else:
                heapq.heappush(queue, (max(now + run[op], issued[op]), serial, op, 1, version[op]))
            serial += 1
        else:
            end[op] = now
            order[done] = op
            done += 1
            for k in range(succ_start[op], succ_start[op + 1]):
                after = succ_items[k]
                ready[after] = max(ready[after], now)
                unmet[after] -= 1
                if unmet[after] == 0:
                    todo[top] = after
                    top += 1
            if noise[op] == 4:
                running[rank] = -1
                if free[rank]:
                    busy[rank] = False
            if waits[op]:
                for k in range(member_start[op], member_start[op + 1]):
                    member = member_items[k]
                    host[member] = max(host[member], now)
                    top = _issue(
                        member,
                        cursor,
                        list_start,
                        list_items,
                        waits,
                        unmet,
                        host,
                        ready,
                        issued,
                        issue,
                        todo,
                        top,
                        free,
                    )
        # Communication that starts or stops changes the speed of compute on the ranks that it touches.
        if noise[op] == 4 or noise[op] == 0:
            continue
        change = 1 if what == 0 else -1
        if noise[op] == 1:
            active[rank, 0] += change
            if peer_of[op] >= 0:
                active[peer_of[op], 1] += change
        elif noise[op] == 3:
            active[rank, 3] += change
        else:
            for k in range(member_start[op], member_start[op + 1]):
                active[member_items[k], 2] += change
        for k in range(member_start[op], member_start[op + 1] + 1):
            touched = peer_of[op] if k == member_start[op + 1] else member_items[k]
            if touched < 0 or running[touched] < 0:
                continue
            current = running[touched]
            left[touched] -= (now - since[touched]) / factor[touched]
            since[touched] = now
            factor[touched] = _factor(active, touched, factors)
            version[current] += 1
            over = max(now + max(left[touched], 0.0) * factor[touched], issued[current])
            heapq.heappush(queue, (over, serial, current, 1, version[current]))
            serial += 1
    return start, end, order[:done]


@njit(cache=True)
def _factor(active: NDArray, rank: int, factors: Floats) -> float:
    slowest = 1.0
    for kind in range(4):
        if active[rank, kind] > 0 and factors[kind] > slowest:
            slowest = factors[kind]
    return slowest


@njit(cache=True)
def _issue(
    rank: int, cursor: NDArray, list_start: NDArray, list_items: NDArray, waits: NDArray, unmet: NDArray, host: Floats,
    ready: Floats, issued: Floats, issue: Floats, todo: NDArray, top: int, free: NDArray,
) -> int:  # fmt: skip
    """Let the host of a rank go on, up to and with the next operation that it waits for."""
    if free[rank]:
        return top
    while cursor[rank] < list_start[rank + 1]:
        op = list_items[cursor[rank]]
        cursor[rank] += 1
        ready[op] = max(ready[op], host[rank])
        host[rank] += issue[op]
        issued[op] = max(issued[op], host[rank])
        unmet[op] -= 1
        if unmet[op] == 0:
            todo[top] = op
            top += 1
        if waits[op]:
            break
    return top
