"""Memory of receives: their buffers, from when they are posted until they are taken (`program.posting`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numba import njit

from trainplan.program.lower.found import Found
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import COLLECTIVES, RECEIVES, Kind, Value
from trainplan.program.posting import RECEIVES_AHEAD, due, in_order_of_sending
from trainplan.program.program import Bools, Ints, are

_RECEIVE = are(RECEIVES)
_RECEIVE_BUT_PUSHES = are([kind for kind in RECEIVES if kind is not Kind.RECV_G])
_ALONE = ~are(COLLECTIVES)
_ALONE_BUT_LOADS = ~are((*COLLECTIVES, Kind.LOAD))


def posted(ledger: Ledger, found: Found, pairs: Sequence[tuple[Ints, Ints]], payload: Ints) -> None:
    """Some receives are posted when a step begins, each of the others when the one so many before it has been taken.
    `pairs`: of receives and what they receive. Servers that take whole pushes take one at a time from each worker, and
    post it when it comes."""
    layout, rank = found.layout, found.rank
    # What may be the first of its step on its rank: alone, and no load that went ahead.
    opens = _ALONE_BUT_LOADS if layout.plan.preload == "on" else _ALONE
    receives = _RECEIVE_BUT_PUSHES if layout.by_push else _RECEIVE
    ops, first, begin = _receives(found.kind, rank, found.step, opens, receives)
    after = np.arange(len(ops)) - RECEIVES_AHEAD  # the receive whose taking has this one posted
    if not layout.backend.tagged:
        sent = np.full(len(rank), -1, dtype=np.int64)
        for receive, send in pairs:
            sent[receive[receive >= 0]] = send[receive >= 0]
        if not _as_they_were_sent(ops, begin, sent, rank):
            after = _after_those_sent_before(begin, rank[sent[ops]], sent[ops])
    if layout.in_phases:  # whoever has nothing to compute in the first phase is at its barrier first
        waits = _RECEIVE[found.kind[first]] & (rank[ops] < layout.plan.workers)
        first = np.where(waits, found.barriers[found.replica_of[ops], found.step[ops], 0], first)
    now, opening, then, before = _when(ops, first, begin, after)
    ledger.add(Value.COMMUNICATION, payload[now], rank[now], opening, now, early=True)
    ledger.add(Value.COMMUNICATION, payload[then], rank[then], before, then, late=True, early=True)


@njit(cache=True)
def _receives(kind: Ints, rank: Ints, step: Ints, opens: Bools, receives: Bools) -> tuple[Ints, Ints, Ints]:
    """All receives in the order of the lists; the operation that the step of each begins with; and the place of the
    first receive after that."""
    count = 0
    for op in range(len(kind)):
        count += receives[kind[op]]
    ops, first, begin = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    opening = before = -1
    place = 0
    for op in range(len(kind)):
        if opens[kind[op]]:
            if before < 0 or rank[op] != rank[before] or step[op] != step[before]:
                opening = op
            before = op
        if receives[kind[op]]:
            ops[place], first[place] = op, opening
            begin[place] = begin[place - 1] if place and first[place - 1] == opening else place
            place += 1
    return ops, first, begin


@njit(cache=True)
def _as_they_were_sent(ops: Ints, begin: Ints, sent: Ints, rank: Ints) -> bool:
    """Whether in every step all ranks take what another has sent them in that order: nearly always."""
    last = np.full(rank.max() + 1, -1, np.int64)
    for place in range(len(ops)):
        if begin[place] == place:
            last[:] = -1
        send = sent[ops[place]]
        if send <= last[rank[send]]:
            return False
        last[rank[send]] = send
    return True


def _after_those_sent_before(begin: Ints, sender: Ints, sent: Ints) -> Ints:
    """For every receive the one (by its place) whose taking has it posted, where messages have no tags."""
    after = np.empty(len(sent), dtype=np.int64)
    for start, end in itertools.pairwise([*np.unique(begin).tolist(), len(sent)]):
        order = in_order_of_sending(sender[start:end].tolist(), sent[start:end].tolist())
        after[start:end] = start - 1 + np.searchsorted(due(order), np.argsort(order), side="right")
    return after


@njit(cache=True)
def _when(ops: Ints, first: Ints, begin: Ints, after: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Receives that are posted when their step begins, and the operations that it begins with; and those that are
    posted later, and the receives after which they are."""
    now, opening = np.empty(len(ops), np.int64), np.empty(len(ops), np.int64)
    then, before = np.empty(len(ops), np.int64), np.empty(len(ops), np.int64)
    at_once = later = 0
    for place in range(len(ops)):
        if after[place] >= begin[place]:
            then[later], before[later] = ops[place], ops[after[place]]
            later += 1
        elif first[place] != ops[place]:
            now[at_once], opening[at_once] = ops[place], first[place]
            at_once += 1
    return now[:at_once], opening[:at_once], then[:later], before[:later]
