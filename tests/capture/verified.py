"""Capturing a model and holding it against eager, in one."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.verify import verify
from trainplan.workload.workload import Batch, Loss


def captured_and_verified(
    model: nn.Module, batch: Batch, loss: Loss, *, seed: int = 0, **options: Any
) -> tuple[Captured, float]:
    """Capture a model, verify the capture, and say how far it is from eager (0.0: bitwise equal)."""
    captured = capture(model, batch, loss, **options)
    return captured, verify(captured, model, batch, loss, seed)
