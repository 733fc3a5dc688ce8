"""A workload in a few numbers and words, for reports: nothing of it is allocated.

>>> from trainplan.workload.load import load
>>> described = describe(load("resnet18:cifar10"))
>>> described.parameters, described.inputs
(11173962, '3×32×32 float32')
>>> print(described)
resnet18:cifar10: 11.2 M parameters in 62 tensors, image 3×32×32 float32, batch 64, 50,000 images an epoch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainplan import units
from trainplan.workload.batch import per_sample, tensors
from trainplan.workload.workload import Batch, Workload


@dataclass(frozen=True)
class Description:
    name: str
    parameters: int
    trainable: int
    tensors: int  # parameter tensors
    parameter_bytes: int
    buffer_bytes: int
    inputs: str  # shapes of one sample
    input_bytes: int  # of one sample, with what the loss compares
    sample: str
    batch: int
    samples_per_epoch: int

    def __str__(self) -> str:
        frozen = f", of which {_count(self.trainable)} are trained" if self.trainable != self.parameters else ""
        return (
            f"{self.name}: {_count(self.parameters)} parameters in {self.tensors} tensors{frozen}, "
            f"{self.sample} {self.inputs}, batch {self.batch:,}, {self.samples_per_epoch:,} {self.sample}s an epoch"
        )


def describe(workload: Workload) -> Description:
    """Count the model's parameters on the meta device, and look at a batch of one."""
    with torch.device("meta"):
        model = workload.build()
    parameters = list(model.parameters())  # tied weights once
    batch = workload.inputs(1, 0)
    return Description(
        name=workload.name,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        tensors=len(parameters),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        inputs=input_text(batch),
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch).values()),
        sample=workload.sample,
        batch=workload.batch,
        samples_per_epoch=workload.samples_per_epoch,
    )


def input_text(batch: Batch) -> str:
    """Shapes of one sample of the model's inputs, by name where they have one.

    >>> input_text(Batch(2, args=(torch.zeros(2, 3, 8, 8),), kwargs={"mask": torch.zeros(2, 8, dtype=torch.bool)}))
    '3×8×8 float32, mask 8 bool'
    """
    shown = []
    for place, tensor in tensors(Batch(batch.samples, batch.args, batch.kwargs)).items():
        shape = tensor.shape[1:] if per_sample(batch, place, tensor) else tensor.shape
        name = place.removeprefix("kwargs").strip("[]") + " " if place.startswith("kwargs") else ""
        size = "×".join(str(side) for side in shape) or "one"
        shown.append(f"{name}{size} {str(tensor.dtype).removeprefix('torch.')}")
    return ", ".join(shown)


def _count(number: int) -> str:
    return str(number) if number < 1000 else units.count(number)
