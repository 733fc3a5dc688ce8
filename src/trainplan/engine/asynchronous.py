"""An asynchronous parameter server: it takes whole pushes as they arrive, and gives weights to whoever may go on.

A thread for each worker waits for what that worker sends, since gloo can only wait and not tell what has come. The
server itself takes one push after the other, applies it, and asks the rule (`program/staleness.py`, the same that the
clock plays) who is released by it. A push counts only when all of it has arrived: of a worker that dies while it sends,
nothing is applied; of what was applied before, nothing is lost. A worker that is gone keeps nobody waiting.

What happened is kept, push by push (`Applied`): a server that is given such a record does the same again, whoever
comes first this time, and so does one process alone (`replay.py`). The moments are those that the rule was told, and
workers that left are in it too, so what was released can be worked out again. A worker that was lost then is left to
itself at the same place, also if it is there this time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from trainplan import files
from trainplan.engine.clocks import now
from trainplan.engine.runner import Runner, served_tag
from trainplan.engine.serving import joined
from trainplan.engine.transport import Pending
from trainplan.engine.world import TIMEOUT
from trainplan.errors import RunError
from trainplan.program.lower.service import Load
from trainplan.program.ops import Kind
from trainplan.program.staleness import State, bound_of

GOODBYE = -1  # the number of a push that is none: its worker has done all its steps
LOST = -2  # ... or it was lost
_LEAVING = 10.0  # seconds for threads to end when all workers have said goodbye


@dataclass(frozen=True)
class Applied:
    """One entry of a server's record: a push that was applied (or a worker that left), and who was released."""

    worker: int  # -1: a worker left, and nothing was applied
    number: int  # of the push, among its worker's; GOODBYE or LOST
    moment: float  # seconds: when all of it had arrived
    staleness: int  # updates that the weights behind the push lacked
    released: tuple[int, ...]
    left: int = -1  # the worker that left

    @property
    def whose(self) -> int:
        """The worker that pushed, or left."""
        return self.worker if self.worker >= 0 else self.left


@dataclass(frozen=True)
class _Arrived:
    """A whole push, or that nothing more will come from a worker."""

    worker: int
    number: int  # GOODBYE: it is done
    gradients: dict[int, Tensor]  # by unit
    moment: float = 0.0
    lost: str = ""  # why


