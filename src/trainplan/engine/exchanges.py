"""Sums over a group of ranks in rounds (`program/exchanges`), on messages from rank to rank.

Every group has a thread for its sums, so that backward goes on meanwhile; they are made one after the other, in the
order in which they were asked for, which is the same on all ranks. A round is posted whole, receives first, and waited
for whole: what is sent stays as it is until then. What is to be added is received beside the bucket, and added in the
order of the members, so that all get the same sum to the last bit; what is to stay is received where it belongs.

On a GPU the thread has a stream of its own, which begins when what was asked for is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.engine.clocks import now
from trainplan.engine.transport import Gloo, Works
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.exchanges.rounds import Round, Rounds, Transfer
from trainplan.program.program import Program

_TAGS = 2**30  # then they begin again


@dataclass
class Sum:
    """A sum that was asked for."""

    tensor: Tensor
    rounds: Rounds
    op: int  # of the program, for the account of bytes
    computed: torch.cuda.Event | None = None  # the device has come to the point where it was asked for
    begun: float = 0.0  # when the thread came to it
    over: Future[float] = field(default_factory=Future)  # when it ended

    def wait(self) -> None:
        self.over.result()

    def when_done(self, call: Callable[[], None]) -> None:
        self.over.add_done_callback(lambda _: call())


class Sums:
    """The sums of one group, one after the other."""

    def __init__(self, transport: Gloo, channel: dist.ProcessGroup | None, members: Sequence[int], rank: int) -> None:
        self._transport, self._channel, self._members = transport, channel, tuple(members)
        self._place = self._members.index(rank)
        self._tag = 0
        self._room = torch.empty(0)  # of the host, kept: the system empties every page of memory that it gives anew
        self._asked: SimpleQueue[Sum | None] = SimpleQueue()
        cuda = transport.device.type == "cuda"
        self._stream = torch.cuda.Stream(transport.device) if cuda else None
        threading.Thread(target=self._work, name="sums", daemon=True).start()

    def start(self, tensor: Tensor, rounds: Rounds, op: int) -> Sum:
        """Sum a flat tensor over the group, in place."""
        asked = Sum(tensor, rounds, op)
        if self._stream is not None:
            asked.computed = torch.cuda.Event()
            asked.computed.record(torch.cuda.current_stream(self._transport.device))
        self._asked.put(asked)
        return asked

    def close(self) -> None:
        """No more sums."""
        self._asked.put(None)

    def _work(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext(), torch.no_grad():
            while (asked := self._asked.get()) is not None:
                asked.begun = now()
                try:
                    self._sum(asked)
                    asked.over.set_result(now())
                except BaseException as error:  # whoever waits for the sum raises it
                    asked.over.set_exception(error)

    def _sum(self, asked: Sum) -> None:
        if self._stream is not None and asked.computed is not None:
            self._stream.wait_event(asked.computed)
        flat = self._transport.on_wire(asked.tensor)
        for one in asked.rounds:
            self._round(flat, one, asked.op)
        if flat is not asked.tensor:
            asked.tensor.copy_(flat, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _round(self, flat: Tensor, one: Round, op: int) -> None:
        """The transfers of a round that this rank has a part in. Each has a tag of its own, by its place in the round:
        all members count alike."""
        place, members = self._place, self._members
        sends, receives, arriving = [], [], list[tuple[int, Transfer, Tensor]]()
        beside = self._beside(flat, one)
        for number, t in enumerate(one):
            tag = (self._tag + number) % _TAGS
            part = flat[t.first : t.last]
            if t.source == place:
                sends.append((part, members[t.target], tag))
            elif t.target == place:
                into = next(beside) if t.adds else part
                receives.append((into, members[t.source], tag))
                if t.adds:
                    arriving.append((t.source, t, into))
        self._tag += len(one)
        works, sent = self._transport.exchange(sends, receives, self._channel)
        self._transport.sent[op] += sent
        Works(works).wait()
        _add(flat, arriving, place)

    def _beside(self, flat: Tensor, one: Round) -> Iterator[Tensor]:
        """Where to receive what is to be added in a round: one part after the other."""
        parts = [t.last - t.first for t in one if t.target == self._place and t.adds]
        if flat.device.type != "cpu":  # torch keeps a device's memory
            return (flat.new_empty(part) for part in parts)
        if self._room.dtype != flat.dtype or len(self._room) < sum(parts):
            self._room = flat.new_empty(sum(parts))
        return iter(self._room[: sum(parts)].split(parts))


def sums_of(
    program: Program, rank: int, transport: Gloo, groups: Mapping[tuple[int, ...], dist.ProcessGroup | None],
    known: dict[tuple[int, ...], Sums],
) -> dict[int, Sums]:  # fmt: skip
    """By group of a program, the sums that are made in rounds, where this rank takes part. All ranks call this; what
    is `known` already is used again."""
    in_rounds = np.array([c.by in BY_ROUNDS for c in program.classes])[program.cost]
    found = {}
    for number in np.unique(program.group[in_rounds]).tolist():
        members = program.groups[number]
        channel = transport.channel(members, groups[members])
        if rank in members:
            if members not in known:
                known[members] = Sums(transport, channel, members, rank)
            found[number] = known[members]
    return found


def _add(flat: Tensor, arriving: list[tuple[int, Transfer, Tensor]], place: int) -> None:
    """Add what arrived to what is there, in the order of the members; the own at its own place.

    >>> own = torch.tensor([1.0, 2.0, 3.0])
    >>> _add(own, [(1, Transfer(1, 2, 0, 2, True), torch.tensor([10.0, 20.0]))], place=2)
    >>> own.tolist()
    [11.0, 22.0, 3.0]
    """
    by_part: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for source, t, tensor in arriving:
        by_part.setdefault((t.first, t.last), []).append((source, tensor))
    for (first, last), parts in by_part.items():
        own = flat[first:last]
        parts.sort(key=lambda part: part[0])
        before, after = ([tensor for source, tensor in parts if (source > place) == late] for late in (False, True))
        if len(before) > 1:  # a + b is b + a, but (a + b) + c is not a + (b + c)
            total = before[0]
            for tensor in before[1:]:
                total += tensor
            own.copy_(total.add_(own))
        else:
            for tensor in before:
                own += tensor
        for tensor in after:
            own += tensor
