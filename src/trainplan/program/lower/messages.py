"""Memory of messages: what crosses stages, from the stage that makes it to the last that reads it.

What is sent must stay until it has been taken, and the engine learns that only from what comes back: an activation was
taken if its gradient has arrived, and a gradient if something arrives that was sent after it. Until then (at the latest
until the STEP) it counts. Receives are posted ahead, and their buffers count from then on.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from trainplan.program.lower.buckets import kept
from trainplan.program.lower.edges import Edge, message_bytes
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.posted import posted
from trainplan.program.lower.served import served_pairs
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Bools, Ints


def messages(ledger: Ledger, found: Found, homes: Ints, payload: Ints) -> None:
    """A message there on every edge, and where gradients flow one back. Between two stages of one rank what crosses is
    handed over without a message."""
    layout, edges = found.layout, found.layout.edges
    if not edges and layout.service is None:
        return
    ends = Ends(found, homes)
    if edges:
        _there(ledger, found, ends, payload)
    if any(e.gradients for e in edges):
        _back(ledger, found, ends, payload)
    if layout.backend.receives_on_device:
        posted(ledger, found, [*ends.pairs, *served_pairs(found)], payload)


class Ends:
    """For every edge and place: the operations at either end, and the ranks that they run on."""

    def __init__(self, found: Found, homes: Ints) -> None:
        edges, layout = found.layout.edges, found.layout
        self.source, self.target = source, target = [e.source for e in edges], [e.target for e in edges]
        self.send, self.take = found.ops(Kind.SEND_F, source, target), found.ops(Kind.RECV_F, target, source)
        self.give, self.get = found.ops(Kind.SEND_B, target, source), found.ops(Kind.RECV_B, source, target)
        self.sender, self.receiver = homes[source], homes[target]
        # The STEP that follows, on the rank of every place, or what its step ends with.
        own = found.once(Kind.STEP, layout.holdings)
        number = np.full((layout.plan.depth, int(layout.local_ranks.max()) + 1), -1, dtype=np.int64)
        for place, holding in enumerate(layout.holdings):
            number[holding.stage, holding.rank] = place
            if layout.crosses or not layout.steps_at(holding.rank):
                own[place] = found.last(holding.rank)
        step = np.arange(found.places) // layout.plan.pieces % found.steps
        steps = own[number[np.arange(layout.plan.depth)[:, None], homes], step]
        self.source_step, self.target_step = steps[source], steps[target]
        self.pairs = [(self.take, self.send), (self.get, self.give)]  # of receives and sends


def _there(ledger: Ledger, found: Found, ends: Ends, payload: Ints) -> None:
    """Activations. Without recomputation the graph holds on to what was made until it has gone back."""
    layout, profile = found.layout, found.layout.profile
    source, target, send, take, get = ends.source, ends.target, ends.send, ends.take, ends.get
    made, over = found.forward(source), found.backward(source, final=True)
    reader, final = found.ops(Kind.F, target), found.backward(target, final=True)
    recomputed, count = found.recomputed, len(layout.edges)
    plain = _charged(layout, False)
    out = found.by_size(lambda e, n: message_bytes(profile, plain[e], n), count, "sent")
    if layout.recomputes:
        slim = _charged(layout, True)
        less = found.by_size(lambda e, n: message_bytes(profile, slim[e], n), count, "sent, recomputed")
        out = np.where(recomputed, less, out)
    until = np.where(get >= 0, np.where(recomputed, get, over), ends.source_step)
    sent = send >= 0
    _add(ledger, sent, Value.BOUNDARY, out, ends.sender, made, until, (send,))
    _add(ledger, sent, Value.MESSAGE, payload[send], -1, send, take, (take,))
    arrived = _add(ledger, sent, Value.BOUNDARY, payload[take], ends.receiver, take, final, (reader, final))
    # On one rank: the graph of the one stage and the leaf of the other are the same memory.
    later = np.maximum(over, final)
    handed = _add(ledger, ~sent, Value.BOUNDARY, out, ends.sender, made, later, (reader, final))
    if layout.recomputes:
        again = [(e, block) for e, edge in enumerate(layout.edges) for block in range(*layout.plan.bounds[edge.target])]
        edge = [e for e, _ in again]
        ops = found.ops(Kind.R, [target[e] for e in edge], units=[block for _, block in again])
        for numbers in (arrived, handed):
            ledger.reads(np.where(numbers[edge] >= 0, ops, -1), numbers[edge])


def _back(ledger: Ledger, found: Found, ends: Ends, payload: Ints) -> None:
    """Gradients of activations."""
    layout, profile = found.layout, found.layout.profile
    back = [number for number, e in enumerate(layout.edges) if e.gradients]
    source, target = [ends.source[n] for n in back], [ends.target[n] for n in back]
    give, get = ends.give[back], ends.get[back]
    taken = _taken(found, ends)[back]
    taken = np.where(taken >= 0, taken, ends.target_step[back])
    ready = found.giving(target)
    begin, over = found.backward(source, final=False), found.backward(source, final=True)
    readers = (begin, np.where(over != begin, over, -1))
    sent = give >= 0
    _add(ledger, sent, Value.BOUNDARY, payload[give], ends.receiver[back], ready, taken, (give,), late=True)
    _add(ledger, sent, Value.MESSAGE, payload[give], -1, give, get, (get,))
    _add(ledger, sent, Value.BOUNDARY, payload[get], ends.sender[back], get, over, readers)
    gradients = [layout.edges[number].gradients for number in back]
    size = found.by_size(lambda e, n: message_bytes(profile, gradients[e], n), len(back), "sent back")
    _add(ledger, ~sent, Value.BOUNDARY, size, ends.sender[back], ready, over, readers, late=True)


def _add(
    ledger: Ledger, chosen: Bools, kind: Value, size: Ints, rank: Ints | int, maker: Ints, end: Ints,
    readers: tuple[Ints, ...], late: bool = False,
) -> Ints:  # fmt: skip
    """Values at the chosen entries; their numbers there, and -1 elsewhere."""
    if chosen.all():  # nearly always, and copies of large arrays are slow
        return ledger.add(kind, size, rank, maker, end, readers, late=late)
    numbers = np.full(chosen.shape, -1, dtype=np.int64)
    if chosen.any():
        where = rank[chosen] if isinstance(rank, np.ndarray) else rank
        some = tuple(reader[chosen] for reader in readers)
        numbers[chosen] = ledger.add(kind, size[chosen], where, maker[chosen], end[chosen], some, late=late)
    return numbers


def _charged(layout: Layout, recomputed: bool) -> list[tuple[int, ...]]:
    """The same as `_own`, worked out once."""
    key = "charged", layout.plan.bounds, recomputed
    found: list[tuple[int, ...]] = kept(layout.profile, key, lambda: _own(layout, recomputed))
    return found


def _own(layout: Layout, recomputed: bool) -> list[tuple[int, ...]]:
    """The crossings that each edge is charged with on the side of the sender: each once, however many stages it goes
    to; of a pass that is recomputed not those that are kept for a block of the sender's anyway."""
    crossings = layout.profile.crossings
    last: dict[int, Edge] = {}
    for edge in layout.edges:
        for number in edge.crossings:
            stage_of = layout.stage_of
            if not (recomputed and edge.source in {stage_of[block] for block in crossings[number].consumers}):
                last[number] = edge
    return [tuple(n for n in edge.crossings if last.get(n) is edge) for edge in layout.edges]


