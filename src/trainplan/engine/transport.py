"""How ranks talk: one small interface, three ways.

* `gloo`: CPU tensors, tagged point-to-point, asynchronous.
* `gloo-staged`: the same for GPU tensors, through pinned host memory: gloo's point-to-point cannot take them. This is
  what slices of one GPU use.
* `nccl`: GPU tensors directly. Its order of messages is tested on gloo (tests/engine/test_order_of_messages.py), NCCL
  itself not above one rank.

Sums that we make ourselves are rounds of messages within their group (`exchanges.py`), which have tags of their own
there; with NCCL a round is one batch. What we send ourselves is counted, by operation of the program; what gloo or NCCL
send to make a sum is theirs.

With gloo every message has a tag made of (trainer, edge, micro-batch, direction, tensor), so the order in which the two
ends post their halves does not matter, nor what a trainer before this one has left behind. NCCL has none:
`program.posting` says in which order receives are posted.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.cluster.probe import shares
from trainplan.cluster.probe.staging import Line, Staging, given, pinned
from trainplan.engine.clocks import now
from trainplan.engine.world import groups_of
from trainplan.errors import InputError, nearest

# 2.13 has a new name for it, and 2.11 only the old one.
all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Form = tuple[tuple[int, ...], torch.dtype]  # of a tensor that will arrive
Part = tuple[Tensor, int, int]  # of a round: a tensor, the rank at the other end, and the tag
_APART = 2**22  # tags of a transport: those of training, of evaluation and of clocks
_TRANSPORTS = 2**31 // _APART  # that have tags of their own; then they begin again
_numbers = itertools.count()  # of those of this process: all ranks connect theirs in the same order


class Pending(Protocol):
    """Something that goes on."""

    def wait(self) -> None: ...


@dataclass
class Works:
    """Several of torch's handles, and what they keep alive.

    A handle is waited for exactly once: gloo's point-to-point handles block for ever the second time.
    """

    works: list[dist.Work]
    keep: Sequence[Tensor] = ()

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once the first of them is over."""
        self.works[0].get_future().add_done_callback(lambda _: call())


@dataclass
class Message(Works):
    """A message on its way in; `take` gives its tensors, on the device, once it has arrived."""

    take: Callable[[], list[Tensor]] = list
    arrival: Future[float] | None = None  # when it did, if somebody watches for it

    def watch(self, arrivals: Arrivals) -> None:
        """Have its arrival noted."""
        self.arrival = arrivals.watch(Works(self.works, self.keep))
        self.works = []  # whoever watches waits for them, and nobody else

    def wait(self) -> None:
        super().wait()
        if self.arrival is not None:
            self.arrival.result()


class Arrivals:
    """Threads that wait for messages, so that the moment of an arrival is known although the host is computing.

    gloo's point-to-point handles cannot be asked whether they are done, only waited for. A thread waits for one
    message at a time, so there must be as many as there are messages that may be on their way. They are daemons: a
    message that never comes must not keep the process from ending.
    """

    def __init__(self, threads: int) -> None:
        self._queue: SimpleQueue[tuple[Pending, Future[float]]] = SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._work, name="arrivals", daemon=True).start()

    def watch(self, pending: Pending) -> Future[float]:
        """The moment at which something is over, once it is."""
        moment: Future[float] = Future()
        self._queue.put((pending, moment))
        return moment

    def _work(self) -> None:
        while True:
            pending, moment = self._queue.get()
            try:
                pending.wait()
                moment.set_result(now())
            except BaseException as error:
                moment.set_exception(error)
            del pending, moment  # and the memory that they keep: the next message would find none that is pinned


class Watched(Works):
    """Messages that a thread waits for, so that whoever wants to know is told when they are over."""

    def __init__(self, over: Future[float], keep: Sequence[Tensor]) -> None:
        super().__init__([], keep)
        self._over = over

    def wait(self) -> None:
        self._over.result()

    def when_done(self, call: Callable[[], None]) -> None:
        self._over.add_done_callback(lambda _: call())


class Transport(Protocol):
    """Messages and sums. Ranks are those of the default process group."""

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, op: int = -1) -> Pending: ...

    def receive(self, forms: Sequence[Form], source: int, tag: int) -> Message: ...

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work: ...

    def barrier(self, group: dist.ProcessGroup | None) -> dist.Work: ...


class Gloo:
    """CPU tensors over gloo."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent: Counter[int] = Counter()  # payload bytes, by operation of the program; -1: of none
        self._number: int | None = None
        self._gathers: Arrivals | None = None  # waits for shares, one gathering after the other

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        """Make what messages between these pairs (from, to) need; all ranks ask for the same. Here that is tags which
        no other transport has: a receive that somebody has left behind would take what is sent to us."""
        if self._number is None:
            self._number = next(_numbers) % _TRANSPORTS

    def _tag(self, tag: int) -> int:
        return (self._number or 0) * _APART + tag

    def channel(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Where the rounds of a group's sums are exchanged; all ranks ask for the same. Tags keep them apart."""
        return group

    def on_wire(self, tensor: Tensor) -> Tensor:
        """A tensor where this transport can send from it: itself, or a copy."""
        return tensor

    def exchange(
        self, sends: Sequence[Part], receives: Sequence[Part], group: dist.ProcessGroup | None
    ) -> tuple[list[dist.Work], int]:
        """Post the messages of a round, and how many bytes this rank sends."""
        works = [dist.irecv(tensor, source, group=group, tag=tag) for tensor, source, tag in receives]
        works += [dist.isend(tensor, to, group=group, tag=tag) for tensor, to, tag in sends]
        return [w for w in works if w is not None], sum(tensor.nbytes for tensor, _, _ in sends)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, op: int = -1) -> Pending:
        whole = [tensor.contiguous() for tensor in tensors]
        self.sent[op] += sum(tensor.nbytes for tensor in whole)
        works = [dist.isend(tensor, to, tag=self._tag(tag + i)) for i, tensor in enumerate(whole) if tensor.numel()]
        return Works([w for w in works if w is not None], whole)

    def receive(self, forms: Sequence[Form], source: int, tag: int) -> Message:
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]
        works = [dist.irecv(t, source, tag=self._tag(tag + i)) for i, t in enumerate(tensors) if t.numel()]
        return Message([w for w in works if w is not None], tensors, lambda: tensors)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None  # async_op gives a handle to every member
        return work

    def all_gather(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup | None, op: int = -1) -> Works:
        """Everybody's share, one after the other, into `whole`; `own` may be a part of it."""
        self.sent[op] += whole.nbytes - own.nbytes
        self._gathers = self._gathers or Arrivals(1)
        return Watched(self._gathers.watch(Works(shares.gather(whole, own, group))), [whole, own])

    def reduce_scatter(
        self, flat: Tensor, sharers: int, group: dist.ProcessGroup | None, op: int = -1
    ) -> tuple[Works, Callable[[Tensor, bool], None]]:
        """Everybody's share of the sum: what goes on, and what puts (or adds) the share into its place once it is
        over."""
        works, mine, received = shares.scatter(flat, group)
        self.sent[op] += flat.nbytes - mine.nbytes
        return Works(works, [flat, received]), _total(mine, received)

    def barrier(self, group: dist.ProcessGroup | None) -> dist.Work:
        work = dist.barrier(group, async_op=True)
        assert work is not None
        return work


@dataclass
class Leaving:
    """A message that a thread copies to the host and posts, as soon as what it carries has been computed."""

    posted: Future[list[dist.Work]]
    keep: Sequence[Tensor]  # until it has arrived: the device's memory is read until it was copied

    def wait(self) -> None:
        for work in self.posted.result():
            work.wait()
        self.posted = Future()
        self.posted.set_result([])  # a handle is waited for once


