"""Playing a program in the order of time, for what the lists alone do not decide.

Two things need it. A rank with a **policy** takes the best of what is ready, whenever its device (or one of its links)
is free; and an asynchronous server gives a worker weights only when it may go on (`program/staleness.py`). And
**slow-downs**: while a rank sends, receives, copies or takes part in a collective, its compute goes on at 1/slowdown of
its speed, so the end of a compute operation moves whenever communication on its rank starts or stops. And while any of
its ranks computes, communication goes on at 1/slowed of its speed, so its end moves whenever one of them starts to do
so, or stops. An event that has been overtaken is recognised by its version number and dropped.
"""

# Compiled code: to numba a numpy integer and a Python one are the same.
# mypy: disable-error-code="assignment, arg-type, misc"

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Slowdown
from trainplan.predict.flows import END, JOIN, START, Flows, balance, leave
from trainplan.predict.hosts import go_on, hear
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.ops import SHARED_OUT, SPECS, Kind, Lane
from trainplan.program.policies import goes_before
from trainplan.program.program import CostClass, Program
from trainplan.program.staleness import UNKNOWN, pushed
from trainplan.program.wiring import Wiring

Floats = NDArray[np.float64]
# What an operation does to compute beside it.
_QUIET, _MESSAGE, _COLLECTIVE, _COPY, _COMPUTE = 0, 1, 2, 3, 4


