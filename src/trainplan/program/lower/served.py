"""Messages between workers and servers: what they cost, and the memory at both ends.

    worker   B ─ bucket ─ SEND_G                    RECV_W ─ weights ─ F of the next step
    server               RECV_G ─ gradient ─ STEP ─ SEND_W

A server has the weights of its pieces and the optimizer's state for them, and a worker no optimizer. A gradient that
was received stays until the step that takes it. Servers that take whole pushes copy the weights that they send, since
the next push may change them while they are on their way.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.loads import may_open, scattered_bytes
from trainplan.program.lower.service import Load, Service
from trainplan.program.ops import RECEIVES, Kind, Value
from trainplan.program.posting import RECEIVES_AHEAD
from trainplan.program.program import CostClass, Ints, are

_PUSHES, _RECEIVE = (Kind.SEND_G, Kind.RECV_G), are(RECEIVES)


def served_class(
    layout: Layout, service: Service, kind: Kind, stage: int, unit: int, peer: int, replica: int
) -> CostClass | None:  # fmt: skip
    """The cost class of a message, or of a server's step; None of a step that is as everywhere."""
    worker, blocks = layout.rank(replica, 0), len(layout.profile.blocks)
    if kind is not Kind.STEP:
        load = service.loads[unit]
        server, push = service.rank(load.server), kind in _PUSHES
        ends = (worker, server) if kind in (Kind.SEND_G, Kind.RECV_W) else (server, worker)
        tensors = max(1, len(load.segments)) + int(push and load.numbered)
        return CostClass(kind, *ends, bytes=load.pushed_bytes if push else load.bytes, tensors=tensors)
    whole = sum(bucket.bytes for bucket in layout.buckets[0])
    if service.at_root:  # which empties its buckets, too
        return CostClass(kind, worker, first=0, last=blocks, accumulate=1, summed=len(service.pushers))
    server = service.server(stage)
    rank = service.rank(server)
    if service.by_push:
        return CostClass(kind, rank, first=0, last=blocks, until=service.share(server, whole))
    share = service.loads[unit].bytes / whole
    return CostClass(kind, rank, first=0, last=blocks, until=share, summed=len(service.pushers) - 1)


def served_states(ledger: Ledger, layout: Layout, service: Service, states: int) -> None:
    """What servers hold all the time: the weights that are theirs, and the optimizer's state for these."""
    if service.at_root:
        return
    whole = sum(bucket.bytes for bucket in layout.buckets[0])
    rank = np.array([service.rank(server) for server in service.servers])
    never = np.full(len(rank), -1, dtype=np.int64)
    shares = np.array([service.share(server, whole) for server in service.servers])
    ledger.add(Value.WEIGHTS, np.round(shares * whole).astype(np.int64), rank, never, never)
    ledger.add(Value.OPTIMIZER, np.round(shares * states).astype(np.int64), rank, never, never)


def served(ledger: Ledger, found: Found, service: Service) -> None:
    """What servers and workers send each other, and wait for."""
    from trainplan.program.lower.gradients import completing

    layout = found.layout
    holdings = layout.holdings
    workers = np.array([[h.rank] * found.steps for h in holdings], dtype=np.int64)
    forwards = found.own(found.ops(Kind.F, [0]), holdings, empty=NEVER).min(axis=2)
    over = found.own(found.backward([0], final=True), holdings).max(axis=2)
    for load in service.loads:
        ends = _Ends(found, service, load)
        if load.bucket >= 0:
            ready = over
            if not service.at_root:
                ready = found.own(completing(found, [0], [load.bucket]), holdings).max(axis=2)
            _push(ledger, service, load, ends, workers, ready)
        _pull(ledger, service, load, ends, workers, forwards)
    if service.at_root:  # its own gradients
        step = found.once(Kind.STEP, holdings[:1])[0]
        ledger.add(Value.TOKEN, 0, workers[0], over[0], step, (step,))
    if layout.backend.receives_on_device:
        _posted(ledger, found, service)


