"""What workers and servers keep for each other: weights laid out as messages carry them, and a server's optimizer.

A message carries one load (`program/lower/service.py`): segments of a bucket, laid out flat. So the weights of a worker
are views of such flat buckets, and what arrives is copied to its place there. A server has one flat tensor for each of
its loads; its parameters, which torch's own optimizer runs on, are views of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainplan.engine.held import Held
from trainplan.engine.transport import Form
from trainplan.errors import PlanError
from trainplan.plan.optimizers import ELEMENTWISE
from trainplan.plan.text import brief
from trainplan.program.lower.buckets import Bucket
from trainplan.program.lower.service import Load, Service
from trainplan.workload.optimizer import Groups, make, scheduler_of
from trainplan.workload.workload import Workload


class Weights:
    """The weights of a stage of a worker, bucket by bucket; and its running statistics, which the root sends along."""

    def __init__(self, held: Held, buckets: Iterable[Bucket]):
        self.stage = held.number
        self.buffers = [buffer for _, buffer in held.stage.named_buffers()]
        self.flat: list[Tensor] = []
        for bucket in buckets:
            members = [held.parameters[name] for name in bucket.names]
            flat = torch.cat([p.detach().reshape(-1) for p in members])
            for p, view in zip(members, flat.split([p.numel() for p in members]), strict=True):
                p.data = view.view_as(p)
            self.flat.append(flat)

    def tensors(self, load: Load) -> list[Tensor]:
        """What a message with this load carries, or is copied to."""
        if not load.has_gradients:
            return self.buffers
        return [self.flat[load.bucket(self.stage)][first:last] for first, last in load.segments]

    def take(self, load: Load, arrived: Sequence[Tensor]) -> None:
        """Put what has arrived in its place."""
        for here, tensor in zip(self.tensors(load), arrived, strict=True):
            here.copy_(tensor)

    def forms(self, load: Load) -> list[Form]:
        return forms(self.tensors(load))


def forms(tensors: Iterable[Tensor]) -> list[Form]:
    """What such tensors are like on their way."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


class Shard:
    """What one server has: the weights of its loads, and the optimizer and scheduler for them."""

    def __init__(
        self, service: Service, server: int, values: Callable[[set[str]], Mapping[str, Tensor]], workload: Workload,
        stand_ins: Mapping[str, nn.Parameter], device: torch.device,
    ) -> None:  # fmt: skip
        self.service, self.loads = service, service.by_server[server]
        given = values({piece.name for load in self.loads for piece in load.pieces})
        self.flat: dict[int, Tensor] = {}  # by unit
        self.parameters: dict[str, nn.Parameter] = {}  # by the names of pieces
        self._of: dict[int, list[nn.Parameter]] = {}  # by unit
        by_name: dict[str, nn.Parameter] = {}
        for load in self.loads:
            parts = [given[p.name].detach().reshape(-1)[p.first : p.last] for p in load.pieces]
            flat = self.flat[load.unit] = torch.cat(parts).to(device)
            views = flat.split([piece.count for piece in load.pieces])
            for piece, view in zip(load.pieces, views, strict=True):
                shape = given[piece.name].shape if piece.whole else view.shape
                by_name[piece.name] = self.parameters[str(piece)] = nn.Parameter(view.view(shape))
            self._of[load.unit] = [self.parameters[str(piece)] for piece in load.pieces]
        self.optimizer, self.groups = self._made(workload, stand_ins, by_name)
        self.scheduler = scheduler_of(workload, self.optimizer)
        self.kept: list[dict[str, Tensor]] | None = None  # gradients of every step, if somebody wants them

    def _made(
        self, workload: Workload, stand_ins: Mapping[str, nn.Parameter], ours: Mapping[str, nn.Parameter]
    ) -> tuple[torch.optim.Optimizer, Groups]:
        in_part = {piece.name for load in self.loads for piece in load.pieces if not piece.whole}
        optimizer, groups = make(workload.optimizer, stand_ins, ours, in_part)
        split = [piece.name for load in self.loads for piece in load.pieces if not piece.whole]
        kind = type(optimizer).__name__
        if split and type(optimizer) not in {getattr(torch.optim, known) for known in ELEMENTWISE}:
            plan = self.service.plan
            largest = max(p.numel() for p in stand_ins.values())
            why = f"{split[0]} is split over {plan.servers} servers, and {kind} may look at a parameter as a whole"
            raise PlanError(f"plan {brief(plan)!r}", why, f"split={largest + 1}, or one of {', '.join(ELEMENTWISE)}")
        return optimizer, groups

    def tensors(self, load: Load) -> list[Tensor]:
        """The weights of a load, as a message carries them."""
        return list(self.flat[load.unit].split([last - first for first, last in load.segments]))

    def forms(self, load: Load) -> list[Form]:
        return forms(self.tensors(load))

    def step(self, gradients: Mapping[int, Tensor], last: bool) -> None:
        """One step with the gradients of some loads, by unit, each laid out flat; `last`: of all that a step of
        training has, after which the learning rate changes."""
        if self.kept is not None and min(gradients) == self.loads[0].unit:
            self.kept.append({})
        for unit, flat in gradients.items():
            views = flat.split([p.numel() for p in self._of[unit]])
            for parameter, view in zip(self._of[unit], views, strict=True):
                parameter.grad = view.view_as(parameter)
        if self.kept is not None:
            self.kept[-1] |= {n: p.grad.cpu().clone() for n, p in self.parameters.items() if p.grad is not None}
        self.optimizer.step()  # leaves alone what has no gradient
        self.optimizer.zero_grad(set_to_none=True)
        if last and self.scheduler is not None:
            self.scheduler.step()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """What a message carried, as one flat tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