def _taken(found: Found, ends: Ends) -> Ints:
    """For every gradient that is sent back, the first receive of the same step that says that it has been taken: of an
    activation that was sent after taking it, on the same edge between the same ranks. -1: there is none. (Later
    operations of a rank have higher numbers.)"""
    row = np.arange(ends.send.size) // found.layout.plan.pieces  # edge, replica and step
    if found.layout.plan.lines > 1:
        most = int(ends.receiver.max()) + 1
        row = (row * most + ends.sender.ravel()) * most + ends.receiver.ravel()
    return _following(row, ends.send.ravel(), ends.take.ravel(), ends.get.ravel()).reshape(ends.send.shape)


@njit(cache=True)
def _following(row: Ints, send: Ints, take: Ints, get: Ints) -> Ints:
    """For every entry that gets something, what is taken of the first that is sent after that in the same row."""
    found = np.full(len(send), -1, np.int64)
    ops = max(send.max(), get.max()) + 1
    key = row * ops + send
    order = np.argsort(key, kind="mergesort")
    key = key[order]
    for k in range(len(send)):
        if get[k] < 0:
            continue
        place = np.searchsorted(key, row[k] * ops + get[k])
        if place < len(key) and row[order[place]] == row[k] and send[order[place]] >= 0:
            found[k] = take[order[place]]
    return found