def play(
    program: Program, wiring: Wiring, run: Floats, issue: Floats, slowdown: Slowdown, flows: Flows
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
    slowed = np.array([1.0, slowdown.slowed_message, slowdown.slowed_collective, slowdown.slowed_copy, 1.0])
    ours = np.array([_by_messages(c) for c in program.classes], dtype=bool)[program.cost]
    slower = slowed[np.where(ours, _MESSAGE, noise[program.kind])]
    claim_start, claim_items = _claims(program, wiring)
    return _play(
        program.lists.start, program.lists.items, program.waits, wiring.free, wiring.unmet,
        wiring.successor_start, wiring.successor_items, wiring.member_start, wiring.member_items, policy, priority,
        program.rank, program.peer, noise[program.kind], factors, slower, claim_start, claim_items,
        len(program.resource_rank), run, issue, flows.card_start, flows.card_items, flows.share,
        np.minimum(flows.lead, run), flows.cards, *_pushes(program), *(program.bound or (0, 0)), wiring.attended,
    )  # fmt: skip


def _by_messages(c: CostClass) -> bool:
    """Whether a collective consists of messages of ours: sums in rounds, and shares where they are not NCCL's."""
    return c.by in BY_ROUNDS or (c.kind in SHARED_OUT and c.by != "nccl")


def _pushes(program: Program) -> tuple[NDArray[np.int64], NDArray[np.bool_], int]:
    """Of asynchronous servers: operation → the worker whose push it applies, -1; operation → whether it gives a worker
    weights, and so waits until that may go on; and how many workers there are."""
    if program.bound is None:
        return np.full(len(program), -1, np.int64), np.zeros(len(program), np.bool_), 0
    serves = np.array(program.policy)[program.rank] != 0
    pushes = np.where(serves & (program.kind == Kind.STEP), program.pipeline, -1)
    return pushes, serves & (program.kind == Kind.SEND_W), int(program.pipeline.max()) + 1


def _claims(program: Program, wiring: Wiring) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Operation → what it holds of ranks with a policy, as a ragged array: no list says who has it when."""
    holds = program.holds
    claimed = wiring.free[program.resource_rank[holds.items]]
    start = np.zeros(len(program) + 1, dtype=np.int64)
    np.cumsum(np.bincount(holds.owner[claimed], minlength=len(program)), out=start[1:])
    return start, holds.items[claimed]


@njit(cache=True)
def _play(
    list_start: NDArray, list_items: NDArray, waits: NDArray, free: NDArray, unmet0: NDArray, succ_start: NDArray,
    succ_items: NDArray, member_start: NDArray, member_items: NDArray, policy: NDArray, priority: NDArray,
    rank_of: NDArray, peer_of: NDArray, noise: NDArray, factors: Floats, slowed: Floats, claim_start: NDArray,
    claim_items: NDArray, resources: int, run: Floats, issue: Floats, card_start: NDArray, card_items: NDArray,
    share: Floats, lead: Floats, cards: int, pushes: NDArray, gated: NDArray, workers: int, lower: int, upper: int,
    attended0: NDArray,
) -> tuple[Floats, Floats, NDArray]:  # fmt: skip
    n, world = len(run), len(list_start) - 1
    unmet = unmet0 + gated
    # What every server knows of its workers (`program.staleness`), and the push of each that was applied last.
    clocks, credits = np.zeros((world, workers), np.int64), np.zeros((world, workers), np.int64)
    newest, older = np.full((world, workers), UNKNOWN), np.full((world, workers), UNKNOWN)
    held, alive = np.zeros((world, workers), np.bool_), np.ones(workers, np.bool_)
    applied = np.full((world, workers), -1, np.int64)
    start, end = np.zeros(n), np.zeros(n)
    ready = np.zeros(n)  # when everything that an operation waits for is there
    issued = np.zeros(n)  # when its host has finished issuing it
    order = np.empty(n, np.int64)
    done = 0
    host = np.zeros(world)
    attends = len(attended0) > 0
    attended, heard, kept = attended0.copy(), np.zeros(len(attended0)), np.zeros(world, np.bool_)
    cursor = list_start[:-1].copy()
    # Compute on each rank: the operation that runs, what is left of it, since when at what speed.
    running = np.full(world, -1, np.int64)
    left, since, factor = np.zeros(world), np.zeros(world), np.ones(world)
    version = np.zeros(n, np.int64)
    active = np.zeros((world, 4), np.int64)  # sends, receives, collectives, copies that go on
    # Communication that goes on and that compute slows down: how many of its ranks compute, how many times as long it
    # takes meanwhile, and (of what passes no card) what was left of it when.
    talks, talking, hindered = np.empty(n, np.int64), 0, slowed.max() > 1.0
    beside, pace, rest, seen = np.zeros(n, np.int64), np.ones(n), np.zeros(n), np.zeros(n)
    busy = np.zeros(resources, np.bool_)  # of ranks with a policy
    waiting = [np.int64(0) for _ in range(0)]  # operations that are ready and want such a resource
    # The same of flows at their cards, and what is asked of each card.
    flows, count, load = np.empty(n if cards else 0, np.int64), 0, np.zeros(cards)
    work, met, slower = np.zeros(n if cards else 0), np.zeros(n if cards else 0), np.zeros(n if cards else 0)
    serial = 0
    queue = [(0.0, 0, np.int64(0), 0, np.int64(0)) for _ in range(0)]

    todo = np.empty(n, np.int32)
    top = 0
    for op in range(n):
        if unmet[op] == 0:
            todo[top] = op
            top += 1
    for rank in range(world):
        top = go_on(
            rank, cursor, list_start, list_items, waits, free, unmet, host, ready, issued, issue, todo, top, attends,
            attended, heard, kept,
        )  # fmt: skip
    now = 0.0
    while True:
        # What has become ready: on a rank with a policy it queues up, elsewhere it starts when its host issued it.
        while top > 0:
            top -= 1
            op = np.int64(todo[top])
            if claim_start[op] < claim_start[op + 1]:
                waiting.append(op)
            else:
                heapq.heappush(queue, (max(ready[op], now), serial, op, START, np.int64(0)))
                serial += 1
        # It decides when all that happens at this moment has happened, so that simultaneous arrivals are seen together.
        deciding = len(waiting) > 0 and (len(queue) == 0 or queue[0][0] > now)
        while deciding:
            best = _choose(waiting, claim_start, claim_items, busy, policy, rank_of, ready, priority)
            deciding = best >= 0
            if deciding:
                op = waiting.pop(best)
                for k in range(claim_start[op], claim_start[op + 1]):
                    busy[claim_items[k]] = True
                heapq.heappush(queue, (max(ready[op], now), serial, op, START, np.int64(0)))
                serial += 1
        if len(queue) == 0:
            break
        now, _, op, what, stamp = heapq.heappop(queue)
        if what == END and stamp != version[op]:
            continue
        rank = rank_of[op]
        flowing = card_start[op] < card_start[op + 1] and slower[op] >= 0
        if what == JOIN:
            work[op], slower[op] = run[op] - lead[op], 0.0
            flows[count] = op
            count += 1
            serial = balance(
                queue, serial, now, flows, count, card_start, card_items, share, load, work, met, slower, version, pace
            )  # fmt: skip
            continue
        if what == END and flowing and now < issued[op]:  # its bytes are through, and its host is still at it
            slower[op] = -1.0
            count = leave(flows, count, op)
            version[op] += 1
            heapq.heappush(queue, (issued[op], serial, op, END, version[op]))
            serial = balance(
                queue, serial + 1, now, flows, count, card_start, card_items, share, load, work, met, slower, version,
                pace,
            )  # fmt: skip
            continue
        if what == START:
            start[op] = now
            if noise[op] == _COMPUTE:
                running[rank], left[rank], since[rank] = op, run[op], now
                factor[rank] = _factor(active, rank, factors)
                over = max(now + left[rank] * factor[rank], issued[op])
                heapq.heappush(queue, (over, serial, op, END, version[op]))
            else:
                if slowed[op] > 1.0:
                    talks[talking] = op
                    talking += 1
                    beside[op] = _computing(op, running, member_start, member_items, peer_of)
                    rest[op], seen[op] = run[op], now
                    pace[op] = slowed[op] if beside[op] > 0 else 1.0
                if flowing:
                    heapq.heappush(queue, (now + lead[op], serial, op, JOIN, np.int64(0)))
                else:
                    heapq.heappush(queue, (max(now + run[op] * pace[op], issued[op]), serial, op, END, version[op]))
            serial += 1
        else:
            end[op] = now
            order[done] = op
            done += 1
            if flowing:
                count = leave(flows, count, op)
                serial = balance(
                    queue, serial, now, flows, count, card_start, card_items, share, load, work, met, slower, version,
                    pace,
                )  # fmt: skip
            for k in range(succ_start[op], succ_start[op + 1]):
                after = succ_items[k]
                if now > ready[after]:
                    ready[after] = now
                unmet[after] -= 1
                if unmet[after] == 0:
                    todo[top] = after
                    top += 1
                told = attends and noise[op] == _COLLECTIVE and hear(after, now, attended, heard)
                if told and not kept[rank_of[after]]:
                    top = go_on(
                        rank_of[after], cursor, list_start, list_items, waits, free, unmet, host, ready, issued, issue,
                        todo, top, attends, attended, heard, kept,
                    )  # fmt: skip
            if pushes[op] >= 0:
                applied[rank, pushes[op]] = op
                released = pushed(
                    lower, upper, pushes[op], now, clocks[rank], newest[rank], older[rank], credits[rank], held[rank],
                    alive,
                )  # fmt: skip
                for worker in np.flatnonzero(released):
                    last = applied[rank, worker]
                    for k in range(succ_start[last], succ_start[last + 1]):
                        after = succ_items[k]
                        if gated[after]:
                            ready[after] = max(ready[after], now)
                            unmet[after] -= 1
                            if unmet[after] == 0:
                                todo[top] = after
                                top += 1
            if noise[op] == _COMPUTE:
                running[rank] = -1
            elif slowed[op] > 1.0:
                talking = leave(talks, talking, op)
            for k in range(claim_start[op], claim_start[op + 1]):
                busy[claim_items[k]] = False
            if waits[op]:
                for k in range(member_start[op], member_start[op + 1]):
                    member = member_items[k]
                    kept[member] = False
                    if now > host[member]:
                        host[member] = now
                    top = go_on(
                        member, cursor, list_start, list_items, waits, free, unmet, host, ready, issued, issue, todo,
                        top, attends, attended, heard, kept,
                    )  # fmt: skip
        # Compute that starts or stops changes the speed of communication that its rank takes part in.
        if hindered and noise[op] == _COMPUTE:
            for k in range(talking):
                talk = talks[k]
                if not _takes_part(rank, talk, member_start, member_items, peer_of):
                    continue
                beside[talk] += 1 if what == START else -1
                new = slowed[talk] if beside[talk] > 0 else 1.0
                if new == pace[talk]:
                    continue
                rest[talk] = max(rest[talk] - (now - seen[talk]) / pace[talk], 0.0)
                seen[talk], pace[talk] = now, new
                if card_start[talk] < card_start[talk + 1]:
                    serial = balance(
                        queue, serial, now, flows, count, card_start, card_items, share, load, work, met, slower,
                        version, pace,
                    )  # fmt: skip
                else:
                    version[talk] += 1
                    over = max(now + rest[talk] * new, issued[talk])
                    heapq.heappush(queue, (over, serial, talk, END, version[talk]))
                    serial += 1
        # Communication that starts or stops changes the speed of compute on the ranks that it touches.
        if noise[op] == _COMPUTE or noise[op] == _QUIET:
            continue
        change = 1 if what == START else -1
        if noise[op] == _MESSAGE:
            active[rank, 0] += change
            if peer_of[op] >= 0:
                active[peer_of[op], 1] += change
        elif noise[op] == _COPY:
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
            heapq.heappush(queue, (over, serial, current, END, version[current]))
            serial += 1
    return start, end, order[:done]


@njit(cache=True)
def _choose(
    waiting: list[int], claim_start: NDArray, claim_items: NDArray, busy: NDArray, policy: NDArray, rank_of: NDArray,
    ready: Floats, priority: NDArray,
) -> int:  # fmt: skip
    """The place among those who wait of one that can have what it claims and is not outdone by another; -1: none."""
    best = -1
    for k in range(len(waiting)):
        op = waiting[k]
        idle = True
        for c in range(claim_start[op], claim_start[op + 1]):
            idle = idle and not busy[claim_items[c]]
        if not idle:
            continue
        if best < 0:
            best = k
            continue
        other = waiting[best]
        if claim_items[claim_start[op]] == claim_items[claim_start[other]] and goes_before(
            policy[rank_of[op]], ready[op], priority[op], op, ready[other], priority[other], other
        ):
            best = k
    return best


@njit(cache=True)
def _factor(active: NDArray, rank: int, factors: Floats) -> float:
    slowest = 1.0
    for kind in range(4):
        if active[rank, kind] > 0 and factors[kind] > slowest:
            slowest = factors[kind]
    return slowest


@njit(cache=True)
def _takes_part(rank: int, op: int, member_start: NDArray, member_items: NDArray, peer_of: NDArray) -> bool:
    """Whether a rank is one of those that communicate here."""
    found = peer_of[op] == rank
    for k in range(member_start[op], member_start[op + 1]):
        found = found or member_items[k] == rank
    return found


@njit(cache=True)
def _computing(op: int, running: NDArray, member_start: NDArray, member_items: NDArray, peer_of: NDArray) -> int:
    """How many of the ranks that communicate here compute now."""
    count = 0
    if peer_of[op] >= 0 and running[peer_of[op]] >= 0:
        count += 1
    for k in range(member_start[op], member_start[op + 1]):
        if running[member_items[k]] >= 0 and member_items[k] != peer_of[op]:
            count += 1
    return count
