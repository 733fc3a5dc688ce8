"""Collectives that go on after their handlers have returned: started, waited for by whoever reads them, and noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainplan.engine.clocks import now
from trainplan.engine.exchanges import Sum
from trainplan.engine.transport import Pending, Works
from trainplan.program.exchanges import BY_ROUNDS, rounds_of

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner


def await_later(run: Runner, op: Instruction, pending: Pending) -> None:
    """Whoever reads what an operation makes waits for it first."""
    run.current.pending |= dict.fromkeys(op.made, pending)


def send_now(run: Runner, op: Instruction, tensors: list[Tensor]) -> None:
    """Send what an operation is to send; where it does not wait for that, the step does, at its end."""
    start = run.recorder.mark()  # a GPU's message begins when what it carries has been computed
    pending = run.part.transport.send(tensors, op.peer, run.tag(op), op.op)
    if op.waits:
        pending.wait()
    else:
        run.current.sent.append(pending)
    run.recorder.note(op.op, start, run.recorder.mark(), sum(tensor.nbytes for tensor in tensors))


def exchange(run: Runner, op: Instruction, tensor: Tensor) -> Noted:
    """Start a sum over a group, by whoever makes it, and note when it is over."""
    c = run.program.classes[run.program.cost[op.op]]
    if c.by in BY_ROUNDS:
        rounds = rounds_of(c.by, c.members, tensor.numel(), c.node)
        summing = run.part.sums[op.group].start(tensor, rounds, op.op)
        return noted(run, op, lambda: summing.begun, summing, tensor.nbytes)
    start = now()
    work = run.part.transport.all_reduce(tensor, run.part.groups[op.group])
    return noted(run, op, lambda: start, Works([work], [tensor]), tensor.nbytes)


def noted(run: Runner, op: Instruction, start: Callable[[], float], works: Works | Sum, size: int = 0) -> Noted:
    """Something that goes on, whose end will be noted; `start` says when it began, once it is over."""
    noted = Noted(works, lambda end: run.recorder.note(op.op, start(), end, size))
    if op.waits:
        noted.wait()
    return noted


class Noted:
    """A pending operation whose end is noted: when torch says so, or at the latest when somebody has waited."""

    def __init__(self, works: Works | Sum, note: Callable[[float], None]) -> None:
        self._works, self._note = works, note
        self._end: float | None = None
        self._waited = False
        self._lock = Lock()  # whoever has waited and whoever was told may come at once
        works.when_done(self._stamp)

    def _stamp(self) -> None:
        with self._lock:
            if self._end is None:
                self._end = now()
                self._note(self._end)

    def wait(self) -> None:
        if not self._waited:  # several stages of a rank may read what it makes
            self._works.wait()
            self._waited = True
        self._stamp()


@dataclass
class Returning:
    """A sum of gradients that lay apart: it takes their place in every copy of the weights once it is there."""

    sum: Noted
    flat: Tensor
    copies: list[list[nn.Parameter]]
    done: bool = False

    def wait(self) -> None:
        self.sum.wait()
        if self.done:
            return
        self.done = True
        for number, members in enumerate(self.copies):
            whole = self.flat.clone() if number else self.flat  # whoever clips scales gradients in place
            for p, piece in zip(members, whole.split([p.numel() for p in members]), strict=True):
                p.grad = piece.view_as(p)
