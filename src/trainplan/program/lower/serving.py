"""The lists of whoever serves: parameter servers, and the root that is the server of the other workers.

A server's rows name the worker that each is about by its replica, as the worker's own rows do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.row import Row
from trainplan.program.lower.service import Load, Service
from trainplan.program.ops import Kind
from trainplan.program.program import Ints

if TYPE_CHECKING:
    from collections.abc import Sequence


class Bodies(Protocol):
    """Where templates are put (`rows.py`); the number of each."""

    def add(self, template: Sequence[Row], replica: int, rank: int) -> int: ...


def around(layout: Layout, bodies: Bodies, replica: int, rank: int) -> tuple[list[int], list[int]]:
    """What a worker does before and after everything else in a step, where the root serves the others: it sends them
    its weights first, and takes their gradients last."""
    service = layout.service
    if service is None or not service.at_root:
        return [], []
    if rank != service.rank(0):
        return [bodies.add([Row(Kind.RECV_W, 0, 0, load.unit, 0) for load in service.loads], replica, rank)], []
    sends = [row for load in service.loads for row in _rows(bodies, service, Kind.SEND_W, load)]
    takes = [row for load in service.pushed for row in _rows(bodies, service, Kind.RECV_G, load)]
    return sends, [*takes, bodies.add([Row(Kind.LOSS, 0, 0), Row(Kind.STEP, 0, 0)], replica, rank)]


def _rows(bodies: Bodies, service: Service, kind: Kind, load: Load) -> list[int]:
    """The messages with a load between a server and all its workers."""
    return [_row(bodies, service, kind, load, *worker) for worker in service.pushes(load)]


def _row(bodies: Bodies, service: Service, kind: Kind, load: Load, replica: int, stage: int = 0) -> int:
    """One message between a server and a worker."""
    return bodies.add([Row(kind, service.stage(load.server), 0, load.unit, stage)], replica, service.rank(load.server))


def servers(layout: Layout, bodies: Bodies) -> list[tuple[int, Ints, Ints]]:
    """The list of every server, in bodies; all of them are about micro-batch 0."""
    service = layout.service
    if service is None or service.at_root:
        return []
    found = []
    for server in service.servers:
        numbers = (_by_push if service.by_push else _in_step)(service, bodies, server)
        found.append((service.rank(server), np.array(numbers), np.zeros(len(numbers), dtype=np.int64)))
    return found


def _in_step(service: Service, bodies: Bodies, server: int) -> list[int]:
    """Load by load: the gradients of all workers, one step, the weights to all workers."""
    found = []
    for load in service.by_server[server]:
        found += _rows(bodies, service, Kind.RECV_G, load)
        found.append(bodies.add([Row(Kind.STEP, service.stage(server), 0, load.unit)], 0, service.rank(server)))
        found += _rows(bodies, service, Kind.SEND_W, load)
    return found


def _by_push(service: Service, bodies: Bodies, server: int) -> list[int]:
    """Worker by worker, though in which order is decided while running: a whole push, a step with it, the weights."""
    found, loads = [], service.by_server[server]
    for worker in service.pushers:
        found += [_row(bodies, service, Kind.RECV_G, load, worker) for load in loads]
        found.append(bodies.add([Row(Kind.STEP, service.stage(server), 0, worker)], worker, service.rank(server)))
        found += [_row(bodies, service, Kind.SEND_W, load, worker) for load in loads]
    return found
