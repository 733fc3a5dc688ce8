"""Is the parallel run the same training? A few deterministic steps alone and under the plan, side by side."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainplan.engine.feed import data_seed
from trainplan.engine.launch import RunResult, run
from trainplan.engine.oracle import Trained, train_alone
from trainplan.engine.worker import in_double
from trainplan.plan.plan import Plan
from trainplan.plan.text import text
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton

# In float64 only the order of additions differs. (In float32, Adam turns rounding into differences of 1e-3.)
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart: the largest difference, as a share of the largest value."""

    what: str
    largest: float
    where: str  # the tensor, or the step

    @property
    def same(self) -> bool:
        return self.largest <= TOLERANCE


@dataclass(frozen=True)
class Comparison:
    """A plan held against one process."""

    plan: str
    steps: int
    batch: int
    differences: tuple[Difference, ...]
    losses_alone: tuple[float, ...]
    losses_together: tuple[float, ...]
    run: RunResult

    @property
    def same(self) -> bool:
        return all(difference.same for difference in self.differences)


def compare(
    workload_text: str,
    plan: Plan,
    *,
    steps: int = 3,
    batch: int,
    seed: int = 0,
    overrides: dict[str, Any] | None = None,
    backend: str = "gloo",
    device: str = "cpu",
) -> Comparison:
    """Train some steps in float64 alone and under a plan; loss, gradients, weights, buffers, optimizer state."""
    from trainplan.workload.load import load

    workload = in_double(load(workload_text, **(overrides or {})))
    skeleton = Skeleton(workload.build)
    skeleton.model.train()
    captured = capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")
    batches = [workload.inputs(batch, data_seed(seed, step)) for step in range(steps)]
    alone = train_alone(plan, workload, captured, skeleton.materialise(None, seed), batches, seed)
    folder = Path(tempfile.mkdtemp(prefix="trainplan-compare-"))
    try:
        result = run(
            workload_text, plan, steps=steps, batch=batch, out=folder, show=False, seed=seed, keep_state=True,
            double=True, reference=False, warm_up=steps, overrides=overrides or {}, backend=backend, device=device,
        )  # fmt: skip
        parts = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(plan.world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Comparison(
        plan=text(plan), steps=steps, batch=batch, differences=tuple(_differences(alone, parts, result)),
        losses_alone=tuple(alone.losses), losses_together=tuple(result.losses), run=result,
    )  # fmt: skip


def _differences(alone: Trained, parts: list[dict[str, Any]], result: RunResult) -> list[Difference]:
    apart = [abs(a - b) / max(abs(a), 1e-300) for a, b in zip(alone.losses, result.losses, strict=True)]
    worst = max(range(len(apart)), key=apart.__getitem__)
    found = [Difference("loss", apart[worst], f"step {worst + 1}")]
    weights = [(name, tensor, alone.weights[name]) for part in parts for name, tensor in part["weights"].items()]
    gradients = [
        (f"{name}, step {step + 1}", tensor, alone.gradients[step][name])
        for part in parts
        for step, tensors in enumerate(part["gradients"])
        for name, tensor in tensors.items()
    ]
    buffers = [(name, tensor, alone.buffers[name]) for part in parts for name, tensor in part["buffers"].items()]
    state = [
        (f"{name}: {key}", tensor, alone.state[name][key])
        for part in parts
        for name, entries in part["state"].items()
        for key, tensor in entries.items()
    ]
    for what, rows in (("gradients", gradients), ("weights", weights), ("buffers", buffers), ("optimizer", state)):
        if rows:
            found.append(_largest(what, rows))
    return found


def _largest(what: str, rows: list[tuple[str, Tensor, Tensor]]) -> Difference:
    """The tensor that is furthest off, as a share of its size (of the largest one's, where it has next to none)."""
    sizes = [
        (float((a.double() - b.double()).abs().max()), float(b.double().abs().max()), name)
        for name, a, b in rows
        if a.numel()
    ]
    floor = 1e-6 * max(size for _, size, _ in sizes) or 1.0
    apart = [(difference / max(size, floor), name) for difference, size, name in sizes]
    # Whatever is not a number is as far off as can be.
    worst, name = max((math.inf if math.isnan(share) else share, name) for share, name in apart)
    return Difference(what, worst, name)
