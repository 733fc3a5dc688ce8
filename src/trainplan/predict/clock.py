"""The clock plays a program: given seconds for every operation, when does each start and end?

An operation starts when (1) what it reads has been made, (2) its resources are free, (3) the host of its rank has
issued it: hosts go through their lists in order, spend `issue` seconds on an operation, and stop at one that they
wait for until it ends; where they attend to collectives, also before one that computes with what these make. It ends
`run` seconds later, but never before the host has finished issuing it; and later where it shares a network card with
others (`flows.py`).

Two ways of playing, with the same answer where both apply:

* `_play_lists`: every order is fixed by the lists, so each operation's times follow from those before it: one pass
  over the graph, in any order that respects it. Only flows are taken in the order of time. This is what a search uses.
* `events.play`: in the order of time, with an event queue. It is needed where a rank decides by a policy, where hosts
  attend to collectives, and where communication and compute on the same rank slow each other down, since then a
  duration depends on what goes on meanwhile.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Slowdown
from trainplan.errors import ProgramError
from trainplan.predict import events
from trainplan.predict.flows import JOIN, Flows, balance, leave, no_flows
from trainplan.program.ops import COMPUTES, RECEIVES, Kind
from trainplan.program.program import Program, are
from trainplan.program.timeline import Event, Timeline
from trainplan.program.wiring import Wiring, wire

Floats = NDArray[np.float64]
_COMPUTE = are(COMPUTES)
# What playing knows of an operation lies side by side: it jumps from rank to rank, and each jump is then one line of
# the cache instead of eight.
_OP = np.dtype([
    ("start", np.float64),  # until it runs: the latest end among those that it waits for
    ("end", np.float64),  # until it runs: when its host has finished issuing it
    ("run", np.float64),
    ("issue", np.float64),
    ("unmet", np.int32),  # how many it still waits for, and lists that must come to it
    ("successors", np.int32),  # where those that wait for it stand, from here …
    ("successors_end", np.int32),  # … to here
    ("waiting", np.int32),  # the rank whose host waits for it to end, if there is exactly one
])  # fmt: skip
_NOBODY, _SEVERAL = -1, -2


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
    flows: Flows | None = None,
) -> Played:
    """Play a program whose operations take `run` seconds each (and their hosts `issue` seconds to issue); those that
    are `flows` longer where they share network cards."""
    wiring, flows = wiring or wire(program), flows or no_flows(len(program))
    run = np.ascontiguousarray(run, dtype=np.float64)
    issue = np.zeros(len(program)) if issue is None else np.ascontiguousarray(issue, dtype=np.float64)
    slows = slowdown is not None and slowdown != Slowdown()
    if slows or program.hosts_attend or wiring.free.any():
        start, end, order = events.play(program, wiring, run, issue, slowdown or Slowdown(), flows)
    else:
        ops = np.empty(len(program), _OP)
        order = _play_lists(
            program.lists.start, program.lists.items, program.waits, wiring.unmet, wiring.successor_start,
            wiring.successor_items, wiring.member_start, wiring.member_items, run, issue, flows.card_start,
            flows.card_items, flows.share, np.minimum(flows.lead, run), flows.cards, ops,
        )  # fmt: skip
        start, end = ops["start"].copy(), ops["end"].copy()
    if len(order) < len(program):
        raise ProgramError(
            f"program {program.title or 'without a title'}",
            f"{len(program) - len(order)} of {len(program)} operations never run: it deadlocks",
            "program.check.check, which shows where",
        )
    return Played(program, start, end, order)


@njit(cache=True)
def _play_lists(
    list_start: NDArray, list_items: NDArray, waits: NDArray, unmet: NDArray, succ_start: NDArray, succ_items: NDArray,
    member_start: NDArray, member_items: NDArray, run: Floats, issue: Floats, card_start: NDArray, card_items: NDArray,
    share: Floats, lead: Floats, cards: int, ops: NDArray,
) -> NDArray:  # fmt: skip
    """Fill `ops` with what is given and play it; the operations in the order in which they were found to end."""
    n, world = len(run), len(list_start) - 1
    for op in range(n):
        at = ops[op]
        at.start, at.end, at.run, at.issue = 0.0, 0.0, run[op], issue[op]
        at.unmet, at.successors, at.successors_end = unmet[op], succ_start[op], succ_start[op + 1]
        members = member_start[op + 1] - member_start[op]
        at.waiting = _NOBODY if not waits[op] else member_items[member_start[op]] if members == 1 else _SEVERAL
    order = np.empty(n, np.int64)
    done = 0
    host = np.zeros(world)  # when the host of a rank is free to issue
    cursor = list_start[:-1].copy()
    stack = np.empty(n, np.int32)
    top = 0
    # Flows: those at their cards, what is left of each, since when at what speed, and when it was through.
    flows, count, load = np.empty(n if cards else 0, np.int64), 0, np.zeros(cards)
    left, since, factor = np.zeros(n if cards else 0), np.zeros(n if cards else 0), np.zeros(n if cards else 0)
    through, version = np.full(n if cards else 0, -1.0), np.zeros(n if cards else 0, np.int64)
    alone = np.ones(n if cards else 0)
    boarding, boarded = np.empty(n if cards else 0, np.int64), 0
    queue = [(0.0, 0, np.int64(0), 0, np.int64(0)) for _ in range(0)]
    serial = 0
    for rank in range(world):
        top = _go_on(rank, cursor, list_start, list_items, host, ops, stack, top)
    while True:
        while top > 0:
            top -= 1
            op = stack[top]
            at = ops[op]
            over = at.start + at.run
            if cards and card_start[op] < card_start[op + 1]:
                if through[op] < 0:
                    boarding[boarded] = op
                    boarded += 1
                    continue
                over = through[op]
            over = max(over, at.end)
            at.end = over
            order[done] = op
            done += 1
            for k in range(at.successors, at.successors_end):
                after = ops[succ_items[k]]
                if over > after.start:
                    after.start = over
                after.unmet -= 1
                if after.unmet == 0:
                    stack[top] = succ_items[k]
                    top += 1
            if at.waiting >= 0:
                if over > host[at.waiting]:
                    host[at.waiting] = over
                top = _go_on(at.waiting, cursor, list_start, list_items, host, ops, stack, top)
            elif at.waiting == _SEVERAL:
                for k in range(member_start[op], member_start[op + 1]):
                    rank = member_items[k]
                    if over > host[rank]:
                        host[rank] = over
                    top = _go_on(rank, cursor, list_start, list_items, host, ops, stack, top)
        # All that is known by now has been played; what is left waits for a flow. The next thing to happen to the
        # flows is therefore the next in the queue: whatever comes later is a consequence of it.
        while boarded > 0:
            boarded -= 1
            flow = boarding[boarded]
            heapq.heappush(queue, (ops[flow].start + lead[flow], serial, flow, JOIN, np.int64(0)))
            serial += 1
        if len(queue) == 0:
            break
        now, _, flow, what, stamp = heapq.heappop(queue)
        if what == JOIN:
            left[flow], factor[flow] = run[flow] - lead[flow], 0.0
            flows[count] = flow
            count += 1
        elif stamp == version[flow]:
            through[flow] = now
            count = leave(flows, count, flow)  # type: ignore[arg-type]
            stack[top] = flow
            top += 1
        else:
            continue  # overtaken
        serial = balance(
            queue, serial, now, flows, count, card_start, card_items, share, load, left, since, factor, version, alone
        )  # fmt: skip
    return order[:done]


@njit(cache=True, inline="always")
def _go_on(
    rank: int, cursor: NDArray, list_start: NDArray, list_items: NDArray, host: Floats, ops: NDArray, stack: NDArray,
    top: int,
) -> int:  # fmt: skip
    """Let the host of a rank go on, up to and with the next operation that it waits for.

    What can run now is put on the stack, whose new height is returned.
    """
    while cursor[rank] < list_start[rank + 1]:
        op = list_items[cursor[rank]]
        at = ops[op]
        cursor[rank] += 1
        if host[rank] > at.start:
            at.start = host[rank]
        host[rank] += at.issue
        if host[rank] > at.end:
            at.end = host[rank]
        at.unmet -= 1
        if at.unmet == 0:
            stack[top] = op
            top += 1
        if at.waiting != _NOBODY:
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
    compute = _COMPUTE[program.kind]
    spent = (played.end - played.start)[compute]
    return np.asarray(np.bincount(program.rank[compute], weights=spent, minlength=program.world), dtype=np.float64)


def bubble(played: Played) -> float:
    """Share of rank-seconds without compute: 1 − Σ busy / (ranks · makespan)."""
    return 1.0 - float(compute_seconds(played).sum()) / (played.program.world * played.makespan)
