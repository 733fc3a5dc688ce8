"""What LOAD, SEND_INPUT and RECV_INPUT do."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainplan.engine.clocks import now
from trainplan.engine.copies import Copy, Span
from trainplan.engine.pending import await_later, send_now
from trainplan.errors import RunError
from trainplan.plan.rules import of_replicas
from trainplan.workload.batch import split as split_batch
from trainplan.workload.batch import tensors
from trainplan.workload.workload import Batch

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner, StepState


@dataclass
class Loaded:
    """What a stage reads of a batch, on its device, until the program frees it."""

    parts: list[Batch]  # micro-batches
    whole: Batch | None  # of which they are a part
    state: StepState
    stage: int

    def release(self) -> None:
        """Nobody reads it any more."""
        del self.state.loaded[self.stage]


def load(run: Runner, op: Instruction, place: int) -> None:
    """Copy what a stage reads: at once; or behind the host's back, mostly since the step before."""
    fed = run.current.fed
    assert fed is not None  # what is loaded is loaded for a step
    if op.waits:
        copy = fed.copies.pop(op.stage)()
        if run.part.device.type == "cuda":
            torch.cuda.current_stream(run.part.device).synchronize()
        _put(run, op, copy.parts, copy.whole)
        run.recorder.note(op.op, copy.span.begun, now(), copy.span.bytes)
        return
    coming = fed.ahead.pop(op.stage, None)
    if coming is None:
        coming = run.part.inputs.start(fed.copies.pop(op.stage))
    await_later(run, op, Coming(run, op, coming))


def _put(run: Runner, op: Instruction, parts: list[Batch], whole: Batch | None) -> None:
    loaded = Loaded(parts, whole, run.current, op.stage)
    run.current.loaded[op.stage] = run.current.values[op.made[0]] = loaded


@dataclass
class Coming:
    """A copy that is on its way, until the first pass reads it."""

    run: Runner
    op: Instruction
    future: Future[Copy]

    def wait(self) -> None:
        try:
            copy = self.future.result()
        except RuntimeError as error:
            at, why = self.run.program.name(self.op.op), str(error).splitlines()[0]
            raise RunError(f"rank {self.run.rank} at {at}", f"copying its inputs failed: {why}") from error
        copy.join()
        _put(self.run, self.op, copy.parts, copy.whole)
        self.run.current.sent.append(Noting(self.run, self.op, copy.span))


@dataclass
class Noting:
    """A copy that is noted at the end of its step: by then it is known when it was over."""

    run: Runner
    op: Instruction
    span: Span

    def wait(self) -> None:
        self.run.recorder.note(self.op.op, *self.span.seconds(), self.span.bytes)


def scatter(run: Runner, op: Instruction, place: int) -> None:
    """Send a worker its part of the batch that was loaded here."""
    whole = run.current.loaded[op.stage].whole
    assert whole is not None  # the root loads all of it
    plan = run.part.layout.plan
    replica = next(r for r in range(plan.dp) if plan.rank(r, op.stage) == op.peer)
    there = tensors(split_batch(whole, of_replicas(plan, whole.samples))[replica])
    send_now(run, op, [there[name] for name in run.part.inputs.scattered()])


def take(run: Runner, op: Instruction, arrived: list[Tensor]) -> None:
    """Train on what the root has sent."""
    state = run.current
    assert state.fed is not None
    parts, state.weights = run.part.inputs.received(arrived, state.fed.total)
    _put(run, op, parts, None)
