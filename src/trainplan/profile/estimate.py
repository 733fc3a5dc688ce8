"""An estimated profile: what a model would cost on a device that is not here. No torch here, until a model is traced.

The model is captured and traced on fake tensors (`modelled`), or known by its shape (`family`), so neither its weights
nor the device are needed; bytes are those that autograd would save, seconds come from a roofline (`roofline`). A first
answer: what is measured is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate

from trainplan.cluster.cluster import Device
from trainplan.cluster.probe import machine
from trainplan.errors import InputError, nearest
from trainplan.profile import by_slice
from trainplan.profile.device.known import model_of
from trainplan.profile.device.model import Model
from trainplan.profile.family import known
from trainplan.profile.op import BY_CUDNN, Op
from trainplan.profile.profile import Block, Floats, Parameter, Profile
from trainplan.profile.provenance import Provenance
from trainplan.profile.recipes import recipes
from trainplan.profile.roofline import (
    HALF,
    Speed,
    issue_seconds,
    made_by,
    moved_by,
    pass_seconds,
    plain_seconds,
    run_seconds,
    speed_of,
    update_seconds,
)
from trainplan.profile.traced import BlockTrace, Trace, Traced
from trainplan.profile.variant import remember
from trainplan.workload.workload import Workload

Progress = Callable[[str, float], None]


def estimate(
    workload: Workload,
    device: Device,
    *,
    samples: Sequence[int] | None = None,
    precision: str = "fp32",
    progress: Progress | None = None,
    model: Model | None = None,
    autocast: str = "",
) -> Profile:
    """Estimate a workload on a device of the catalogue, for these micro-batch sizes (powers of two up to the batch).

    `model` is of a device file; without it, one that comes with the package is taken, where there is one for the device
    or for one like it. `precision` is what products of 32-bit numbers run in; a model whose own numbers are of 16 bits
    is estimated as it is. `autocast` is the type to which a GPU's autocast lowers what it lowers (bf16, fp16).
    """
    if precision not in ("fp32", "tf32"):
        why = "products of 32-bit numbers run in fp32 or tf32"
        raise InputError(f"an estimate in {precision}", why, "autocast='bf16', or a model whose numbers are of 16 bits")
    if autocast not in ("", *HALF):
        raise InputError(f"autocast to {autocast}", "a GPU's autocast lowers to bf16 or fp16", nearest(autocast, HALF))
    speed = speed_of(device, precision, model or model_of(device))
    sizes = sorted(set(samples)) if samples is not None else [2**k for k in range(max(1, workload.batch).bit_length())]
    if not sizes or sizes[0] < 1:
        raise InputError(f"micro-batch sizes {list(samples or ())}", "each must be at least 1", "1,2,4,8")
    if autocast and speed.is_cpu:
        raise InputError(f"autocast to {autocast} on a CPU", "only a GPU's autocast is estimated", "a GPU's name")
    measured_with = speed.model.file.versions.get("torch", "") if speed.model is not None else ""
    found = traced(workload, sizes, not speed.is_cpu, progress, autocast, device.capability, measured_with)
    made = priced(found, device, speed, sizes)
    remember(made, device, speed.model)
    return made


def traced(
    workload: Workload,
    sizes: Sequence[int],
    gpu: bool,
    progress: Progress | None = None,
    autocast: str = "",
    capability: tuple[int, int] = (0, 0),
    version: str = "",
) -> Traced:
    """What the model does: known from its shape, or found by tracing it.

    `capability` is CUDA's, by which a GPU's kernels are chosen; (0, 0): as on an H200. `version` is of torch on the
    device; none: this one's.
    """
    found = known(workload, gpu) if not autocast else None  # shapes are known of 32-bit numbers
    if found is None:
        import torch

        from trainplan.profile.attention import Gpu, version_of
        from trainplan.profile.modelled import modelled

        lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast)
        like = (Gpu(capability) if any(capability) else Gpu()) if gpu else None
        if like is not None and version:
            like = replace(like, torch=version_of(version))
        found = modelled(workload, sizes, like, progress or (lambda what, share: None), lower)
    return found


def priced(found: Traced, device: Device, speed: Speed, sizes: Sequence[int]) -> Profile:
    """The profile of what was traced, on a device."""
    base, update = found.base, found.update
    traces = [found.at(size) for size in sizes]
    kinds, which = recipes(found)
    count = sum(p.count for p in base.parameters if p.trainable)
    step = sum(moved_by(ops) for ops in update.blocks), sum(update.tensors)
    products, convolutions = _multiplied_in(traces[-1], speed)
    costs: dict[tuple[int, ...], dict[str, Floats]] = {}  # by identity of its traces, what a block costs
    blocks = []
    for index, block in enumerate(base.blocks):
        same = [trace.blocks[index] for trace in traces]
        key = tuple(trace.identity for trace in same)
        if key not in costs:
            costs[key] = _passes(same, sizes, speed) | _slices(base, block, same[0], speed)
        run, issue = update_seconds(update.blocks[index], update.tensors[index], speed, step)
        costs_here = costs[key] | {"update_workspace_bytes": 0 if speed.is_cpu else made_by(update.blocks[index])}
        blocks.append(replace(block, **costs_here, update_s=run, update_issue_s=issue, recipe=which[index]))  # type: ignore[arg-type]
    return replace(
        base,
        device=device.name,
        kind="estimated",
        precision=base.precision if base.precision in HALF else speed.precision,
        products_in=products,
        convolutions_in=convolutions,
        optimizer=update.optimizer,
        update_adds=0.0 if speed.is_cpu else 1.0,  # a GPU goes over all tensors at once
        state_bytes_per_parameter=sum(update.state_bytes) / max(1, count),
        samples=tuple(sizes),
        blocks=_with_accumulation(blocks, base, speed),
        crossings=tuple(replace(c, saved_by=traces[0].saved_by.get(c.name, ())) for c in base.crossings),
        parameters=_ready(base.parameters, traces[-1], speed),
        recipes=kinds,
        provenance=Provenance(
            machine=f"none: estimated for {device.name} {speed.words}",
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=machine.versions(),
            source=base.provenance.source,
            digest=base.provenance.digest,
        ),
    )


def _multiplied_in(trace: Trace, speed: Speed) -> tuple[str, str]:
    """What most of (the products, the convolutions) of forward passes are in: of a model whose numbers are of 16 bits,
    or that autocast lowers, the type that its operators read."""
    work: dict[tuple[bool, str], float] = {}
    for op in (op for block in trace.blocks for op in block.forward):
        key = op.name in BY_CUDNN, op.precision if op.precision in HALF else ""
        work[key] = work.get(key, 0.0) + op.flops

    def most(convolutions: bool, tensor_cores: bool) -> str:
        own = {precision: flops for (which, precision), flops in work.items() if which == convolutions}
        narrow = max(own, key=lambda precision: own[precision]) if any(own.values()) else ""
        return narrow or ("tf32" if tensor_cores else "fp32")

    return most(False, speed.tensor_products), most(True, speed.tensor_convolutions)


def _passes(traces: list[BlockTrace], sizes: Sequence[int], speed: Speed) -> dict[str, Floats]:
    """What a block costs."""
    return {
        "flops": traces[0].flops / sizes[0],  # type: ignore[dict-item]
        "convolution_flops": traces[0].convolution_flops / sizes[0],  # type: ignore[dict-item]
        "tail_flops": traces[0].tail_flops / sizes[0],  # type: ignore[dict-item]
        "forward_s": tuple(pass_seconds(t.forward, speed) for t in traces),
        "backward_s": tuple(pass_seconds(t.backward, speed) for t in traces),
        "forward_issue_s": tuple(issue_seconds(t.forward, "forward", speed) for t in traces),
        "backward_issue_s": tuple(issue_seconds(t.backward, "backward", speed) for t in traces),
        "recompute_s": tuple(pass_seconds(t.again, speed) for t in traces),
        "recompute_issue_s": tuple(issue_seconds(t.again, "forward", speed) for t in traces),
        "saved_bytes": tuple(float(t.saved_bytes) for t in traces),
        "forward_workspace_bytes": tuple(float(t.forward_workspace_bytes) for t in traces),
        "backward_workspace_bytes": tuple(float(t.backward_workspace_bytes) for t in traces),
    }


# Operators of attention, which go by pairs of tokens; all others go by tokens.
ATTENTION = {
    "attention", "attention_backward", "bmm", "baddbmm", "_softmax", "_safe_softmax", "_softmax_backward_data",
}  # fmt: skip
_POINTS = [(0.25, 0.25), (0.25, 0.5), (0.25, 0.75), (0.25, 1.0), (0.5, 0.5), (0.5, 1.0)]  # share of the tokens, reach


def _slices(base: Profile, block: Block, block_trace: BlockTrace, speed: Speed) -> dict[str, Floats]:
    """Seconds of slices of sequences, from the operators of whole ones."""
    if base.whole_sequences is not None:
        return {}

    def part(op: Op, share: float, reach: float) -> Op:
        amount = share * reach if op.name in ATTENTION else share
        read, written = round(op.read * share), round(op.written * share)
        # All pairs are computed, and then masked.
        return replace(op, flops=op.flops * amount, read=read, written=written, share=1.0)

    def fit(ops: tuple[Op, ...]) -> Floats:
        whole = sum(run_seconds(op, speed) for op in ops)
        points = [(x, r, sum(_part_seconds(op, part(op, x, r), speed) for op in ops)) for x, r in _POINTS]
        return by_slice.terms(points, whole, pass_seconds(ops, speed), block.carried_bytes > 0) if ops else ()

    return {"slice_forward": fit(block_trace.forward), "slice_backward": fit(block_trace.backward)}


def _part_seconds(op: Op, part: Op, speed: Speed) -> float:
    """Of a part of an operator: curves are by whole shapes, so the part takes its share by the plain roofline."""
    if speed.model is None:
        return run_seconds(part, speed)
    return run_seconds(op, speed) * plain_seconds(part, speed) / plain_seconds(op, speed)


def _with_accumulation(blocks: list[Block], base: Profile, speed: Speed) -> tuple[Block, ...]:
    """Adding a gradient to another reads both and writes one."""
    seconds = [0.0] * len(blocks)
    for p in base.parameters:
        if p.trainable:
            seconds[p.blocks[0]] += run_seconds(Op("add_", 0.0, 2 * p.bytes, p.bytes), speed)
    return tuple(replace(block, accumulate_s=s) for block, s in zip(blocks, seconds, strict=True))


def _ready(parameters: Sequence[Parameter], at: Trace, speed: Speed) -> tuple[Parameter, ...]:
    """The share of its first block's backward pass that is over when a gradient arrives."""
    over: dict[int, list[float]] = {}  # by backward pass, seconds before each of its operators

    def ready(parameter: Parameter) -> Parameter:
        block = at.blocks[parameter.blocks[0]]
        arrivals = block.arrivals or {}
        if parameter.name not in arrivals:
            return parameter
        ops = block.backward
        if id(ops) not in over:
            over[id(ops)] = list(accumulate((run_seconds(op, speed) for op in ops), initial=0.0))
        passed = over[id(ops)]
        return replace(parameter, ready=passed[arrivals[parameter.name]] / passed[-1] if passed[-1] else 1.0)

    return tuple(map(ready, parameters))
