"""Memory of messages: what crosses stages, from the stage that makes it to the last that reads it.

Activations go one way and their gradients come the other, and either way it is the same (`_Way`):

    between two ranks    maker ─ what the sender keeps ─ SEND ─ message ─ RECV ─ what has arrived ─ readers
    on one rank          maker ─────────────────────── what is handed over ─────────────────────── readers

What is sent must stay until it has been taken, and the engine learns that only from what comes back: an activation was
taken if its gradient has arrived, and a gradient if something arrives that was sent after it. Until then (at the latest
until the STEP) it counts. Receives are posted ahead, and their buffers count from then on (`posted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Activations on every edge; on those where gradients flow, these; and the buffers of all that is received."""
    layout, edges = found.layout, found.layout.edges
    pairs = list[tuple[Ints, Ints]]()  # of receives and sends
    if edges:
        there, steps = _Ends(found, homes, edges), _steps(found, homes)
        arrived = _cross(ledger, _activations(found, there, steps), payload)
        _read_again(ledger, found, arrived)
        pairs.append((there.take, there.send))
        flowing = [edge for edge in edges if edge.gradients]
        if flowing:
            back = there if len(flowing) == len(edges) else _Ends(found, homes, flowing)
            _cross(ledger, _gradients(found, back, steps), payload)
            pairs.append((back.get, back.give))
    pairs += served_pairs(found)
    if pairs and layout.backend.receives_on_device:
        posted(ledger, found, pairs, payload)


# -- either way ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """What goes one way: an entry for each edge and place."""

    made: Ints  # the operation that makes it
    late: bool  # whether it is there only from the end of that operation on
    size: Ints  # bytes that it takes where it was made
    origin: Ints  # the rank on which it is made
    send: Ints  # -1: to a stage of the same rank
    receive: Ints
    target: Ints  # the rank to which it goes
    taken: Ints  # the operation that tells the sender that it has been taken, or else the STEP
    readers: tuple[Ints, ...]
    used: Ints  # the last of these
    released: Ints  # of what is handed over: when neither stage needs it

    def only(self, chosen: Bools) -> _Way:
        """The same of some entries."""
        return _Way(
            self.made[chosen], self.late, self.size[chosen], self.origin[chosen], self.send[chosen],
            self.receive[chosen], self.target[chosen], self.taken[chosen],
            tuple(reader[chosen] for reader in self.readers), self.used[chosen], self.released[chosen],
        )  # fmt: skip


def _cross(ledger: Ledger, way: _Way, payload: Ints) -> Ints:
    """All values of one way; the numbers of those that the stages at the end of it read."""
    apart = way.send >= 0
    if apart.all():  # nearly always, and copies of large arrays are slow
        return _sent(ledger, way, payload)
    numbers = np.empty(apart.shape, dtype=np.int64)
    numbers[apart] = _sent(ledger, way.only(apart), payload)
    numbers[~apart] = _handed_over(ledger, way.only(~apart))
    return numbers


def _sent(ledger: Ledger, way: _Way, payload: Ints) -> Ints:
    """From one rank to another: what the sender keeps, the message itself, and what has arrived."""
    ledger.add(Value.BOUNDARY, way.size, way.origin, way.made, way.taken, (way.send,), late=way.late)
    ledger.add(Value.MESSAGE, payload[way.send], -1, way.send, way.receive, (way.receive,))
    return ledger.add(Value.BOUNDARY, payload[way.receive], way.target, way.receive, way.used, way.readers)


def _handed_over(ledger: Ledger, way: _Way) -> Ints:
    """From one stage to another on the same rank: what the one has made is what the other reads."""
    return ledger.add(Value.BOUNDARY, way.size, way.origin, way.made, way.released, way.readers, late=way.late)


class _Ends:
    """The operations at both ends of some edges, by edge and place, and the ranks that these run on."""

    def __init__(self, found: Found, homes: Ints, edges: list[Edge]) -> None:
        self.edges = edges
        self.source, self.target = source, target = [e.source for e in edges], [e.target for e in edges]
        self.send, self.take = found.ops(Kind.SEND_F, source, target), found.ops(Kind.RECV_F, target, source)
        self.give, self.get = found.ops(Kind.SEND_B, target, source), found.ops(Kind.RECV_B, source, target)
        self.source_rank, self.target_rank = homes[source], homes[target]


def _steps(found: Found, homes: Ints) -> Ints:
    """The STEP that follows, of every stage on its rank of every place, or what its step ends with."""
    layout = found.layout
    own = found.once(Kind.STEP, layout.holdings)
    number = np.full((layout.plan.depth, int(layout.local_ranks.max()) + 1), -1, dtype=np.int64)
    for place, holding in enumerate(layout.holdings):
        number[holding.stage, holding.rank] = place
        if layout.crosses or not layout.steps_at(holding.rank):
            own[place] = found.last(holding.rank)
    step = np.arange(found.places) // layout.plan.pieces % found.steps
    return own[number[np.arange(layout.plan.depth)[:, None], homes], step]


