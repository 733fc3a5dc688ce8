"""What a model would do, without doing it: its operators run on fake tensors, which have shapes and no memory.

The chain is walked forward and back, so autograd itself says which operators the backward pass consists of and what is
saved for it. Nothing is computed and no weights are in memory: a model of billions of parameters takes seconds.

Fake tensors pretend to be on the CPU. Where a GPU would run something else, `gpu` tells it (`on_gpu`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainplan.profile.attention import Gpu
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.loss import without_values
from trainplan.profile.capture.stage import Stage
from trainplan.profile.memory import Saved
from trainplan.profile.on_gpu import OnGpu
from trainplan.profile.op import Op
from trainplan.profile.operators import Followed, Recorder
from trainplan.profile.shares import share_of
from trainplan.profile.subject import first_used
from trainplan.profile.tape import Step, Tape
from trainplan.profile.traced import BlockTrace, Trace, UpdateTrace
from trainplan.profile.update import state_bytes
from trainplan.profile.walk import Walk
from trainplan.workload.batch import each_tensor, tensors
from trainplan.workload.optimizer import make
from trainplan.workload.workload import Workload


def trace(
    captured: Captured, workload: Workload, samples: int, gpu: Gpu | None = None, lower: torch.dtype | None = None
) -> Trace:
    """Walk the chain on fake tensors with a micro-batch of so many samples; `lower`: under autocast to that type.

    `gpu`: as that one would run it.
    """
    passes = [_Passes() for _ in captured.blocks]
    values = workload.inputs(samples, 0)  # made with values: the user's function may look at them (`.item()`, `tolist`)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        stage = _fake_stage(captured)
        batch = each_tensor(values, mode.from_tensor)
        recorder = Recorder(gpu is not None)
        saved = Saved([*stage.parameters(), *stage.buffers(), *tensors(batch).values()], recorder.bytes_of)
        loss = without_values(workload.loss, values.targets)
        walk = Walk(captured, batch, loss)
        tape, made = Tape(recorder), []
        with OnGpu(lower, replace(gpu, any_width=True)) if gpu else nullcontext(), recorder, tape:
            paused = []
            for index, block in enumerate(passes):
                tape.block = index
                recorder.begin()
                recorder.ops = block.forward
                with saved.block(index, lambda i=index: walk.graphs[i].made):  # type: ignore[misc]
                    walk.forward(stage, index)
                made.append({tape.seen(tensor).storage for tensor in walk.graphs[index].made.values()})
                paused.append(recorder.pause())
                walk.leave(index)
            traced: list[BlockTrace] = []
            for index in reversed(range(len(passes))):
                tape.block, tape.backward = index, True
                traced.append(_back(walk, stage, index, recorder, passes[index], paused.pop()))
        weights = {tape.seen(parameter).storage: name for name, parameter in stage.named_parameters()}
    found, cut = list[BlockTrace](), set[str]()
    for index, block_trace in enumerate(reversed(traced)):
        share, sliced = share_of(tape.of(index), weights, made[index], saved.each[index], samples)
        # Of the last block all is needed: its loss is read when it is run again.
        ends = index == len(passes) - 1
        tail = 0 if ends else _tail(tape.of(index), saved.all[index], passes[index].forward)
        found.append(replace(block_trace, saved_bytes=saved.inside[index], share=share, tail=tail))
        cut |= sliced
    by = {name: tuple(sorted(users)) for name, users in saved.by.items()}
    return Trace(samples, tuple(found), by, frozenset(cut), frozenset(recorder.unpriced))


def _tail(steps: Iterable[Step], saved: Container[int], forward: Sequence[Op]) -> int:
    """How many operators of a block's forward pass there are after the last one whose result is saved; none, if there
    is no product among them (`capture/tail.py`)."""
    wrote = (
        step.op
        for step in steps
        if not step.backward and step.op is not None and any(tensor.storage in saved for tensor in step.writes)
    )
    tail = forward[1 + max(wrote, default=-1) :]
    return len(tail) if any(op.flops for op in tail) else 0


@dataclass
class _Passes:
    """The operators of a block, while they are written down."""

    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)


def _back(walk: Walk, stage: Stage, index: int, recorder: Recorder, passes: _Passes, paused: Followed) -> BlockTrace:
    """The backward pass of a block: its operators, when gradients arrive, and what is alive meanwhile."""
    recorder.ops = passes.backward
    captured = walk.captured
    holds = captured.blocks[index].holds
    own = {name: p for name, p in stage.named_parameters() if name in holds and p.requires_grad}
    there = {name for name, parameter in own.items() if parameter.grad is not None}
    arrivals: dict[str, int] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrivals.update({name: len(passes.backward)}))
        for name, parameter in own.items()
    ]
    rest, back = paused.moment, recorder.resume(paused)
    walk.backward(index)
    recorder.mark()
    for handle in handles:
        handle.remove()
    reads = captured.blocks[index].reads
    return BlockTrace(
        forward=tuple(passes.forward),
        backward=tuple(passes.backward),
        arrivals=arrivals,
        lives=recorder.lives,
        rest=rest,
        back=back,
        flowing=sum(c.shape.bytes(walk.batch.samples) for c in captured.crossings if c.name in reads and c.needs_grad),
        gradients=tuple(p.nbytes for name, p in own.items() if p.grad is not None and name not in there),
    )


def _fake_stage(captured: Captured) -> Stage:
    """All blocks with fake tensors for values; to be called under a FakeTensorMode."""
    values: dict[str, Tensor] = {}
    for name, item in captured.exported.held.items():
        value = torch.empty(item.shape, dtype=item.dtype)
        values[name] = nn.Parameter(value, item.trainable) if item.kind == "parameter" else value
    return captured.stage(0, len(captured.blocks)).bind(values, "cpu")


# -- the optimizer ----------------------------------------------------------------------------------------------------


def trace_update(captured: Captured, workload: Workload, trained: Container[str], gpu: bool = False) -> UpdateTrace:
    """A step of the workload's optimizer on fake parameters; `trained` are those that get a gradient."""
    blocks: list[tuple[Op, ...]] = []
    counts, sizes, name = [], [], ""
    with FakeTensorMode(), torch.no_grad():
        whole = captured.stand_ins()
        for index in range(len(captured.blocks)):
            items = [captured.exported.held[name] for name in first_used(captured, index, trained)]
            ours = {item.name: nn.Parameter(torch.empty(item.shape, dtype=item.dtype)) for item in items}
            recorder, state = Recorder(gpu), 0
            if ours:
                for parameter in ours.values():
                    parameter.grad = torch.empty_like(parameter)
                optimizer, _ = make(workload.optimizer, whole, ours)
                optimizer.step()  # the first step makes the state
                with recorder:
                    optimizer.step()
                state, name = state_bytes(optimizer), type(optimizer).__name__.lower()
            counts.append(len(ours))
            blocks.append(tuple(recorder.ops))
            sizes.append(state)
    return UpdateTrace(tuple(blocks), tuple(counts), tuple(sizes), name)
