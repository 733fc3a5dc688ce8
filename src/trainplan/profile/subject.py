"""What is measured: a captured model with its workload, on a device."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.stage import Stage
from trainplan.profile.reference import Reference
from trainplan.profile.timing import Clock, Readings, clock_of
from trainplan.profile.walk import Walk
from trainplan.workload.batch import tensors, to_device
from trainplan.workload.workload import Batch, Workload


@dataclass
class BlockBytes:
    """Bytes of one block for one micro-batch size."""

    saved: int = 0
    forward_workspace: int = 0
    backward_workspace: int = 0


@dataclass
class Subject:
    """A captured model on a device, and all that has been found out about it."""

    captured: Captured
    workload: Workload
    device: torch.device
    trained: frozenset[str] = frozenset()  # parameters that get a gradient
    compile_options: dict[str, Any] | None = None  # None: blocks run as they are
    readings: Readings = field(default_factory=Readings)
    bytes: dict[tuple[int, int], BlockBytes] = field(default_factory=dict)  # (size, block)
    saved_by: dict[str, tuple[int, ...]] = field(default_factory=dict)  # crossing → blocks whose backward needs it
    ready: dict[str, list[float]] = field(default_factory=dict)  # parameter → shares of its block's backward
    peak_bytes: dict[int, int] = field(default_factory=dict)  # size → of a whole step
    update_workspace: dict[int | None, int] = field(default_factory=dict)  # block, or None for all blocks
    optimizer: str = ""
    state_bytes: int = 0  # of the optimizer, for all parameters
    _batches: dict[int, Batch] = field(default_factory=dict)

    @cached_property
    def clock(self) -> Clock:
        return clock_of(self.device)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.device)

    @property
    def blocks(self) -> range:
        return range(len(self.captured.blocks))

    def look(self) -> None:
        """Read the reference kernel: how fast is the machine now?"""
        self.readings.look(self.reference.core_seconds())

    def batch(self, size: int) -> Batch:
        if size not in self._batches:
            self._batches[size] = to_device(self.workload.inputs(size, 0), self.device)
        return self._batches[size]

    def walk(self, size: int) -> Walk:
        return Walk(self.captured, self.batch(size), self.workload.loss)

    def stage(self, first: int, last: int, values: dict[str, Tensor]) -> Stage:
        """Some blocks with values, on the device."""
        stage = self.captured.stage(first, last).bind(values, self.device)
        return stage if self.compile_options is None else stage.compiled(**self.compile_options)

    def apart(self, stage: Stage, size: int) -> list[Tensor]:
        """The tensors that are there anyhow: the model's and the batch's."""
        return [*stage.parameters(), *stage.buffers(), *tensors(self.batch(size)).values()]

    def read_bytes(self, index: int, size: int) -> int:
        """Bytes of the gradients that the backward pass of a block makes for what it read."""
        reads = self.captured.blocks[index].reads
        return sum(c.shape.bytes(size) for c in self.captured.crossings if c.name in reads and c.needs_grad)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def first_used(captured: Captured, index: int, among: Container[str]) -> list[str]:
    """The parameters, of some, that a block is the first to use."""
    return [use.name for use in captured.parameters if use.blocks[0] == index and use.name in among]


def drop_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
