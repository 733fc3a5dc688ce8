"""Evaluation under a plan: replica 0 runs its stages forward, captured in evaluation mode.

A model may be another chain in that mode: GoogLeNet has heads which only training uses. Then the rank with its last
stage is given the values of all stages, and runs it in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainplan.engine.runner import Runner
from trainplan.errors import ModelError, RunError
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.stage import Stage
from trainplan.program.ops import Kind
from trainplan.workload.batch import to_device
from trainplan.workload.workload import Batch

if TYPE_CHECKING:
    from trainplan.engine.trainer import Trainer

_TAG = 2**20  # beyond the tags of training


class Evaluation:
    """What a rank of replica 0 evaluates with: the model in evaluation mode, captured once."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.captured = capture(
            Skeleton(trainer.workload.build).model.eval(), trainer.workload.inputs(2, 0), trainer.workload.loss,
            device=trainer.captured.exported.device,
        )  # fmt: skip
        self.in_place = _chain(self.captured) == _chain(trainer.captured)
        self.stages: dict[int, Stage] = {}  # of this rank, where it is the chain that is trained
        if self.in_place:
            self.stages = {n: self.captured.stage(*trainer.plan.bounds[n]) for n in trainer.stages}

    def __call__(self, runner: Runner, batch: Batch) -> float | None:
        """The loss of a batch, where this rank has the last stage."""
        own = to_device(batch, self.trainer.device)
        return self._by_stages(runner, own) if self.in_place else self._in_one_piece(own)

    @property
    def _last(self) -> int:
        """The rank with the last stage."""
        return self.trainer.plan.rank(0, self.trainer.plan.depth - 1)

    def _by_stages(self, runner: Runner, own: Batch) -> float | None:
        trainer, loss = self.trainer, None
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
                    forms = [(runner.shapes[n].at(own.samples), runner.shapes[n].dtype) for n in names]
                    tag = _TAG + number
                    message = talk.receive(forms, trainer.plan.rank(0, edge.source), tag)
                    message.wait()
                    crossings.update(zip(names, message.take(), strict=True))
            result, output = self._bound(number)(crossings, own)
            made |= result
            for edge in trainer.part.layout.outgoing[number]:
                if trainer.part.layout.is_message(edge, 0):
                    names = runner.edge_names(Kind.SEND_F, edge.source, edge.target)
                    to = trainer.plan.rank(0, edge.target)
                    sent.append(talk.send([result[n] for n in names], to, _TAG + edge.target))
            if trainer.part.held[number].is_last:
                loss = self._loss(output, own)
        for pending in sent:
            pending.wait()
        return loss

    def _bound(self, number: int) -> Stage:
        """A stage in evaluation mode, sharing this rank's values."""
        return self.stages[number].bind(_values(self.trainer.stages[number]), self.trainer.device)

    def _in_one_piece(self, own: Batch) -> float | None:
        """By the rank with the last stage, which the others send their values."""
        trainer, talk = self.trainer, self.trainer.part.transport
        senders = [rank for rank in trainer.plan.ranks(0) if rank != self._last]
        if senders and trainer.backend == "nccl":
            raise RunError(
                "evaluation under this plan",
                "the model has other blocks, or passes other tensors between them, in evaluation mode, and NCCL has no "
                "links by which one rank could be sent all values",
                'saving a checkpoint, and trainplan.build("single", …), load and evaluate in one process',
            )
        values = {name: tensor for stage in trainer.stages.values() for name, tensor in _values(stage).items()}
        if trainer.rank != self._last:
            talk.send([values[name].detach() for name in self._names(trainer.rank)], self._last, _TAG).wait()
            return None
        held = trainer.captured.exported.held
        for rank in senders:
            names = self._names(rank)
            message = talk.receive([(held[name].shape, held[name].dtype) for name in names], rank, _TAG)
            message.wait()
            values |= dict(zip(names, message.take(), strict=True))
        whole = self.captured.stage(0, len(self.captured.blocks))  # anew: it would keep what it was sent
        _, output = whole.bind(values, trainer.device)({}, own)
        return self._loss(output, own)

    def _names(self, rank: int) -> list[str]:
        """What a rank sends: the tensors of its stages."""
        plan, captured = self.trainer.plan, self.trainer.captured
        bounds = [plan.bounds[number] for number in range(plan.depth) if plan.rank(0, number) == rank]
        found = {name for first, last in bounds for block in captured.blocks[first:last] for name in block.holds}
        return sorted(found)

    def _loss(self, output: Any, batch: Batch) -> float:
        try:
            return float(self.trainer.workload.loss.function(output, batch.targets))
        except Exception as error:  # whatever the user's code raises
            why = f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            instead = "a loss that takes what the model returns in evaluation mode, too"
            raise ModelError("the loss, on the model's output in evaluation mode", why, instead) from error


def _chain(captured: Captured) -> tuple[Any, ...]:
    """What two captures have in common if the stages of one can be run in the place of the other's."""
    crossings = [(c.producer, c.consumers, c.shape) for c in captured.crossings]
    return [block.name for block in captured.blocks], crossings


def _values(stage: Stage) -> dict[str, Tensor]:
    return {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
