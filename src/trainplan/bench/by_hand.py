"""Data parallelism with torch's own means, as somebody writes it by hand: what our engine is raced against.

ddp                 DistributedDataParallel
zero-redundancy     the same, with ZeroRedundancyOptimizer: gradients are summed while backward goes on, everybody
                    steps a part of the weights and then broadcasts it. (Its `overlap_with_ddp` refuses gloo: "may
                    hang".)
fsdp2-2, fsdp2-3    `fully_shard` on every layer and on the whole; weights stay gathered between forward and
                    backward, or do not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BY_HAND = ("ddp", "zero-redundancy", "fsdp2-2", "fsdp2-3")
Step = Callable[[], object]


@dataclass(frozen=True)
class Training:
    """What is trained, on this rank."""

    model: nn.Module  # on its device; a sequence of layers
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor  # this rank's part of the batch
    targets: Tensor
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.optimizer(parameters, **self.options)


def by_hand(name: str, training: Training, bucket_mib: float | None = None) -> Step:
    """One step, with one of these means. `bucket_mib`: of DDP; None leaves it to torch."""
    if name not in BY_HAND:
        raise AssertionError(f"{name}: one of {', '.join(BY_HAND)}")
    if name.startswith("fsdp2"):
        trained = _sharded(training.model, training.inputs.device, keeps=name == "fsdp2-2")
        return _step(trained, training.optimizer_of(trained.parameters()), training)
    # A cap that is given is that of the first bucket, too; otherwise the first has 1 MiB.
    cap: dict[str, Any] = {} if bucket_mib is None else {"bucket_cap_mb": bucket_mib}
    trained = DistributedDataParallel(training.model, gradient_as_bucket_view=True, **cap)
    if name == "ddp":
        return _step(trained, training.optimizer_of(trained.parameters()), training)
    shared = ZeroRedundancyOptimizer(
        trained.parameters(), training.optimizer, parameters_as_bucket_view=True, **training.options
    )
    return _step(trained, shared, training)


def _sharded(model: nn.Module, device: torch.device, keeps: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keeps)
    return model


def _step(trained: nn.Module, optimizer: torch.optim.Optimizer, training: Training) -> Step:
    def step() -> None:
        training.loss(trained(training.inputs), training.targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
