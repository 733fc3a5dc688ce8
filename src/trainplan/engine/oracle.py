"""The oracle: one process that runs the same pieces one after the other.

What every synchronous plan must equal: for each replica and each of its micro-batches in turn, forward and backward
with the loss weighted by its count, then one optimizer step. Random numbers are seeded by what is computed; running
statistics are those of the first copy of each stage.

`train_alone` runs the captured model, as the plan does: it shares the capture and the seeds with the runner, and
nothing else, so it finds what the runner does wrong and not what the capture does wrong. `train_eager` shares not even
those: it runs the user's own model, in one piece, and is what the capture is held against. It cannot follow a model
that draws random numbers, which are seeded block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainplan.engine.seeds import reseed
from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches, of_replicas
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.tensors import values_of
from trainplan.program.program import Ints
from trainplan.program.schedules import orders_of
from trainplan.workload.batch import split as split_batch
from trainplan.workload.modes import in_training
from trainplan.workload.workload import Batch, Workload


@dataclass
class Trained:
    """Where training arrived."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of every step, as the optimizer sees them
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # of the optimizer, by parameter
    agendas: list[Any] = field(default_factory=list)  # of recorded steps, where the exchange was decided while running


def train_alone(
    plan: Plan,
    workload: Workload,
    captured: Captured,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    seed: int,
) -> Trained:
    """Train in this process as the plan would, piece by piece."""
    stage = captured.stage(0, len(captured.blocks)).bind(values)

    def forward(piece: Batch, step: int, replica: int, micro: int) -> Any:
        def seeded(block: int) -> None:
            reseed(seed, step, replica, micro, block)

        return stage({}, piece, seeded)[1]

    trained = _train(plan, workload, captured, dict(stage.named_parameters()), forward, stage.buffers_kept, batches)
    trained.buffers = {name: b.detach().clone() for name, b in stage.named_buffers()}
    return trained


def train_eager(
    plan: Plan, workload: Workload, captured: Captured, model: nn.Module, batches: Sequence[Batch]
) -> Trained:
    """Train the user's own model in this process, on the same pieces; the capture only says which buffers are whose."""
    in_training(model)
    held = values_of(model)

    def forward(piece: Batch, step: int, replica: int, micro: int) -> Any:
        return model(*piece.args, **piece.kwargs)

    @contextmanager
    def buffers_kept(names: set[str]) -> Iterator[None]:
        saved = {name: value.detach().clone() for name, value in values_of(model).items() if name in names}
        yield
        now = values_of(model)  # forward may have replaced them
        with torch.no_grad():
            for name, value in saved.items():
                now[name].copy_(value)

    parameters = {name: value for name, value in held.items() if isinstance(value, nn.Parameter)}
    trained = _train(plan, workload, captured, parameters, forward, buffers_kept, batches)
    buffers = {use.name for use in captured.buffers}
    trained.buffers = {name: b.detach().clone() for name, b in values_of(model).items() if name in buffers}
    return trained


def _train(
    plan: Plan,
    workload: Workload,
    captured: Captured,
    held: Mapping[str, nn.Parameter],
    forward: Callable[[Batch, int, int, int], Any],  # piece, step, replica, micro-batch → the model's output
    buffers_kept: Callable[[set[str]], AbstractContextManager[None]],
    batches: Sequence[Batch],
) -> Trained:
    """The steps of a plan, piece by piece, with whatever computes the output."""
    parameters = {name: p for name, p in held.items() if p.requires_grad}
    optimizer = workload.optimizer(
        [(use.name, parameters[use.name]) for use in captured.parameters if use.name in parameters]
    )
    scheduler = workload.schedule(optimizer) if workload.schedule else None
    trained = Trained()
    lines = line_of(plan)
    for step, batch in enumerate(batches):
        total = float(workload.loss.count(batch))
        whole = 0.0
        parts = split_batch(batch, of_replicas(plan, batch.samples))
        for replica, (part, sizes) in enumerate(zip(parts, micro_batches(plan, batch.samples), strict=True)):
            for micro, piece in enumerate(split_batch(part, sizes)):
                with buffers_kept(_others(plan, replica, int(lines[micro]), captured)):
                    output = forward(piece, step, replica, micro)
                    loss = workload.loss.function(output, piece.targets) * (workload.loss.count(piece) / total)
                    loss.backward()  # inside: batch norm's backward wants its buffers as its forward left them
                whole += float(loss.detach())
        trained.losses.append(whole)
        if workload.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), workload.clip_norm)
        trained.gradients.append({n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    trained.weights = {name: p.detach().clone() for name, p in held.items()}
    trained.state = optimizer_state(optimizer, parameters)
    return trained


def line_of(plan: Plan) -> Ints:
    """The line that each micro-batch of a replica takes."""
    found = np.zeros(plan.micro, dtype=np.int64)
    for order in orders_of(plan):
        found[order[:, 3]] = order[:, 1]
    return found


def _others(plan: Plan, replica: int, line: int, captured: Captured) -> set[str]:
    """Buffers that a micro-batch leaves alone, since it runs through another copy of their stage than the first."""
    apart = [number for number in range(plan.depth) if plan.rank(replica, number, line) != plan.replicas_of(number)[0]]
    blocks = [block for number in apart for block in captured.blocks[slice(*plan.bounds[number])]]
    return {name for block in blocks for name in block.writes}


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by the name of the parameter that they belong to."""
    return {
        name: {key: v.detach().clone() for key, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        for name, p in parameters.items()
        if p in optimizer.state
    }
