"""Parameter servers laid over a model: what each message carries, and between whom.

A worker's gradients are in buckets, as for any other exchange. Of every bucket, each server gets its pieces in one
message, as soon as backward has completed the bucket: a *load*. Weights come back in the same loads. Where the first
worker is the server of all others (`dataparallel`), a load is a bucket; and weights travel with the running statistics,
which are a load of their own that no gradients are in.

Under pipelines the servers have the keys of all stages, and every stage pushes and pulls its own, from all replicas.
A server takes those of the last stage first, as backward does. Weights that several stages hold are a bucket of their
own in each of them, and one load that all holders push: servers sum it over stages as they do over replicas.

What a worker and a server do in a step:

    in step    worker   F B SEND_G SEND_G.1 … B.1 SEND_G.2 …    RECV_W RECV_W.1 …  LOSS
               server   RECV_G^0 RECV_G^1 … STEP SEND_W^0 SEND_W^1 …   and so on, load by load
    at the     root     SEND_W^1 SEND_W^2 … F B RECV_G^1 … STEP LOSS
    root       others   RECV_W RECV_W.1 … F B SEND_G SEND_G.1 … LOSS
    by itself  server   takes whole pushes as they arrive: RECV_G^p RECV_G.1^p … STEP.p SEND_W^p SEND_W.1^p …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainplan.lasting import lasting
from trainplan.plan.keys import Piece, deal
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS, AT_ROOT, SERVED
from trainplan.profile.profile import Parameter
from trainplan.program.lower.buckets import Bucket

NUMBER_BYTES = 8  # of the number that a push to a server that takes whole pushes begins with


@dataclass(frozen=True)
class Load:
    """What one message carries: pieces of one bucket, for one server."""

    unit: int  # its number
    places: tuple[tuple[int, int], ...]  # every stage that pushes it, with its bucket there; -1: running statistics
    server: int
    bytes: int
    pieces: tuple[Piece, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()  # of the bucket laid out flat: the elements that are these pieces
    numbered: bool = False  # the first load of a push, with the number of the push in front

    @property
    def has_gradients(self) -> bool:
        return self.places[0][1] >= 0

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that push it: one, or all that hold the same weights."""
        return tuple(stage for stage, _ in self.places)

    def bucket(self, stage: int) -> int:
        """The bucket of a stage whose pieces these are."""
        return dict(self.places)[stage]

    @property
    def pushed_bytes(self) -> int:
        """Bytes of its gradients on the way to the server."""
        return self.bytes + (NUMBER_BYTES if self.numbered else 0)


@dataclass(frozen=True)
class Service:
    """The loads of a plan on a model."""

    plan: Plan
    loads: tuple[Load, ...]

    @property
    def at_root(self) -> bool:
        """Whether the first worker is the server."""
        return self.plan.exchange == AT_ROOT

    @property
    def by_push(self) -> bool:
        """Whether servers take whole pushes, in the order of their arrival."""
        return self.plan.exchange in ASYNCHRONOUS

    @property
    def pushers(self) -> tuple[int, ...]:
        """The replicas whose workers send their gradients."""
        return tuple(range(1 if self.at_root else 0, self.plan.dp))

    def pushes(self, load: Load) -> list[tuple[int, int]]:
        """Replica and stage of every worker that sends a load, in the order in which a server takes them."""
        return [(replica, stage) for stage in load.stages for replica in self.pushers]

    @property
    def servers(self) -> range:
        return range(1 if self.at_root else self.plan.servers)

    def rank(self, server: int) -> int:
        """The rank of a server."""
        return 0 if self.at_root else self.plan.workers + server

    def stage(self, server: int) -> int:
        """The number that a server has where workers have that of their stage."""
        return 0 if self.at_root else self.plan.depth + server

    def server(self, stage: int) -> int:
        """The server of that number."""
        return 0 if self.at_root else stage - self.plan.depth

    @lasting
    def pushed(self) -> tuple[Load, ...]:
        """The loads with gradients in them."""
        return tuple(load for load in self.loads if load.has_gradients)

    @lasting
    def by_server(self) -> tuple[tuple[Load, ...], ...]:
        return tuple(tuple(load for load in self.loads if load.server == server) for server in self.servers)

    def of_bucket(self, stage: int, bucket: int) -> list[Load]:
        return [load for load in self.loads if (stage, bucket) in load.places]

    @lasting
    def whole(self) -> int:
        """Bytes that are trained."""
        return sum(load.bytes for load in self.pushed)

    def share(self, server: int) -> float:
        """Of these, how many a server has."""
        own = sum(load.bytes for load in self.by_server[server] if load.has_gradients)
        return own / self.whole if self.whole else 0.0


def service(
    plan: Plan, parameters: Sequence[Parameter], buckets: Sequence[Sequence[Bucket]], buffer_bytes: int
) -> Service | None:
    """The loads of a plan, whose stages have these buckets; None where gradients are exchanged otherwise."""
    if plan.exchange not in SERVED:
        return None
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # by what is in a bucket
    for stage in reversed(range(len(buckets))):
        for number, bucket in enumerate(buckets[stage]):
            places.setdefault(bucket.names, []).insert(0, (stage, number))
    own = [p for p in parameters if p.trainable]
    element = {p.name: p.bytes // p.count if p.count else 0 for p in own}
    servers = max(1, plan.servers)
    pieces: dict[str, list[Piece]] = {}
    for piece in deal([(p.name, p.count) for p in own], servers, plan.split):
        pieces.setdefault(piece.name, []).append(piece)
    loads: list[Load] = []
    fresh = set(range(servers))
    # What several stages hold comes last: the first of them has the last word.
    for names, holders in sorted(places.items(), key=lambda item: len(item[1])):
        for server in range(servers):
            found, segments, begin = list[Piece](), list[tuple[int, int]](), 0
            for name in names:
                for piece in pieces[name]:
                    if piece.server == server:
                        found.append(piece)
                        _join(segments, begin + piece.first, begin + piece.last)
                begin += pieces[name][-1].last
            if found:
                size = sum(piece.count * element[piece.name] for piece in found)
                numbered = plan.exchange in ASYNCHRONOUS and server in fresh
                fresh.discard(server)
                loads.append(Load(len(loads), tuple(holders), server, size, tuple(found), tuple(segments), numbered))
    if plan.exchange == AT_ROOT and buffer_bytes:
        loads.append(Load(len(loads), ((0, -1),), 0, buffer_bytes))
    return Service(plan, tuple(loads))


def _join(segments: list[tuple[int, int]], first: int, last: int) -> None:
    """Append a segment, or lengthen the last one."""
    if segments and segments[-1][1] == first:
        segments[-1] = (segments[-1][0], last)
    else:
        segments.append((first, last))