class _Ends:
    """The operations of one load, by worker and step; -1: there is none."""

    def __init__(self, found: Found, service: Service, load: Load) -> None:
        self.rank, stage = service.rank(load.server), service.stage(load.server)

        def ops(kind: Kind, at: int, peer: int) -> Ints:
            own = found.ops(kind, [at], [peer], [load.unit])[0]
            return own.reshape(len(found.layout.replicas), found.steps, -1)[:, :, 0]

        self.send_g, self.recv_w = ops(Kind.SEND_G, 0, stage), ops(Kind.RECV_W, 0, stage)
        self.recv_g, self.send_w = ops(Kind.RECV_G, stage, 0), ops(Kind.SEND_W, stage, 0)
        # The step that takes the gradients of each worker: one for all, or of whole pushes one for each.
        units = range(len(self.send_g)) if service.by_push else [0 if service.at_root else load.unit]
        steps = np.array([found.numbered(Kind.STEP, stage, unit, self.rank) for unit in units])
        self.step = np.broadcast_to(steps, self.send_g.shape)


def _push(ledger: Ledger, service: Service, load: Load, ends: _Ends, workers: Ints, ready: Ints) -> None:
    own = list(service.pushers)
    send, receive, step = ends.send_g[own], ends.recv_g[own], ends.step[own]
    ledger.add(Value.TOKEN, 0, workers[own], ready[own], send, (send,))
    ledger.add(Value.MESSAGE, load.pushed_bytes, -1, send, receive, (receive,))
    ledger.add(Value.GRADIENTS, load.pushed_bytes, ends.rank, receive, step, (step,))


def _pull(ledger: Ledger, service: Service, load: Load, ends: _Ends, workers: Ints, forwards: Ints) -> None:
    """Servers send when they have stepped, for the next step; the root first of all, for this one."""
    own = list(service.pushers)
    send, receive, step, first = ends.send_w[own], ends.recv_w[own], ends.step[own], forwards[own]
    before, after = (np.s_[:, :-1], np.s_[:, 1:]) if service.at_root else (np.s_[:], np.s_[:])
    ledger.add(Value.TOKEN, 0, ends.rank, step[before], send[after], (send[after],))
    ledger.add(Value.MESSAGE, load.bytes, -1, send, receive, (receive,))
    if service.by_push:
        ledger.add(Value.COMMUNICATION, load.bytes, ends.rank, send, send)
    used, readers = (receive, first) if service.at_root else (receive[:, :-1], first[:, 1:])
    ledger.add(Value.TOKEN, 0, workers[own][:, : used.shape[1]], used, readers, (readers,))


def _posted(ledger: Ledger, found: Found, service: Service) -> None:
    """Buffers of receives from when they are posted, some ahead, until they are taken. Of whole pushes servers take
    one at a time from each worker, and post it when it comes."""
    receives = _RECEIVE[found.kind]
    if service.by_push:
        receives &= found.kind != Kind.RECV_G
    ops = np.flatnonzero(receives)
    home = found.rank[ops] * found.steps + found.step[ops]
    begin = np.searchsorted(home, home)  # the first receive of the same rank and step
    after = np.arange(len(ops)) - RECEIVES_AHEAD
    later = np.flatnonzero(after >= begin)
    size = np.array([_bytes(found, service, int(op)) for op in ops], dtype=np.int64)
    ledger.add(
        Value.COMMUNICATION, size[later], found.rank[ops[later]], ops[after[later]], ops[later], late=True, early=True
    )  # fmt: skip
    # The others are posted when the step begins: with the first operation that its rank has in it.
    alone = np.flatnonzero(may_open(found))
    start = alone[np.unique(found.rank[alone] * found.steps + found.step[alone], return_index=True)[1]]
    opened = dict(zip((found.rank[start] * found.steps + found.step[start]).tolist(), start.tolist(), strict=True))
    first = np.array([opened[key] for key in home.tolist()], dtype=np.int64)
    now = np.flatnonzero((after < begin) & (first != ops))
    ledger.add(Value.COMMUNICATION, size[now], found.rank[ops[now]], first[now], ops[now], early=True)


def _bytes(found: Found, service: Service, op: int) -> int:
    if found.kind[op] == Kind.RECV_INPUT:
        return scattered_bytes(found.layout, found.layout.replicas[int(found.replica_of[op])])
    load = service.loads[int(found.unit[op])]
    return load.pushed_bytes if found.kind[op] == Kind.RECV_G else load.bytes
