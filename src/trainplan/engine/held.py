"""A stage on a rank, with everything that trains it: optimizer, gradients to exchange, shares of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainplan.engine.observed import Observed
from trainplan.engine.reducer import Reducer
from trainplan.engine.shards import Shards, check_elementwise
from trainplan.profile.capture.stage import Stage
from trainplan.program.lower.groups import share_group, stage_group
from trainplan.program.lower.layout import Layout
from trainplan.workload.optimizer import Groups, make, scheduler_of

if TYPE_CHECKING:
    from trainplan.engine.trainer import Trainer


@dataclass
class Held:
    """A copy of one stage, as this rank holds it."""

    number: int  # of the stage
    stage: Stage
    module: nn.Module  # what runs a forward pass: the stage itself, or DDP around it
    optimizer: torch.optim.Optimizer
    scheduler: Any
    names: Groups  # of the parameters in each group of the optimizer, those of the whole model
    is_last: bool
    is_first_copy: bool  # whose running statistics count, and which is saved
    reducer: Reducer | None = None
    counted: tuple[nn.Parameter, ...] = ()  # parameters whose gradients this copy adds to the norm
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    shards: Shards | None = None  # what replicas share out of it

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""
        return {name: p for name, p in self.stage.named_parameters() if p.requires_grad}

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps here, by name: those, or this rank's part of them."""
        return stepped(self.parameters, self.shards)


def stepped(parameters: dict[str, nn.Parameter], shards: Shards | None) -> dict[str, nn.Parameter]:
    """Of these parameters what is stepped here."""
    if shards is None:
        return parameters
    return {name: p for name, p in parameters.items() if name not in shards.names} | shards.pieces


def bind(trainer: Trainer, number: int, values: Callable[[set[str]], Mapping[str, Tensor]]) -> Stage:
    """A stage with its values. Weights that another stage of this rank has too are copied: their gradients are
    summed over all holders, wherever these are."""
    stage = trainer.captured.stage(*trainer.plan.bounds[number])
    taken = {name for other in trainer.stages.values() for name, _ in other.named_parameters()}
    given = dict(values(set(stage.holds)))
    given |= {name: nn.Parameter(given[name].detach().clone()) for name in taken & set(stage.holds)}
    stage.bind(given, trainer.device)
    # Parameters that the loss does not depend on: nobody waits for their gradients, no optimizer moves them.
    idle = {p.name for p in trainer.shape.parameters if not p.trainable}
    for name, parameter in stage.named_parameters():
        if name in idle:
            parameter.requires_grad_(False)
    return stage


def hold(trainer: Trainer, number: int, layout: Layout) -> Held:
    """The stage with this number, ready to be trained by this rank."""
    plan, stage = trainer.plan, trainer.stages[number]
    parameters = {name: p for name, p in stage.named_parameters() if p.requires_grad}
    module: nn.Module = stage
    reducer = None
    if layout.observed:
        module = Observed(stage, trainer.groups[stage_group(layout, (number,))[0]], plan.bucket)
    elif layout.buckets[number]:
        reducer = Reducer(parameters, [bucket.names for bucket in layout.buckets[number]])
    shards = _shards(trainer, number, parameters, layout)
    own = stepped(parameters, shards)
    optimizer, names = make(
        trainer.workload.optimizer, trainer.captured.stand_ins(), own, shards.names if shards is not None else ()
    )
    if shards is not None:
        check_elementwise(optimizer, plan.zero)
    # In a replica each weight counts once: in the first stage that holds it, and there in the first copy.
    elsewhere = {name for tie in layout.ties if number in tie.stages[1:] for name in tie.names}
    copies = [plan.rank(trainer.replica, number, line) for line in range(plan.lines)]
    counted = () if copies[0] != trainer.rank else tuple(p for name, p in own.items() if name not in elsewhere)
    # What is not shared out the first of those who share counts: also in a stage of which nothing is.
    if plan.zero and trainer.replica % plan.sharers:
        counted = tuple(shards.pieces.values()) if shards is not None else ()
    return Held(
        number=number, stage=stage, module=module, optimizer=optimizer, names=names,
        scheduler=scheduler_of(trainer.workload, optimizer), is_last=number == layout.stages[-1],
        is_first_copy=plan.replicas_of(number)[0] == trainer.rank, reducer=reducer, counted=counted,
        no_sync=module.no_sync if isinstance(module, Observed) else nullcontext, shards=shards,
    )  # fmt: skip


def _shards(trainer: Trainer, number: int, parameters: dict[str, nn.Parameter], layout: Layout) -> Shards | None:
    """What this rank has of a stage whose states are shared out."""
    if not layout.units[number]:
        return None
    plan, replica = trainer.plan, trainer.replica
    ranks, _ = share_group(layout, number, layout.sharing(replica))
    place = replica % plan.sharers
    return Shards(layout.units[number], parameters, place, plan.zero, trainer.groups[ranks])