class Staged(Gloo):
    """GPU tensors over gloo, through pinned host memory. Its sums can take them, and do the same inside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._staged: dict[str, Staging] = {}
        self._out: Line | None = None  # what is sent leaves in the order in which it is asked for

    def on_wire(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, op: int = -1) -> Pending:
        self.sent[op] += sum(tensor.nbytes for tensor in tensors)
        out = self._out = self._out or Line(self.device)
        posted, computed = Future[list[dist.Work]](), given(self.device)
        staged: list[Tensor] = []

        def leave() -> None:
            out.wait_for(computed)
            for tensor in tensors:
                staged.append(pinned(tensor))
                staged[-1].copy_(tensor, non_blocking=True)
            out.copied()
            works = [dist.isend(host, to, tag=self._tag(tag + i)) for i, host in enumerate(staged) if host.numel()]
            posted.set_result([w for w in works if w is not None])

        out.then(leave, posted, ends=False)  # the host goes on, and gives its device more to do
        return Leaving(posted, [*tensors, *staged])

    def receive(self, forms: Sequence[Form], source: int, tag: int) -> Message:
        pins = self.device.type == "cuda"
        host = [torch.empty(shape, dtype=dtype, pin_memory=pins) for shape, dtype in forms]
        works = [dist.irecv(t, source, tag=self._tag(tag + i)) for i, t in enumerate(host) if t.numel()]
        return Message(
            [w for w in works if w is not None], host, lambda: [t.to(self.device, non_blocking=True) for t in host]
        )

    def all_gather(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup | None, op: int = -1) -> Works:
        self.sent[op] += whole.nbytes - own.nbytes
        return Watched(self._staging("gather").gather(whole, own, group), [whole, own])

    def reduce_scatter(
        self, flat: Tensor, sharers: int, group: dist.ProcessGroup | None, op: int = -1
    ) -> tuple[Works, Callable[[Tensor, bool], None]]:
        over, mine, received = self._staging("scatter").scatter(flat, group)
        self.sent[op] += flat.nbytes - mine.nbytes
        return Watched(over, [flat, received]), _total(mine, received)

    def _staging(self, what: str) -> Staging:
        """Gathers do not stand in line behind scatters, nor the other way round."""
        if what not in self._staged:
            self._staged[what] = Staging(self.device)
        return self._staged[what]


def _total(mine: Tensor, received: Tensor) -> Callable[[Tensor, bool], None]:
    """What puts (or adds) a share of a sum into its place, once the others' parts of it have been `received`."""

    def total(own: Tensor, adds: bool) -> None:
        if adds:
            own += mine
        elif own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        for share in received:  # one by one: a sum of them would need memory of its own
            own += share

    return total


def _gathering(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Works:
    """Everybody's share, by the backend's own collective."""
    work = all_gather(whole, own, group=group, async_op=True)
    assert work is not None
    return Works([work], [whole])


class Nccl(Gloo):
    """GPU tensors over NCCL, which has no tags: messages are matched in the order of posting.

    Each direction between two ranks has a communicator of its own. On a common one, where everything happens in turn, a
    receive that is posted ahead would keep back the very message that the other rank needs before it can answer.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._links: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        self._channels: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def all_gather(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup | None, op: int = -1) -> Works:
        return _gathering(whole, own, group)

    def reduce_scatter(
        self, flat: Tensor, sharers: int, group: dist.ProcessGroup | None, op: int = -1
    ) -> tuple[Works, Callable[[Tensor, bool], None]]:
        received = flat.new_empty(flat.numel() // sharers)
        work = dist.reduce_scatter_tensor(received, flat, group=group, async_op=True)
        assert work is not None

        def total(own: Tensor, adds: bool) -> None:
            own.add_(received) if adds else own.copy_(received)

        return Works([work], [flat, received]), total

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        fresh = tuple(link for link in links if link not in self._links)
        self._links |= dict(zip(fresh, groups_of(fresh), strict=True))

    def channel(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        # Of their own: the thread that sums and the host's own collectives are in no order on one communicator.
        if members not in self._channels:
            (self._channels[members],) = groups_of((members,))
        return self._channels[members]

    def exchange(
        self, sends: Sequence[Part], receives: Sequence[Part], group: dist.ProcessGroup | None
    ) -> tuple[list[dist.Work], int]:
        messages = [dist.P2POp(dist.irecv, tensor, source, group=group) for tensor, source, _ in receives]
        messages += [dist.P2POp(dist.isend, tensor, to, group=group) for tensor, to, _ in sends]
        works = dist.batch_isend_irecv(messages) if messages else []
        return list(works), sum(tensor.nbytes for tensor, _, _ in sends)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, op: int = -1) -> Pending:
        whole, group = [tensor.contiguous() for tensor in tensors], self._links[dist.get_rank(), to]
        self.sent[op] += sum(tensor.nbytes for tensor in whole)
        works = [dist.isend(tensor, to, group=group) for tensor in whole if tensor.numel()]
        return Works([w for w in works if w is not None], whole)

    def receive(self, forms: Sequence[Form], source: int, tag: int) -> Message:
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]
        group = self._links[source, dist.get_rank()]
        works = [dist.irecv(tensor, source, group=group) for tensor in tensors if tensor.numel()]
        return Message([w for w in works if w is not None], tensors, lambda: tensors)


TRANSPORTS: dict[str, type[Gloo]] = {"gloo": Gloo, "gloo-staged": Staged, "nccl": Nccl}


def transport(name: str, device: torch.device) -> Gloo:
    """The transport of that name, for tensors on a device."""
    if name not in TRANSPORTS:
        raise InputError(f"transport {name!r}", "there is no such transport", nearest(name, TRANSPORTS))
    return TRANSPORTS[name](device)