class Server:
    """Serves the workers of a plan."""

    def __init__(self, runner: Runner, record: Sequence[Applied] = ()) -> None:
        part = runner.part
        assert part.shard is not None
        assert part.layout.service is not None
        self.shard, self.layout, self.transport = part.shard, part.layout, part.transport
        self.plan, self.rank, self.device = part.layout.plan, runner.rank, part.device
        self.workers = self.plan.dp
        self.bound = bound_of(self.plan.exchange, self.plan.bound)
        self.state = State(self.workers)
        self.applied: list[Applied] = []
        self.version = 0
        self.rows: list[tuple[int, int, float, float, int]] = []  # as a recorder has them
        self.arrivals: list[tuple[int, int, float]] = []
        self._again = list(record)  # what is to be done again
        self._parked: dict[int, _Arrived] = {}
        self._pulled = [0] * self.workers  # the version that each worker has
        self._leaving: set[int] = set()
        self._sent: list[list[Pending]] = [[] for _ in range(self.workers)]
        # Workers that were lost when the record was made, and are here now; and those that were given up.
        self._alone: set[int] = set()
        self._heard = [now()] * self.workers  # when something came from each, or was given to it; inf: it waits for us
        self._queue: SimpleQueue[_Arrived] = SimpleQueue()
        self._ops = {(i.kind, i.unit, i.peer): i for i in runner.list}
        self._threads = [
            threading.Thread(target=self._listen, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    # -- what comes in ----------------------------------------------------------------------------------------------

    def _listen(self, worker: int) -> None:
        """Take the pushes of a worker, one after the other, until it says goodbye or is gone."""
        first = self.shard.loads[0]
        try:
            while True:
                number = int(self._take([((1,), torch.int64)], worker, first, 0)[0])
                if number == GOODBYE:
                    self._queue.put(_Arrived(worker, GOODBYE, {}))
                    return
                gradients: dict[int, Tensor] = {}
                for load in self.shard.loads:
                    start = now()
                    tensors = self._take(self.shard.forms(load), worker, load, int(load.numbered))
                    self._heard[worker] = now()
                    gradients[load.unit] = joined(tensors)
                    op = self._ops[Kind.RECV_G, load.unit, worker]
                    self.arrivals.append((number, op.sent_by, now()))
                    self.rows.append((number, op.op, max(start, now()), now(), load.pushed_bytes))
                self._queue.put(_Arrived(worker, number, gradients, now()))
        except RuntimeError as error:  # the connection is closed, or nothing has come for so long
            self._queue.put(_Arrived(worker, GOODBYE, {}, lost=str(error).splitlines()[0]))

    def _take(
        self, forms: list[tuple[tuple[int, ...], torch.dtype]], worker: int, load: Load, skip: int
    ) -> list[Tensor]:
        message = self.transport.receive(forms, worker, served_tag(self.layout, load.unit, True) + skip)
        message.wait()
        return message.take()

    # -- what is done with it ---------------------------------------------------------------------------------------

    def serve(self, until: int) -> None:
        """Serve until every worker that is still there has pushed so often, or said goodbye."""
        self._heard = [max(heard, now()) for heard in self._heard]  # between steps all may have done something else
        while any(
            self.state.alive[w] and w not in self._leaving and self.state.clock[w] < until for w in range(self.workers)
        ):
            arrived = self._next()
            if arrived.number == GOODBYE:
                self._leave(arrived)
            else:
                self._apply(arrived)

    def _next(self) -> _Arrived:
        """What arrives next; or, where a record says whose turn it is, what that worker has pushed, or that it left."""
        while True:
            then = self._again[len(self.applied)] if len(self.applied) < len(self._again) else None
            turn = then.whose if then else None
            if then is not None and then.number == LOST:
                self._alone.add(then.left)
                self._parked.pop(then.left, None)
                return _Arrived(then.left, GOODBYE, {}, lost="as it was when the record was made")
            if turn in self._parked:
                return self._as_then(then, self._parked.pop(turn))
            if turn is None and self._parked:
                return self._parked.pop(next(iter(self._parked)))
            arrived = self._come()
            if turn is None or arrived.worker == turn:
                return self._as_then(then, arrived)
            self._parked[arrived.worker] = arrived

    def _come(self) -> _Arrived:
        """What comes next; or that of some worker, whose turn it is, nothing has come for too long. The transport must
        not say so: gloo closes all connections of a rank when one wait is over time."""
        patience = TIMEOUT.total_seconds()
        while True:
            silent = self._leaving | self._alone | self._parked.keys()
            owing = [w for w, heard in enumerate(self._heard) if w not in silent and heard < inf]
            if not owing:
                why = "it has a push there of a worker from which nothing more will come"
                raise RunError("repeating what servers recorded", why, "the record of a run with as many steps")
            first = min(owing, key=lambda worker: self._heard[worker])
            try:
                arrived = self._queue.get(timeout=max(self._heard[first] + patience - now(), 0.0))
            except Empty:
                if self._heard[first] + patience > now():
                    continue  # a part of a push has come
                self._alone.add(first)
                return _Arrived(first, GOODBYE, {}, lost=f"nothing has come from it for {patience:g} s")
            if arrived.worker not in self._alone:
                return arrived

    def _as_then(self, then: Applied | None, arrived: _Arrived) -> _Arrived:
        """What has arrived, if it is what a record has at this place."""
        if then is None or (then.number == arrived.number and not arrived.lost):
            return arrived
        what = f"worker {arrived.worker} left" if arrived.number == GOODBYE else f"push {arrived.number} came"
        had = "that it left" if then.number == GOODBYE else f"its push {then.number}"
        why = f"{what}{f' ({arrived.lost})' if arrived.lost else ''}, and the record has {had} there"
        raise RunError("repeating what servers recorded", why, "the record of a run with as many steps")

    def _apply(self, push: _Arrived) -> None:
        start = now()
        self.version += 1
        # The learning rate changes when as many pushes as there are workers have been applied: once a step.
        self.shard.step(push.gradients, last=self.version % self.workers == 0)
        self._heard[push.worker] = inf
        op = self._ops[Kind.STEP, push.worker, -1]
        self.rows.append((push.number, op.op, start, now(), 0))
        stale = self.version - 1 - self._pulled[push.worker]
        released = self.state.push(push.worker, push.moment, self.bound)
        self._note(Applied(push.worker, push.number, push.moment, stale, tuple(released)))

    def _leave(self, goodbye: _Arrived) -> None:
        """A worker is done, or was lost: in either case nobody waits for it any longer."""
        self._leaving.add(goodbye.worker)
        if goodbye.lost:
            print(f"worker {goodbye.worker} is gone after {self.state.clock[goodbye.worker]} pushes: {goodbye.lost}")
        released = self.state.lose(goodbye.worker, self.bound)
        self._note(Applied(-1, LOST if goodbye.lost else GOODBYE, now(), 0, tuple(released), goodbye.worker))

    def _note(self, entry: Applied) -> None:
        place = len(self.applied)
        if place < len(self._again):  # as it was then
            entry = replace(entry, released=self._again[place].released)
        self.applied.append(entry)
        for worker in entry.released:
            self._give(worker)

    def _give(self, worker: int) -> None:
        """Send a worker the weights as they are now: copies, since the next push changes them."""
        self._pulled[worker], self._heard[worker] = self.version, now()
        try:
            for pending in self._sent[worker]:
                pending.wait()  # it has pushed since, so it has them
            self._sent[worker] = []
            for load in self.shard.loads:
                start, op = now(), self._ops[Kind.SEND_W, load.unit, worker]
                copies = [tensor.clone() for tensor in self.shard.tensors(load)]
                tag = served_tag(self.layout, load.unit, False)
                self._sent[worker].append(self.transport.send(copies, worker, tag, op.op))
                number = int(self.state.clock[worker]) - 1
                self.rows.append((number, op.op, start, now(), sum(copy.nbytes for copy in copies)))
        except RuntimeError:
            return  # it is gone; whoever listens to it says so

    def close(self) -> None:
        """Leave when all workers have said goodbye, or are gone."""
        for worker, thread in enumerate(self._threads):
            if worker not in self._alone:
                thread.join(_LEAVING)

    def save(self, path: Path) -> None:
        """Write what happened, for `load`."""
        files.write(path, "arrivals", [files.to_json(entry) for entry in self.applied])


def load(path: str | Path) -> list[Applied]:
    """The record that a server has left."""
    return [files.from_json(Applied, row) for row in files.read(path, "arrivals")]


def histogram(record: Sequence[Applied]) -> dict[int, int]:
    """How many pushes lacked how many updates.

    >>> histogram([Applied(0, 0, 0.0, 0, (0,)), Applied(1, 0, 0.1, 1, (1,)), Applied(0, 1, 0.2, 1, (0,))])
    {0: 1, 1: 2}
    """
    found: dict[int, int] = {}
    for entry in record:
        if entry.worker >= 0:
            found[entry.staleness] = found.get(entry.staleness, 0) + 1
    return dict(sorted(found.items()))


def say_goodbye(runner: Runner) -> None:
    """Tell every server that nothing more will come from this worker."""
    service = runner.part.layout.service
    assert service is not None
    for load in (load for load in service.loads if load.numbered):
        number = torch.tensor([GOODBYE], device=runner.part.device)
        tag = served_tag(runner.part.layout, load.unit, True)
        runner.part.transport.send([number], service.rank(load.server), tag).wait()
