"""What every measurement in a worker needs: who we are, on what device, and how to meet the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Record = Callable[[str, Any], None]  # (name of the quantity, sample)
Round = Callable[[Record], None]  # measures everything of a phase once


@dataclass(frozen=True)
class Team:
    """The workers of a probe, seen by one of them."""

    rank: int
    count: int
    device: torch.device
    backend: str  # that carries tensors: gloo or nccl
    control: dist.ProcessGroup | None  # gloo, for barriers and agreements; None: we are alone

    @property
    def staged(self) -> bool:
        """Whether messages go through host memory: gloo cannot send from a GPU's."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def sync(self) -> None:
        """Wait until the device has done what our own stream was given (not what a communication stream does)."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def barrier(self) -> None:
        """Meet the others."""
        self.sync()
        if self.control is not None:
            dist.barrier(group=self.control)

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, src=0, group=self.control)
        return float(box)

    def longest(self, value: float) -> float:
        """The largest of all ranks' values, on every rank."""
        if self.control is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return float(box)


def levels(count: int) -> list[int]:
    """The numbers of workers to measure with: all when they are few, else doubling.

    >>> levels(3), levels(12)
    ([1, 2, 3], [1, 2, 4, 8, 12])
    """
    if count <= 4:
        return list(range(1, count + 1))
    return sorted({count} | {2**power for power in range(count.bit_length()) if 2**power < count})
