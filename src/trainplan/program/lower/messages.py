"""Memory of messages: what crosses stages, from the stage that makes it to the last that reads it.

What is sent must stay until it has been taken, and the engine learns that only from what comes back: an activation was
taken if its gradient has arrived, and a gradient if something arrives that was sent after it. Until then (at the latest
until the STEP) it counts. Receives are posted ahead, and their buffers count from then on.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.lower.backend import RECEIVES_AHEAD
from trainplan.program.lower.edges import Edge, message_bytes
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import COLLECTIVES, RECEIVES, Kind, Value
from trainplan.program.program import Bools, Ints


def messages(ledger: Ledger, found: Found, homes: Ints, payload: Ints) -> None:
    """A message there on every edge, and where gradients flow one back."""
    profile, layout = found.layout.profile, found.layout
    edges = layout.edges
    if not edges:
        return
    source, target = [e.source for e in edges], [e.target for e in edges]
    send, take = found.ops(Kind.SEND_F, source, target), found.ops(Kind.RECV_F, target, source)
    give, get = found.ops(Kind.SEND_B, target, source), found.ops(Kind.RECV_B, source, target)
    step = np.repeat(found.once(Kind.STEP, range(layout.plan.pp)), layout.plan.micro, axis=1)
    begin, over = found.backward(source, final=False), found.backward(source, final=True)
    # There. Without recomputation the graph holds on to what was made until it has gone back.
    own = _own(layout)
    out = found.by_size(lambda e, n: message_bytes(profile, own[e], n), len(edges))
    until = np.where(get >= 0, get if layout.recomputes else over, step[source])
    ledger.add(Value.BOUNDARY, out, homes[source], found.ops(Kind.F, source), until, (send,))
    ledger.add(Value.MESSAGE, payload[send], -1, send, take, (take,))
    final = found.backward(target, final=True)
    arrived = ledger.add(
        Value.BOUNDARY, payload[take], homes[target], take, final, (found.ops(Kind.F, target), final)
    )  # fmt: skip
    if layout.recomputes:
        again = [(number, block) for number, e in enumerate(edges) for block in range(*layout.plan.bounds[e.target])]
        stages = [target[number] for number, _ in again]
        ledger.reads(found.ops(Kind.R, stages, units=[b for _, b in again]), arrived[[number for number, _ in again]])
    # And back.
    taken = np.where(give >= 0, _taken(found, send, take, get), -1)
    taken = np.where(taken >= 0, taken, step[target])
    back = [number for number, e in enumerate(edges) if e.gradients]
    give, get, begin, over = give[back], get[back], begin[back], over[back]
    ledger.add(
        Value.BOUNDARY, payload[give], homes[target][back], final[back], taken[back], (give,), late=True
    )  # fmt: skip
    ledger.add(Value.MESSAGE, payload[give], -1, give, get, (get,))
    readers = (begin, np.where(over != begin, over, -1))
    ledger.add(Value.BOUNDARY, payload[get], homes[source][back], get, over, readers)
    if layout.backend.receives_on_device:
        _posted(ledger, found, payload)


def _own(layout: Layout) -> list[tuple[int, ...]]:
    """The crossings that each edge is charged with on the side of the sender: each once, however many stages it goes
    to; with recomputation not those that are kept for a block of the sender's anyway."""
    crossings = layout.profile.crossings
    last: dict[int, Edge] = {}
    for edge in layout.edges:
        for number in edge.crossings:
            stage_of = layout.stage_of
            if not (layout.recomputes and edge.source in {stage_of[block] for block in crossings[number].consumers}):
                last[number] = edge
    return [tuple(n for n in edge.crossings if last.get(n) is edge) for edge in layout.edges]


def _taken(found: Found, send: Ints, take: Ints, get: Ints) -> Ints:
    """For every gradient that is sent back, the first receive of the same step that says that it has been taken: of an
    activation that was sent after taking it. -1: there is none. (Later operations of a rank have higher numbers.)"""
    micro = found.layout.plan.micro
    count = send.size
    row = np.arange(count) // micro  # edge, replica and step
    ops = max(int(send.max()), int(get.max())) + 1
    order = np.argsort(row * ops + send.ravel(), kind="stable")
    key = (row * ops + send.ravel())[order]
    place = np.searchsorted(key, row * ops + get.ravel())
    following = order[np.minimum(place, count - 1)]
    same = (place < count) & (row[following] == row) & (get.ravel() >= 0)
    return np.where(same, take.ravel()[following], -1).reshape(send.shape)


def _posted(ledger: Ledger, found: Found, payload: Ints) -> None:
    """Buffers of receives from when they are posted until they are taken.

    As many as are posted ahead are posted when a step begins; each of the others when the one so many before it has
    been taken.
    """
    alone = np.flatnonzero(~np.isin(found.kind, COLLECTIVES))  # in the order of the lists
    starts = alone[_changes(found.rank[alone], found.step[alone])]
    ops = np.flatnonzero(np.isin(found.kind, RECEIVES))
    first = starts[np.searchsorted(starts, ops, side="right") - 1]  # operation of its step
    begins = np.flatnonzero(_changes(first))
    number = np.arange(len(ops)) - np.repeat(begins, np.diff([*begins, len(ops)]))
    at_once = (number < RECEIVES_AHEAD) & (first != ops)
    now, rank = ops[at_once], found.rank
    ledger.add(Value.COMMUNICATION, payload[now], rank[now], first[at_once], now, early=True)
    later = np.flatnonzero(number >= RECEIVES_AHEAD)
    then, before = ops[later], ops[later - RECEIVES_AHEAD]
    ledger.add(Value.COMMUNICATION, payload[then], rank[then], before, then, late=True, early=True)


def _changes(*columns: Ints) -> Bools:
    """Where any of these is not what it was in the row before."""
    changed = np.ones(len(columns[0]), dtype=bool)
    changed[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changed