# -- there ----------------------------------------------------------------------------------------------------------


def _activations(found: Found, ends: _Ends, steps: Ints) -> _Way:
    """Without recomputation the graph of the sender holds on to what it has made until it has gone back."""
    over, used = found.backward(ends.source, final=True), found.backward(ends.target, final=True)
    gone_back = np.where(found.recomputed, ends.get, over)
    return _Way(
        made=found.forward(ends.source), late=False, size=_charged_bytes(found), origin=ends.source_rank,
        send=ends.send, receive=ends.take, target=ends.target_rank,
        taken=np.where(ends.get >= 0, gone_back, steps[ends.source]),
        readers=(found.forward(ends.target, final=False), used), used=used,
        released=np.maximum(over, used),  # the graph of the one stage and the leaf of the other are the same memory
    )  # fmt: skip


def _read_again(ledger: Ledger, found: Found, arrived: Ints) -> None:
    """Blocks that are recomputed read what came to their stage a second time."""
    layout = found.layout
    if not layout.recomputes:
        return
    blocks = [(e, block) for e, edge in enumerate(layout.edges) for block in range(*layout.plan.bounds[edge.target])]
    edge, targets = [e for e, _ in blocks], [layout.edges[e].target for e, _ in blocks]
    ledger.reads(found.ops(Kind.R, targets, units=[block for _, block in blocks]), arrived[edge])


def _charged_bytes(found: Found) -> Ints:
    """Bytes that every edge takes on the side of the sender."""
    layout, count = found.layout, len(found.layout.edges)

    def table(recomputed: bool) -> Ints:
        own: list[tuple[int, ...]] = kept(
            layout.profile, ("charged", layout.plan.bounds, recomputed), lambda: _charged(layout, recomputed)
        )
        return found.by_size(lambda e, n: message_bytes(layout.profile, own[e], n), count, ("sent", recomputed))

    return np.where(found.recomputed, table(True), table(False)) if layout.recomputes else table(False)


def _charged(layout: Layout, recomputed: bool) -> list[tuple[int, ...]]:
    """The crossings that each edge is charged with on the side of the sender: each once, however many stages it goes
    to; of a pass that is recomputed not those that are kept for a block of the sender's anyway."""
    crossings, stage_of = layout.profile.crossings, layout.stage_of
    last: dict[int, Edge] = {}
    for edge in layout.edges:
        for number in edge.crossings:
            if not (recomputed and edge.source in {stage_of[block] for block in crossings[number].consumers}):
                last[number] = edge
    return [tuple(n for n in edge.crossings if last.get(n) is edge) for edge in layout.edges]


# -- back -----------------------------------------------------------------------------------------------------------


def _gradients(found: Found, ends: _Ends, steps: Ints) -> _Way:
    """They are there when the pass that makes them is over, and gone when the pass that reads them is."""
    profile, edges = found.layout.profile, ends.edges
    begin, over = found.backward(ends.source, final=False), found.backward(ends.source, final=True)
    taken = _taken(found, ends)
    return _Way(
        made=found.giving(ends.target), late=True,
        size=found.by_size(lambda e, n: message_bytes(profile, edges[e].gradients, n), len(edges), "sent back"),
        origin=ends.target_rank, send=ends.give, receive=ends.get, target=ends.source_rank,
        taken=np.where(taken >= 0, taken, steps[ends.target]),
        readers=(begin, np.where(over != begin, over, -1)), used=over, released=over,
    )  # fmt: skip


def _taken(found: Found, ends: _Ends) -> Ints:
    """For every gradient that is sent back, the first receive of the same step that says that it has been taken: of an
    activation that was sent after taking it, on the same edge between the same ranks. -1: there is none. (Later
    operations of a rank have higher numbers.)"""
    row = np.arange(ends.send.size) // found.layout.plan.pieces  # edge, replica and step
    if found.layout.plan.lines > 1:  # whose messages on an edge go between different ranks
        most = int(found.layout.local_ranks.max()) + 1
        row = (row * most + ends.source_rank.ravel()) * most + ends.target_rank.ravel()
    return _following(row, ends.send.ravel(), ends.take.ravel(), ends.get.ravel()).reshape(ends.send.shape)


@njit(cache=True)
def _following(row: Ints, send: Ints, take: Ints, get: Ints) -> Ints:
    """For every entry that gets something, what is taken of the first that is sent after that in the same row."""
    found = np.full(len(send), -1, np.int64)
    ops = max(send.max(), get.max()) + 1
    key = row * ops + send
    order = np.arange(len(key))
    if (key[1:] < key[:-1]).any():  # hardly ever: micro-batches go in the order of their numbers
        order = np.argsort(key, kind="mergesort")
        key = key[order]
    for k in range(len(send)):
        if get[k] < 0:
            continue
        place = np.searchsorted(key, row[k] * ops + get[k])
        if place < len(key) and row[order[place]] == row[k] and send[order[place]] >= 0:
            found[k] = take[order[place]]
    return found
