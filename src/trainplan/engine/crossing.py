"""Steps that cross: gradients are still being summed while the next step begins.

When a step is over, its optimizer has not run yet. The next forward pass comes to one block after the other; before
each it waits for the gradients of that block alone, and takes the optimizer's step for the block's weights. Whoever
looks at the weights between two steps has all of them taken first (`Trainer.settle`).

The optimizer is one for the whole model; it takes a step for those weights that have gradients, so the others have none
at that moment. That is the same as one step for all, as long as it treats each tensor by itself: those of torch do, and
others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.engine.decided import Exchange
from trainplan.engine.telling import Telling
from trainplan.engine.world import groups_of
from trainplan.errors import PlanError
from trainplan.plan.optimizers import TENSOR_BY_TENSOR
from trainplan.plan.text import brief
from trainplan.program.agenda import Agendas
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.program.text import Key
from trainplan.workload.workload import Batch

if TYPE_CHECKING:
    from trainplan.engine.held import Held
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.recorder import Recorder
    from trainplan.engine.runner import Part, Runner


def check_optimizer(optimizer: torch.optim.Optimizer, exchange: str) -> None:
    """Refused unless it treats tensors one by one."""
    kind = type(optimizer)
    if kind not in {getattr(torch.optim, name) for name in TENSOR_BY_TENSOR}:
        why = (
            f"it updates weights block by block, while others are still being summed, and a {kind.__name__} may look "
            f"at several of them at once: only torch's {', '.join(TENSOR_BY_TENSOR)} are known not to"
        )
        raise PlanError(f"exchange={exchange} with {kind.__module__}.{kind.__name__}", why, "exchange=all-reduce")


def begin(layout: Layout, held: dict[int, Held], recorder: Recorder, rank: int) -> dict[int, Exchange]:
    """Where the order of exchanges is decided while running: that of every stage of a rank, each with process groups of
    its own; all ranks call this."""
    found: dict[int, Exchange] = {}
    if not layout.decides:
        return found
    if len(held) > 1 and not layout.backend.tagged:
        why = f"rank {rank} holds {len(held)} stages, and which of them is summed first may differ between replicas"
        raise PlanError(f"plan {brief(layout.plan)!r}", f"{why}: NCCL may wait for ever", "one stage a rank, or gloo")
    for stage in (stage for stage in layout.stages if layout.buckets[stage]):
        members = (tuple(sorted(layout.plan.replicas_of(stage))),)
        (bits,), (sums,) = groups_of(members, backend="gloo"), groups_of(members)
        if stage in held:
            found[stage] = _exchange(layout, held[stage], recorder, rank, bits, sums)
    return found


def _exchange(
    layout: Layout, held: Held, recorder: Recorder, rank: int, bits: dist.ProcessGroup | None,
    sums: dist.ProcessGroup | None,
) -> Exchange:  # fmt: skip
    """The exchange of a stage on this rank."""
    stage = held.number
    assert held.reducer is not None  # there are copies elsewhere, or there would be no buckets
    if layout.crosses:
        check_optimizer(held.optimizer, layout.plan.exchange)
        held.reducer.detach()
    (own,) = (h for h in layout.holdings if (h.stage, h.rank) == (stage, rank))

    def note(step: int, kind: Kind, unit: int, start: float, end: float, size: int) -> None:
        # Sums are of all; a cycle is this copy's.
        pipeline = own.replica * layout.plan.lines + own.lines[0] if kind is Kind.TICK else 0
        recorder.note(Key(kind, stage, unit=unit, pipeline=pipeline), start, end, size, step)

    decided = layout.decided[stage]
    members = sorted(layout.plan.replicas_of(stage))
    telling = Telling(bits, members, rank, decided.rule.bits_bytes // 8)
    return Exchange(decided.rule, decided.parts, held.reducer.flat, telling, sums, note)


def forward(
    run: Runner, place: int, leaves: dict[str, Tensor], batch: Batch, finish: Callable[[Instruction, Any, Any], None]
) -> int:  # fmt: skip
    """A forward pass; the first of a step goes block by block, and each takes the step that its weights lack before it
    runs. `finish` is given the last operation and what was made, and is part of it. How many operations that was."""
    op, recorder = run.list[place], run.recorder
    held = run.part.held[op.stage]
    pieces = [op]
    for following in run.list[place + 1 :]:
        same = (following.stage, following.micro, following.slice) == (op.stage, op.micro, op.slice)
        if following.kind is not Kind.F or not same:
            break
        pieces.append(following)
    since = recorder.mark()

    def before(block: int, _: Any) -> None:
        nonlocal since
        if block > held.stage.first and len(pieces) > 1:
            recorder.note(pieces[block - held.stage.first - 1].op, since, recorder.mark())
        if block in run.part.deferred:
            take(run.part, recorder, block)
            since = recorder.mark()
        elif len(pieces) > 1:
            since = recorder.mark()

    finish(pieces[-1], *held.stage(leaves, batch, run.seeder(op.micro), run.part_of(op), before))
    recorder.note(pieces[-1].op, since, recorder.mark())
    return len(pieces)


def put_off(run: Runner, op: Instruction) -> None:
    """The optimizer step of a block waits for the next forward pass of that block."""
    run.part.deferred[op.unit] = op.op, run.current.number


def take(part: Part, recorder: Recorder, block: int) -> None:
    """Take the step that was put off for a block, if there is one."""
    waiting = part.deferred.pop(block, None)
    if waiting is None:
        return
    op, step = waiting
    layout = part.layout
    stage = layout.stage_of[block]
    held, exchange = part.held[stage], part.exchanges[stage]
    assert held.reducer is not None  # steps cross only where gradients are exchanged
    exchange.wait(layout.awaited[stage][block])
    start = recorder.mark()
    own = [held.reducer.views[name] for name in layout.stepping[stage][block]]
    for parameter, view in own:
        parameter.grad = view
    held.optimizer.step()
    if held.scheduler is not None and layout.stepping[stage].keys().isdisjoint(part.deferred):
        held.scheduler.step()
    for parameter, view in own:
        parameter.grad = None
        view.zero_()
    recorder.note(op, start, recorder.mark(), step=step)


def settle(part: Part, recorder: Recorder) -> None:
    """Take all steps that were put off, and wait until the exchange is over."""
    if not part.exchanges:
        return
    for block in sorted(part.deferred):
        take(part, recorder, block)
    for exchange in part.exchanges.values():
        exchange.settle()
    recorder.settle()


def backward_begins(run: Runner, op: Instruction, last: bool) -> None:
    """A backward pass finds gradients to add to, and the one that completes them an exchange to tell what is ready."""
    held = run.part.held[op.stage]
    if run.part.layout.crosses and held.reducer is not None:
        held.reducer.attach()
    if last and op.stage in run.part.exchanges:
        run.part.exchanges[op.stage].open(run.current.number)


def backward_over(run: Runner, op: Instruction, last: bool) -> None:
    """The second part of a backward pass is over, or a block of one that is recomputed: of the pass that completes
    them, gradients are ready."""
    if last and op.stage in run.part.exchanges:
        for number, bucket in enumerate(run.part.layout.buckets[op.stage]):
            if op.kind is Kind.W or bucket.block == op.unit:
                run.part.exchanges[op.stage].ready(number)
        backward_ends(run, op.stage)


def backward_ends(run: Runner, stage: int) -> None:
    """The pass that completes the gradients of a stage is over: where steps cross, nobody has gradients until the step
    of its block."""
    reducer = run.part.held[stage].reducer
    if run.part.layout.crosses and reducer is not None:
        reducer.detach()


def wait(run: Runner, stages: Iterable[int]) -> None:
    """Until the gradients of these stages have been summed, where that is decided while running."""
    for stage in stages:
        if stage in run.part.exchanges:
            run.part.exchanges[stage].wait()


def by_the_exchange(run: Runner, op: Instruction, place: int) -> None:
    """Nothing: the thread that exchanges gradients does it, when it decides to, and notes it (`decided.py`)."""


def replay(part: Part, agendas: Sequence[Agendas]) -> None:
    """Follow agendas in the next steps."""
    if not part.layout.decides:
        why = f"exchange={part.layout.plan.exchange} leaves nothing to be decided"
        raise PlanError(f"plan {brief(part.layout.plan)!r}", why, "exchange=horovod")
    for stage, exchange in part.exchanges.items():
        exchange.replay([of_step[stage] for of_step in agendas])


def agendas_of(part: Part) -> tuple[Agendas, ...]:
    """What was decided in every step that was to be kept, of the stages of this rank."""
    steps = sorted({step for exchange in part.exchanges.values() for step in exchange.decided})
    return tuple({stage: exchange.decided[step] for stage, exchange in part.exchanges.items()} for step in steps)


def keep_agendas(part: Part, recorder: Recorder, on: bool) -> None:
    """From the next step on keep what is decided, or no longer."""
    settle(part, recorder)
    for exchange in part.exchanges.values():
        exchange.keeps = on


def close(part: Part, recorder: Recorder) -> None:
    """No step will come any more."""
    settle(part, recorder)
    for exchange in part.exchanges.values():
        exchange.close()
