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
from trainplan.program.lower.found import FINAL_BACK, FINAL_FORWARD, FIRST_BACK, FIRST_FORWARD, GIVING, Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.posted import posted
from trainplan.program.lower.served import served_pairs
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Bools, Ints

# What is added, one after the other, and whether it is there only from the end of its maker on: there what is sent, the
# message, and what has arrived, or what is handed over without one; and the same of gradients on their way back.
_PIECES = (
    (Value.BOUNDARY, False), (Value.MESSAGE, False), (Value.BOUNDARY, False), (Value.BOUNDARY, False),
    (Value.BOUNDARY, True), (Value.MESSAGE, False), (Value.BOUNDARY, False), (Value.BOUNDARY, True),
)  # fmt: skip


def messages(ledger: Ledger, found: Found, homes: Ints, payload: Ints) -> None:
    """A message there on every edge, and where gradients flow one back. Between two stages of one rank what crosses is
    handed over without a message."""
    layout, edges = found.layout, found.layout.edges
    if not edges and layout.service is None:
        return
    pairs = list(served_pairs(found))  # of receives and sends
    if edges:
        pairs = [*_crossing(ledger, found, homes, payload), *pairs]
    if layout.backend.receives_on_device:
        posted(ledger, found, pairs, payload)


def _crossing(ledger: Ledger, found: Found, homes: Ints, payload: Ints) -> list[tuple[Ints, Ints]]:
    """What crosses on every edge at every place; the receives and the sends, there and back."""
    layout, profile, edges = found.layout, found.layout.profile, found.layout.edges
    source, target = [e.source for e in edges], [e.target for e in edges]
    ends = found.numbers[
        [
            *found.lines(Kind.SEND_F, source, target), *found.lines(Kind.RECV_F, target, source),
            *found.lines(Kind.SEND_B, target, source), *found.lines(Kind.RECV_B, source, target),
        ]
    ].reshape(4, len(edges), found.places)  # fmt: skip
    plain = _charged(layout, False)
    out = found.by_size(lambda e, n: message_bytes(profile, plain[e], n), len(edges), "sent")
    again = np.zeros((0, 2), dtype=np.int64)
    if layout.recomputes:
        slim = _charged(layout, True)
        less = found.by_size(lambda e, n: message_bytes(profile, slim[e], n), len(edges), "sent, recomputed")
        out = np.where(found.recomputed, less, out)
        blocks = [(e, block) for e, edge in enumerate(edges) for block in range(*layout.plan.bounds[edge.target])]
        rows = found.lines(Kind.R, [target[e] for e, _ in blocks], units=[block for _, block in blocks])
        again = np.array([(e, row) for (e, _), row in zip(blocks, rows, strict=True)], dtype=np.int64)
    back = found.by_size(lambda e, n: message_bytes(profile, edges[e].gradients, n), len(edges), "sent back")
    ledger.add_found(
        _PIECES,
        *_crossings(
            np.array([source, target], dtype=np.int64), np.array([bool(e.gradients) for e in edges]), ends,
            found.passes, homes, _steps(found, homes), found.recomputed, payload, out, back, again, found.numbers,
            layout.plan.pieces, layout.plan.lines > 1,
        ),
    )  # fmt: skip
    send, take, give, get = ends
    return [(take, send), (get, give)]


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


