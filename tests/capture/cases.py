"""All models under test, and captures of them that tests share (a capture takes most of the time)."""

from __future__ import annotations

import functools

import torch
from torch import nn

from trainplan.profile.capture.captured import Captured, capture

from . import huggingface, models
from .models import Case

CASES: dict[str, Case] = {**models.CASES, **huggingface.CASES}
NAMES = list(CASES)


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].build().to(dtype)


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> Captured:
    case = CASES[name]
    return capture(built(name, dtype), in_type(case.batch(4, 0), dtype), case.loss)


def in_type(batch, dtype):
    """The batch with its floating-point tensors in another type."""

    def convert(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    batch.args = tuple(convert(value) for value in batch.args)
    batch.kwargs = {key: convert(value) for key, value in batch.kwargs.items()}
    return batch
