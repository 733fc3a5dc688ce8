"""Gathering and scattering: handlers, and passes that come in pieces with these between them.

Collectives go on behind the host's back. What follows one (adding up what came, the sum over groups of replicas) is
done by a thread of its own, one thing after the other in the order of the list, so that nobody waits for it but whoever
reads it, and all ranks start their sums in the same order. Where only devices wait (NCCL) a second stream does the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainplan.engine.clocks import now
from trainplan.engine.pending import await_later, noted
from trainplan.engine.shards import Shards
from trainplan.engine.transport import Arrivals, Pending
from trainplan.program.ops import COPIES, SHARED_OUT, Kind

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.parcels import Keeping, Saving
    from trainplan.engine.runner import Runner


_BETWEEN = (*SHARED_OUT, *COPIES, Kind.REDUCE_GRAD)  # what may stand between two pieces of one pass


@dataclass
class Gathered:
    """The weights of a unit, as long as the program keeps them."""

    shards: Shards
    unit: int

    def release(self) -> None:
        self.shards.release(self.unit)


@dataclass
class _Task:
    """Something to be done behind the host's back."""

    work: Callable[[], None]

    def wait(self) -> None:
        self.work()


@dataclass
class _Done:
    """What a thread does; whoever needs it waits for it."""

    moment: Future[float]

    def wait(self) -> None:
        self.moment.result()


@dataclass
class _OnStream:
    """What a second stream does; the first one waits for it."""

    stream: torch.cuda.Stream

    def wait(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Chain:
    """Does one thing after the other, behind the host's back."""

    def __init__(self, device: torch.device, threaded: bool) -> None:
        self._thread = Arrivals(1) if threaded else None
        self._stream = None if threaded else torch.cuda.Stream(device)

    def then(self, work: Callable[[], None]) -> Pending:
        if self._thread is not None:
            return _Done(self._thread.watch(_Task(work)))
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        return _OnStream(self._stream)


# -- handlers ---------------------------------------------------------------------------------------------------------


def gather(run: Runner, op: Instruction, place: int) -> None:
    """Start gathering the weights of a unit; the first piece that reads them waits."""
    shards = _shards(run, op)
    start, flat = now(), shards.open(op.unit)
    works = run.part.transport.all_gather(flat, shards.own[op.unit], run.part.groups[op.group], op.op)
    await_later(run, op, noted(run, op, lambda: start, works, flat.nbytes))
    if shards.zero == 3:
        run.current.values[op.made[0]] = Gathered(shards, op.unit)


def scatter(run: Runner, op: Instruction, place: int) -> None:
    """Start the sum of the gradients of a unit, of which this rank gets its share."""
    shards, chain = _shards(run, op), run.part.chain
    assert chain is not None  # there is one where anything is shared out
    start, flat = now(), shards.to_scatter(op.unit)
    size, own = flat.nbytes, shards.own_gradient(op.unit)
    sharers, group = shards.units[op.unit].sharers, run.part.groups[op.group]
    works, total = run.part.transport.reduce_scatter(flat, sharers, group, op.op)

    def finish() -> None:
        works.wait()
        total(own, shards.zero > 1)
        run.recorder.note(op.op, start, now(), size)

    pending = chain.then(finish)
    if op.waits:
        pending.wait()
    await_later(run, op, pending)


def across(run: Runner, op: Instruction) -> None:
    """Start the sum of this rank's share over the groups of replicas, once the share itself has been summed."""
    own, chain = _shards(run, op).own_gradient(op.unit), run.part.chain
    assert chain is not None
    group = run.part.groups[op.group]

    def finish() -> None:
        start = now()
        run.part.transport.all_reduce(own, group).wait()
        run.recorder.note(op.op, start, now(), own.nbytes)

    pending = chain.then(finish)
    if op.waits:
        pending.wait()
    await_later(run, op, pending)


def _shards(run: Runner, op: Instruction) -> Shards:
    shards = run.part.held[op.stage].shards
    if shards is None:
        raise AssertionError("a unit that is not shared out: the program and the engine disagree")
    return shards


# -- passes in pieces -------------------------------------------------------------------------------------------------


class Pieces:
    """A pass that torch runs in one call and the program in pieces, with gathers and scatters between them."""

    def __init__(self, run: Runner, place: int) -> None:
        self.run, self.at = run, place
        first = run.list[place]
        self.kind, last = first.kind, place
        for number in range(place + 1, len(run.list)):
            other = run.list[number]
            if other.kind is self.kind and (other.stage, run.piece(other)) == (first.stage, run.piece(first)):
                last = number
            elif other.kind not in _BETWEEN:
                break
        self.last, self.taken = last, last - place + 1
        self._since = run.recorder.mark()

    def reach(self, unit: int) -> None:
        """The piece with this number begins: all before it are over, and what stands between them is due."""
        while self.at < self.last and self.run.list[self.at].unit < unit:
            self._next()

    def finish(self) -> Instruction:
        """The call is over; its last piece."""
        while self.at < self.last:
            self._next()
        if self.taken > 1:
            self._over()
        return self.run.list[self.last]

    def _next(self) -> None:
        self._over()
        self.at += 1
        while self.run.list[self.at].kind is not self.kind:
            self.run.do(self.at)
            self.at += 1
        self.run.wait_for(self.run.list[self.at])
        self._since = self.run.recorder.mark()

    def _over(self) -> None:
        done = self.run.list[self.at]
        self.run.recorder.note(done.op, self._since, self.run.recorder.mark())
        self.run.free(done, self.run.current)


def between(
    run: Runner, op: Instruction, pieces: Pieces | None, leaving: Saving | Keeping | None = None
) -> Callable[[int, dict[str, Any]], None] | None:
    """What a forward pass does before each of its blocks; None: nothing.

    Where one of its pieces begins, the next operations of the list are due; and what the piece before it has made gets
    a hook that says when backward comes there. What that has saved is then complete, where it is to go away.
    """
    cut, blocks = run.part.layout.sections[op.stage], run.part.held[op.stage].stage.captured.blocks
    if len(cut) < 2:
        return None
    starts = {first: number for number, (first, _) in enumerate(cut)}

    def before(block: int, env: dict[str, Any]) -> None:
        number = starts.get(block, 0)
        if not number:
            return
        for maker in range(*cut[number - 1]):
            for name in blocks[maker].makes:
                made = env.get(name)
                if isinstance(made, Tensor) and made.requires_grad:
                    made.register_hook(lambda _, piece=number - 1: run.came_back_to(piece))
        if leaving is not None:
            leaving.over(number - 1, env)
        if pieces is not None:
            pieces.reach(number)

    return before