@njit(cache=True)
def _crossings(
    stages: Ints, flows: Bools, ends: Ints, passes: Ints, homes: Ints, steps: Ints, recomputed: Bools, payload: Ints,
    out: Ints, back: Ints, again: Ints, ops: Ints, pieces: int, several: bool,
) -> tuple[Ints, Ints, Ints, Ints]:  # fmt: skip
    """Activations and their gradients on every edge, in eight `_PIECES`.

    `stages`: source and target of every edge; `flows`: whether gradients come back; `ends`: SEND_F, RECV_F, SEND_B and
    RECV_B of every edge and place; `out` and `back`: bytes that are charged to the sender, and of gradients; `again`:
    edges and rows of `ops`, of blocks that are recomputed behind each; `several`: lines, whose messages on an edge go
    between different ranks.
    """
    source, target = stages
    send, take, give, get = ends
    edges, places = send.shape
    made, giving = passes[FINAL_FORWARD], passes[GIVING]
    begin, over = passes[FIRST_BACK], passes[FINAL_BACK]
    most = edges * places
    counts, count, read = np.zeros(8, np.int64), 0, 0
    found = np.empty((4, 8 * most), np.int64)
    readers = np.empty((2, 11 * most + 2 * len(again) * places), np.int64)
    arrived = np.full((edges, places), -1, np.int64)  # → its number, as it came or as it was handed over
    # There. Without recomputation the graph holds on to what was made until it has gone back.
    for piece in range(4):
        before = count
        for e in range(edges):
            s, t = source[e], target[e]
            for p in range(places):
                if (send[e, p] >= 0) != (piece < 3):
                    continue
                if piece == 0:
                    until = steps[s, p]
                    if get[e, p] >= 0:
                        until = get[e, p] if recomputed[p] else over[s, p]
                    _put(found, count, out[e, p], homes[s, p], made[s, p], until)
                    readers[0, read] = send[e, p]
                elif piece == 1:
                    _put(found, count, payload[send[e, p]], -1, send[e, p], take[e, p])
                    readers[0, read] = take[e, p]
                else:
                    if piece == 2:
                        _put(found, count, payload[take[e, p]], homes[t, p], take[e, p], over[t, p])
                    else:  # on one rank: the graph of the one stage and the leaf of the other are the same memory
                        _put(found, count, out[e, p], homes[s, p], made[s, p], max(over[s, p], over[t, p]))
                    readers[0, read] = passes[FIRST_FORWARD, t, p]
                    arrived[e, p] = count
                readers[1, read] = count
                count, read = count + 1, read + 1
        counts[piece] = count - before
        if piece >= 2:  # backward reads it as well
            for e in range(edges):
                for p in range(places):
                    if (send[e, p] >= 0) == (piece < 3):
                        readers[0, read], readers[1, read] = over[target[e], p], arrived[e, p]
                        read += 1
    for handed in (False, True):
        for k in range(len(again)):
            for p in range(places):
                e = again[k, 0]
                if (send[e, p] < 0) == handed:
                    readers[0, read], readers[1, read] = ops[again[k, 1], p], arrived[e, p]
                    read += 1
    # Back.
    taken = _taken(source, target, ends, homes, pieces, several)
    for piece in range(4, 8):
        before = count
        for e in range(edges):
            s, t = source[e], target[e]
            for p in range(places):
                if not flows[e] or (give[e, p] >= 0) != (piece < 7):
                    continue
                if piece == 4:
                    until = taken[e, p] if taken[e, p] >= 0 else steps[t, p]
                    _put(found, count, payload[give[e, p]], homes[t, p], giving[t, p], until)
                    readers[0, read] = give[e, p]
                elif piece == 5:
                    _put(found, count, payload[give[e, p]], -1, give[e, p], get[e, p])
                    readers[0, read] = get[e, p]
                else:
                    if piece == 6:
                        _put(found, count, payload[get[e, p]], homes[s, p], get[e, p], over[s, p])
                    else:
                        _put(found, count, back[e, p], homes[s, p], giving[t, p], over[s, p])
                    readers[0, read] = begin[s, p]
                readers[1, read] = count
                count, read = count + 1, read + 1
        counts[piece] = count - before
        if piece >= 6:
            at = before
            for e in range(edges):
                for p in range(places):
                    if flows[e] and (give[e, p] >= 0) == (piece < 7):
                        s = source[e]
                        readers[0, read] = over[s, p] if over[s, p] != begin[s, p] else -1
                        readers[1, read] = at
                        at, read = at + 1, read + 1
    return counts, found[:, :count].copy(), readers[0, :read].copy(), readers[1, :read].copy()


@njit(cache=True, inline="always")
def _put(found: Ints, at: int, size: int, rank: int, maker: int, end: int) -> None:
    found[0, at], found[1, at], found[2, at], found[3, at] = size, rank, maker, end


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


@njit(cache=True)
def _taken(source: Ints, target: Ints, ends: Ints, homes: Ints, pieces: int, several: bool) -> Ints:
    """For every gradient that is sent back, the first receive of the same step that says that it has been taken: of an
    activation that was sent after taking it, on the same edge between the same ranks. -1: there is none. (Later
    operations of a rank have higher numbers.)"""
    send, take, _, get = ends
    edges, places = send.shape
    row, most = np.empty(edges * places, np.int64), homes.max() + 1
    for e in range(edges):
        for p in range(places):
            at = e * places + p
            row[at] = at // pieces  # edge, replica and step
            if several:
                row[at] = (row[at] * most + homes[source[e], p]) * most + homes[target[e], p]
    return _following(row, send.ravel(), take.ravel(), get.ravel()).reshape(edges, places)


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
