"""Evaluation under a plan: replica 0 runs its stages forward, captured in evaluation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trainplan.engine.runner import Runner
from trainplan.errors import RunError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.stage import Stage
from trainplan.program.ops import Kind
from trainplan.workload.batch import to_device
from trainplan.workload.workload import Batch

if TYPE_CHECKING:
    from trainplan.engine.trainer import Trainer

_TAG = 2**20  # beyond the tags of training


def evaluate(trainer: Trainer, runner: Runner, batch: Batch, known: dict[int, Stage]) -> float | None:
    """The loss of a batch, where this rank has the last stage. `known`: stages that were captured before."""
    own = to_device(batch, trainer.device)
    loss = None
    made: dict[str, Tensor] = {}  # by stages of this rank
    sent = []
    talk = trainer.part.transport
    for number in trainer.stages:
        if trainer.plan.rank(0, number) != trainer.rank:
            continue  # a copy for another direction
        crossings = dict(made)
        for edge in trainer.part.layout.incoming[number]:
            if trainer.part.layout.is_message(edge, 0):
                names = runner.edge_names(Kind.SEND_F, edge.source, edge.target)
                forms = [(runner.shapes[n].at(batch.samples), runner.shapes[n].dtype) for n in names]
                tag = _TAG + number
                message = talk.receive(forms, trainer.plan.rank(0, edge.source), tag)
                message.wait()
                crossings.update(zip(names, message.take(), strict=True))
        result, output = _stage(trainer, number, known)(crossings, own)
        made |= result
        for edge in trainer.part.layout.outgoing[number]:
            if trainer.part.layout.is_message(edge, 0):
                names = runner.edge_names(Kind.SEND_F, edge.source, edge.target)
                to = trainer.plan.rank(0, edge.target)
                sent.append(talk.send([result[n] for n in names], to, _TAG + edge.target))
        if trainer.part.held[number].is_last:
            loss = float(trainer.workload.loss.function(output, own.targets))
    for pending in sent:
        pending.wait()
    return loss


def _stage(trainer: Trainer, number: int, known: dict[int, Stage]) -> Stage:
    """The same blocks captured in evaluation mode, sharing this rank's values."""
    if not known:
        model = Skeleton(trainer.workload.build).model.eval()
        captured = capture(
            model, trainer.workload.inputs(2, 0), trainer.workload.loss, device=trainer.captured.exported.device
        )
        names, ours = [b.name for b in captured.blocks], [b.name for b in trainer.captured.blocks]
        crossings = [(c.producer, c.consumers, c.shape) for c in captured.crossings]
        if names != ours or crossings != [(c.producer, c.consumers, c.shape) for c in trainer.captured.crossings]:
            raise RunError(
                "evaluation under this plan",
                "the model has other blocks, or passes other tensors between them, in evaluation mode",
                "evaluating a checkpoint in one process",
            )
        known |= {n: captured.stage(*trainer.plan.bounds[n]) for n in trainer.stages}
    stage = trainer.stages[number]
    values = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    return known[number].bind(values, trainer.device)
