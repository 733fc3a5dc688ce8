"""Messages between workers and servers: what they cost, and the memory at both ends.

    worker   B ─ bucket ─ SEND_G                    RECV_W ─ weights ─ F of the next step
    server               RECV_G ─ gradient ─ STEP ─ SEND_W

A server has the weights of its pieces and the optimizer's state for them, and a worker no optimizer. A gradient that
was received stays until the step that takes it, which adds up what came, and needs what the optimizer does meanwhile.
Servers that take whole pushes copy the weights that they send, since the next push may change them while they are on
their way.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from trainplan.profile.footprint import pieces_workspace
from trainplan.program.lower.buckets import kept
from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.service import Load, Service
from trainplan.program.ops import Kind, Value
from trainplan.program.program import CostClass, Ints

_PUSHES = (Kind.SEND_G, Kind.RECV_G)


def served_class(
    layout: Layout, service: Service, kind: Kind, stage: int, unit: int, peer: int, replica: int
) -> CostClass | None:  # fmt: skip
    """The cost class of a message, or of a server's step; None of a step that is as everywhere."""
    blocks = len(layout.profile.blocks)
    if kind is not Kind.STEP:
        load = service.loads[unit]
        worker = layout.rank(replica, stage if kind in (Kind.SEND_G, Kind.RECV_W) else peer)
        server, push = service.rank(load.server), kind in _PUSHES
        ends = (worker, server) if kind in (Kind.SEND_G, Kind.RECV_W) else (server, worker)
        tensors = max(1, len(load.segments)) + int(push and load.numbered)
        return CostClass(kind, *ends, bytes=load.pushed_bytes if push else load.bytes, tensors=tensors)
    if service.at_root:  # which empties its buckets, too
        worker = layout.rank(replica, 0)
        return CostClass(kind, worker, first=0, last=blocks, accumulate=1, summed=len(service.pushers))
    server = service.server(stage)
    rank = service.rank(server)
    if service.by_push:
        return CostClass(kind, rank, first=0, last=blocks, until=service.share(server))
    load = service.loads[unit]
    share = load.bytes / service.whole
    return CostClass(kind, rank, first=0, last=blocks, until=share, summed=len(service.pushes(load)) - 1)


def served_states(ledger: Ledger, layout: Layout, service: Service) -> None:
    """What servers hold all the time: the weights that are theirs, and the optimizer's state for these."""
    if service.at_root:
        return
    profile = layout.profile
    states = round(sum(p.count for p in profile.parameters if p.trainable) * profile.state_bytes_per_parameter)
    rank = np.array([service.rank(server) for server in service.servers])
    never = np.full(len(rank), -1, dtype=np.int64)
    shares = np.array([service.share(server) for server in service.servers])
    ledger.add(Value.WEIGHTS, np.round(shares * service.whole).astype(np.int64), rank, never, never)
    ledger.add(Value.OPTIMIZER, np.round(shares * states).astype(np.int64), rank, never, never)


def served(ledger: Ledger, found: Found, service: Service) -> None:
    """What servers and workers send each other, and wait for."""
    for stage in found.layout.stages:
        _served(ledger, found, service, stage)
    if not service.at_root:  # whose step is that of a worker
        for server in service.servers:
            _steps(ledger, found, service, server)


def _steps(ledger: Ledger, found: Found, service: Service, server: int) -> None:
    """What the steps of a server need while they run: for a load each, or for a whole push."""
    own = [load for load in service.by_server[server] if load.has_gradients]
    profile = found.layout.profile
    element = {p.name: p.bytes / p.count for p in profile.parameters if p.count}
    pushes = dict.fromkeys(service.pushers, own) if service.by_push else {load.unit: [load] for load in own}
    for unit, loads in pushes.items():
        pieces = tuple((p.name, round(p.count * element[p.name])) for load in loads for p in load.pieces)
        size = kept(profile, ("pieces", pieces), partial(pieces_workspace, profile, pieces))
        if (
            not service.by_push
        ):  # what came from all others is added and gone; what came in segments is put together first
            (load,) = loads
            others = (len(service.pushes(load)) - 1) * load.bytes
            size = max(load.bytes if len(load.segments) > 1 else 0, size - others)
        step = found.numbered(Kind.STEP, service.stage(server), unit, service.rank(server))
        ledger.add_some(Value.WORKSPACE, np.array(size), np.array(service.rank(server)), step, step)


def _served(ledger: Ledger, found: Found, service: Service, stage: int) -> None:
    """The same of the workers that hold a stage."""
    from trainplan.program.lower.gradients import completing

    holdings = [h for h in found.layout.holdings if h.stage == stage]
    workers = np.array([[h.rank] * found.steps for h in holdings], dtype=np.int64)
    forwards = found.own(found.ops(Kind.F, [stage]), holdings, empty=NEVER).min(axis=2)
    over = found.own(found.backward([stage], final=True), holdings).max(axis=2)
    for load in (load for load in service.loads if stage in load.stages):
        ends = _Ends(found, service, load, stage)
        if load.has_gradients:
            ready = over
            if not service.at_root:
                ready = found.own(completing(found, [stage], [load.bucket(stage)]), holdings).max(axis=2)
            _push(ledger, service, load, ends, workers, ready)
        _pull(ledger, service, load, ends, workers, forwards)
    if service.at_root:  # its own gradients
        step = found.once(Kind.STEP, holdings[:1])[0]
        ledger.add(Value.TOKEN, 0, workers[0], over[0], step, (step,))


class _Ends:
    """The operations of one load, by worker of a stage and step; -1: there is none."""

    def __init__(self, found: Found, service: Service, load: Load, worker: int) -> None:
        self.rank, server = service.rank(load.server), service.stage(load.server)

        def ops(kind: Kind, at: int, peer: int) -> Ints:
            own = found.ops(kind, [at], [peer], [load.unit])[0]
            return own.reshape(len(found.layout.replicas), found.steps, -1)[:, :, 0]

        self.send_g, self.recv_w = ops(Kind.SEND_G, worker, server), ops(Kind.RECV_W, worker, server)
        self.recv_g, self.send_w = ops(Kind.RECV_G, server, worker), ops(Kind.SEND_W, server, worker)
        # The step that takes the gradients of each worker: one for all, or of whole pushes one for each.
        units = range(len(self.send_g)) if service.by_push else [0 if service.at_root else load.unit]
        steps = np.array([found.numbered(Kind.STEP, server, unit, self.rank) for unit in units])
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


def served_pairs(found: Found) -> list[tuple[Ints, Ints]]:
    """The receives and the sends of messages between workers and servers."""
    service = found.layout.service
    if service is None:
        return []
    ends = [_Ends(found, service, load, stage) for load in service.loads for stage in load.stages]
    inputs = (
        found.ops(Kind.RECV_INPUT, [0], [0]),
        found.ops(Kind.SEND_INPUT, [0], [0]),
    )  # of a scattered batch
    return [inputs, *((own.recv_g, own.send_g) for own in ends), *((own.recv_w, own.send_w) for own in ends)]
