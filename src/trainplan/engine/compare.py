"""Is the parallel run the same training? A few deterministic steps alone and under the plan, side by side.

In float64, or where the model does not run in it, in the types that it has (`exactness.py`).

Two questions, since plan and oracle both run the captured model: does the plan equal the captured model trained alone
(loss, gradients, weights, buffers, optimizer, a row each), and does that equal the user's own model (one row)?
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainplan.engine.asynchronous import load
from trainplan.engine.exactness import TOLERANCE, Exactness, by_descent, in_double, in_float64, in_own_types
from trainplan.engine.feed import data_seed
from trainplan.engine.launch import RunResult, run
from trainplan.engine.oracle import Trained, train_alone, train_eager
from trainplan.engine.replay import Replayed, replay
from trainplan.errors import ModelError, TrainplanError
from trainplan.plan.keys import part_of
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import brief, text
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.verify import verify
from trainplan.profile.structure import structure
from trainplan.units import some
from trainplan.workload.modes import in_training
from trainplan.workload.workload import Batch, Workload

AGAINST_OWN = "captured against your model"


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart: the largest difference, as a share of the largest value."""

    what: str
    largest: float
    where: str  # the tensor, or the step
    allowed: float = TOLERANCE

    @property
    def same(self) -> bool:
        return self.largest <= self.allowed


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
    exactness: Exactness

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
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Comparison:
    """Train some steps alone and under a plan; loss, gradients, weights, buffers, optimizer state."""
    from trainplan.workload.load import load as load_workload

    workload = load_workload(workload_text, **(overrides or {}))
    own_types, why = by_descent(workload), ""
    progress(f"training {some(steps, 'step')} in this process, in float64", 0.1)
    try:
        one = _one_process(plan, in_double(workload), steps, batch, seed)
    except Exception as error:  # whatever the user's code raises
        why = " ".join((error.why if isinstance(error, TrainplanError) else str(error)).split())[:200] or "it raises"
        progress("it does not run in float64: in its own types", 0.15)
        one = _one_process(plan, own_types, steps, batch, seed)
    captured, values = one.captured, one.skeleton.materialise(None, seed)
    exactness = in_own_types(captured, why) if why else in_float64(plan, captured)
    against_own = _against_own(plan, one, exactness)
    progress(f"training them under {brief(plan)} on {some(plan.world, 'new process')}", 0.3)
    folder = Path(tempfile.mkdtemp(prefix="trainplan-compare-"))
    try:
        result = run(
            workload_text, plan, steps=steps, batch=batch, out=folder, show=False, seed=seed, keep_state=True,
            double=exactness.double, descent=not exactness.double, verified=True, reference=False, warm_up=steps,
            overrides=overrides or {}, backend=backend, device=device,
        )  # fmt: skip
        parts = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(plan.world)]
        if plan.exchange in ASYNCHRONOUS:
            again = replayed(one.workload, captured, plan, values, batch, seed, folder)
            rows = against_record(plan, again, parts, result, exactness.floor)
        else:
            rows = _differences(one.alone, parts, result, exactness.floor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = [replace(difference, allowed=exactness.of(difference.what)) for difference in rows]
    return Comparison(
        plan=text(plan), steps=steps, batch=batch, differences=(*found, against_own),
        losses_alone=tuple(one.alone.losses), losses_together=tuple(result.losses), run=result, exactness=exactness,
    )  # fmt: skip


@dataclass(frozen=True)
class OneProcess:
    """What a plan is held against: its captured model trained here, and what that was trained on."""

    workload: Workload
    skeleton: Skeleton
    captured: Captured
    own: nn.Module  # the user's model itself, with the values that the captured one starts from
    batches: list[Batch]
    alone: Trained


def _one_process(plan: Plan, workload: Workload, steps: int, batch: int, seed: int) -> OneProcess:
    skeleton = Skeleton(workload.build)
    example = workload.inputs(2, 0)
    captured = capture(skeleton.model, example, workload.loss, device="cpu")
    structure(captured, workload, example)  # refuses what cannot be trained, as a run does
    batches = [workload.inputs(batch, data_seed(seed, step)) for step in range(steps)]
    own = _own_model(workload, skeleton, seed)
    values = skeleton.materialise(None, seed)
    try:
        alone = train_alone(plan, workload, captured, values, batches, seed)
    except TrainplanError:
        raise
    except Exception as error:  # whatever the user's code raises
        why = f"it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        instead = "model(*batch.args) and loss(output, batch.targets) by themselves, as eager would run them"
        raise ModelError(f"training {workload.name} on the pieces of {text(plan)}", why, instead) from error
    return OneProcess(workload, skeleton, captured, own, batches, alone)


def replayed(
    workload: Workload, captured: Captured, plan: Plan, values: Mapping[str, Tensor], batch: int, seed: int,
    folder: Path,
) -> Replayed:  # fmt: skip
    """What the asynchronous servers of a run recorded in its folder, done again by one process."""
    records = [load(folder / f"arrivals-{server}.json") for server in range(plan.servers)]
    shape = structure(captured, workload, workload.inputs(2, 0))

    def batches(step: int) -> Batch:
        return workload.inputs(batch, data_seed(seed, step))

    return replay(plan, workload, captured, shape, values, batches, seed, records)


def against_record(
    plan: Plan, again: Replayed, parts: list[dict[str, Any]], result: RunResult, floor: float
) -> list[Difference]:  # fmt: skip
    """How far the servers of a run are from one process that was given their order of pushes."""
    servers = parts[plan.workers :]
    weights = [
        (name, tensor, again.weights[server][name])
        for server, part in enumerate(servers)
        for name, tensor in part["weights"].items()
    ]
    state = [
        (f"{name}: {key}", tensor, again.state[server][name][key])
        for server, part in enumerate(servers)
        for name, entries in part["state"].items()
        for key, tensor in entries.items()
    ]
    steps = range(len(result.losses))
    alone = [sum(again.losses[worker, step] for worker in range(plan.dp)) for step in steps]
    found = [_losses(alone, result.losses), _largest("weights", weights, floor)]
    return [*found, _largest("optimizer", state, floor)] if state else found


def _own_model(workload: Workload, skeleton: Skeleton, seed: int) -> nn.Module:
    """The user's model itself, with the values that the captured one starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.build()
    values = skeleton.materialise(None, seed)
    with torch.no_grad():
        for name, tensor in values_of(model).items():
            tensor.copy_(values[name])
    return in_training(model)


def _against_own(plan: Plan, one: OneProcess, exactness: Exactness) -> Difference:
    """How far the captured model, trained alone, is from the user's own model, trained on the same pieces."""
    workload, captured, alone, allowed = one.workload, one.captured, one.alone, exactness.against_own
    if any(block.random for block in captured.blocks):
        found = verify(captured, one.own, workload.inputs(2, 0), workload.loss)
        where = "one batch, not trained: in one piece it draws other random numbers than block by block"
        return Difference(AGAINST_OWN, found, where, allowed)
    try:
        eager = train_eager(plan, workload, captured, one.own, one.batches)
    except Exception as error:  # whatever the user's code raises
        raise ModelError(
            f"training of your own model on the pieces of {text(plan)}",
            f"it does not take them ({type(error).__name__}: {error}), though the captured operators do",
            "fewer micro-batches or a larger batch, if a piece is too small for it",
        ) from error
    missing = [(name, torch.zeros(1), torch.ones(1)) for name in alone.weights.keys() ^ eager.weights.keys()]
    rows = {
        "gradients": [row for step, have in enumerate(alone.gradients) for row in _gradients(have, eager, step)],
        "weights": [(name, w, eager.weights[name]) for name, w in alone.weights.items() if name in eager.weights],
        "buffers": [(name, b, eager.buffers[name]) for name, b in alone.buffers.items()],
        "missing": missing,
    }
    if allowed > TOLERANCE:  # rounding of its own, which the optimizer may blow up; so before the first step of it
        rows = {"gradients": _gradients(alone.gradients[0], eager, 0), "missing": missing}
    found_rows = [_losses(alone.losses, eager.losses)]
    found_rows += [_largest(what, each, exactness.floor) for what, each in rows.items() if each]
    worst = max(found_rows, key=lambda row: row.largest)
    return Difference(AGAINST_OWN, worst.largest, f"{worst.what}: {worst.where}", allowed)


def _gradients(have: dict[str, Tensor], eager: Trained, step: int) -> list[tuple[str, Tensor, Tensor]]:
    """Gradients of both sides; none at all is the same as zeros."""
    want = eager.gradients[step]
    return [
        (f"{name}, step {step + 1}", have.get(name, torch.zeros_like(known)), want.get(name, torch.zeros_like(known)))
        for name, known in (want | have).items()
    ]


def _losses(alone: Sequence[float], other: Sequence[float]) -> Difference:
    apart = [abs(a - b) / max(abs(a), 1e-300) for a, b in zip(alone, other, strict=True)]
    apart = [math.inf if math.isnan(share) else share for share in apart]
    worst = max(range(len(apart)), key=apart.__getitem__)
    return Difference("loss", apart[worst], f"step {worst + 1}")


def _differences(alone: Trained, parts: list[dict[str, Any]], result: RunResult, floor: float) -> list[Difference]:
    found = [_losses(alone.losses, result.losses)]
    weights = [
        (name, tensor, part_of(name, alone.weights)) for part in parts for name, tensor in part["weights"].items()
    ]
    gradients = [
        (f"{name}, step {step + 1}", tensor, part_of(name, alone.gradients[step]))
        for part in parts
        for step, tensors in enumerate(part["gradients"])
        for name, tensor in tensors.items()
    ]
    buffers = [(name, tensor, alone.buffers[name]) for part in parts for name, tensor in part["buffers"].items()]
    state = [
        (f"{name}: {key}", tensor, state_of(name, key, alone.state))
        for part in parts
        for name, entries in part["state"].items()
        for key, tensor in entries.items()
    ]
    for what, rows in (("gradients", gradients), ("weights", weights), ("buffers", buffers), ("optimizer", state)):
        if rows:
            found.append(_largest(what, rows, floor))
    return found


def state_of(name: str, key: str, state: dict[str, dict[str, Tensor]]) -> Tensor:
    """What the optimizer keeps under a key for a parameter or a piece of one: of a piece its part, unless it is one
    number for the whole."""
    whole = {owner: entries[key] for owner, entries in state.items() if key in entries}
    number = {owner: tensor for owner, tensor in whole.items() if not tensor.dim()}
    owner = name.rpartition("[")[0]
    return number[owner] if name not in whole and owner in number else part_of(name, whole)


def _largest(what: str, rows: list[tuple[str, Tensor, Tensor]], share: float) -> Difference:
    """The tensor that is furthest off, as a share of its size (of the largest one's, where it has next to none)."""
    sizes = [
        (float((a.double() - b.double()).abs().max()), float(b.double().abs().max()), name)
        for name, a, b in rows
        if a.numel()
    ]
    floor = share * max(size for _, size, _ in sizes) or 1.0
    apart = [(difference / max(size, floor), name) for difference, size, name in sizes]
    # Whatever is not a number is as far off as can be.
    worst, name = max((math.inf if math.isnan(share) else share, name) for share, name in apart)
    return Difference(what, worst, name)
