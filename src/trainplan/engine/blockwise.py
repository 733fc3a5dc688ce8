"""Forward and backward with recomputation, block by block.

The forward pass keeps no graph, only what each block reads. Backward goes from the last block to the first: run the
block again, now with a graph (R), then go back through it (B). So at any time there is the graph of one block.

Running a block again must not change anything: it draws the same random numbers, and buffers that it writes (running
statistics) are put back. And it need not compute what only its results need (`profile/capture/tail.py`).

Of a slice of the sequences the forward pass keeps keys and values too, which later slices read; those that R makes are
for the block's own graph (`profile/capture/sliced.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainplan.engine.parcels import keeping
from trainplan.engine.sharded import Pieces, between
from trainplan.profile.capture.sliced import carrying

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner
    from trainplan.profile.capture.stage import Stage


@dataclass
class Graph:
    """One block, run with a graph."""

    leaves: dict[str, Tensor]
    made: dict[str, Tensor]
    loss: Tensor | None
    buffers: list[tuple[Tensor, Tensor]]  # that it writes, and what they held before


@dataclass
class BlockwisePass:
    """A micro-batch (or a slice of one) on its way back."""

    env: dict[str, Tensor]  # crossings that blocks will read again, and constants that they share
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of crossings, as far as they have been summed
    graph: Graph | None = None


def forward(run: Runner, op: Instruction, pieces: Pieces | None = None) -> None:
    """All blocks without a graph, keeping what they read."""
    from trainplan.engine.handlers import arrived, hand_out

    state, stage = run.current, run.part.held[op.stage].stage
    batch = run.batch(op)
    seed = run.seeder(op.micro)
    env, carry = arrived(run, op), run.carry(op)
    going = keeping(run, op)
    due = between(run, op, pieces, going) if pieces is not None else None
    with torch.no_grad(), carrying(carry):
        for block in range(stage.first, stage.last):
            if due is not None:
                due(block, env)
            if stage.captured.blocks[block].random:
                seed(block)
            stage.run_block(block, env, batch, run.part_of(op))
    if carry is not None and op.slice == len(run.part.slices) - 1:
        carry.kept.clear()  # nobody reads those of the last one
    if going is not None:
        going.over(len(run.part.layout.sections[op.stage]) - 1, env)
    if pieces is not None:
        op = pieces.finish()
    hand_out(run, op, {name: env[name] for name in stage.makes})
    blocks = stage.captured.blocks[stage.first : stage.last]
    wanted = {name for block in blocks for name in (*block.reads, *block.constants)}
    state.passes[op.stage, run.piece(op)] = BlockwisePass({name: env[name] for name in wanted if name in env})


def recompute(run: Runner, op: Instruction) -> None:
    """One block again, with a graph."""
    from trainplan.engine.handlers import weighted_loss

    state, stage = run.current, run.part.held[op.stage].stage
    batch = run.batch(op)
    current: BlockwisePass = state.passes[op.stage, run.piece(op)]
    block = stage.captured.blocks[op.unit]
    needs = {c.name for c in stage.captured.crossings if c.needs_grad}
    leaves = {name: current.env[name].detach().requires_grad_(name in needs) for name in block.reads}
    env = {**leaves, **{name: current.env[name] for name in block.constants if name in current.env}}
    if block.random:
        run.seeder(op.micro)(op.unit)
    buffers = [(buffer, buffer.clone()) for buffer in map(stage.get_buffer, block.writes)]
    with torch.enable_grad(), carrying(run.carry(op)):
        ends = op.unit == len(stage.captured.blocks) - 1
        again = stage.run_block if ends else stage.run_again  # the loss reads what the last block makes
        again(op.unit, env, batch, run.part_of(op))
        loss = weighted_loss(run, op, stage.output(env)) if ends else None
    current.graph = Graph(leaves, {name: env[name] for name in block.makes}, loss, buffers)


def backward(run: Runner, op: Instruction) -> None:
    """Back through one block; the last one of the stage hands the gradients of what came in to the stages before."""
    from trainplan.engine.handlers import give_back, gradients_in

    state, stage = run.current, run.part.held[op.stage].stage
    current: BlockwisePass = state.passes[op.stage, run.piece(op)]
    graph = current.graph
    assert graph is not None  # R comes before B: the program's check says so
    if op.unit == stage.last - 1:
        for name, gradient in gradients_in(run, op).items():
            _add(current.gradients, name, gradient)
    roots: list[Tensor] = [] if graph.loss is None else [graph.loss]
    seeds: list[Tensor | None] = [None] * len(roots)
    for name, tensor in graph.made.items():
        if tensor.requires_grad and name in current.gradients:
            roots.append(tensor)
            seeds.append(current.gradients[name])
    carry = run.carry(op)
    if carry is not None:
        carried, gathered = carry.roots()
        roots, seeds = [*roots, *carried], [*seeds, *gathered]
    torch.autograd.backward(roots, seeds)
    if carry is not None:
        carry.gone_back()
    with torch.no_grad():  # only now: batch norm's backward wants its buffers as its forward left them
        for buffer, value in graph.buffers:
            buffer.copy_(value)
    for name in graph.made:
        current.gradients.pop(name, None)
    for name, leaf in graph.leaves.items():
        if leaf.grad is not None:
            _add(current.gradients, name, leaf.grad)
    current.graph = None
    for name in stage.captured.blocks[op.unit].reads:
        if name not in stage.reads and not _read_before(stage, name, op.unit):
            current.env.pop(name, None)
    if op.unit == stage.first:
        received = {name: current.env[name] for name in stage.reads}
        give_back(run, op, {name: current.gradients.get(name) for name in stage.reads}, received)
        del state.passes[op.stage, run.piece(op)]
        state.parcels.pop((op.stage, run.piece(op)), None)
        state.carries.pop((op.stage, run.piece(op)), None)


def _read_before(stage: Stage, name: str, block: int) -> bool:
    """Whether an earlier block of this stage reads a crossing too, and so will when it is run again."""
    return any(name in earlier.reads for earlier in stage.captured.blocks[stage.first : block])


def _add(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient
