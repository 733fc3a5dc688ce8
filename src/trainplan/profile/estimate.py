"""An estimated profile: what a model would cost on a device that is not here.

The model is captured and traced on fake tensors (`trace`), so neither its weights nor the device are needed; bytes are
those that autograd would save, seconds come from a roofline (`roofline`). A first answer: what is measured is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from trainplan.cluster.cluster import Device
from trainplan.errors import InputError
from trainplan.profile import by_slice, machine
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.op import Op
from trainplan.profile.profile import Block, Floats, Parameter, Profile, Provenance
from trainplan.profile.roofline import (
    ISSUE_BACKWARD_S,
    ISSUE_FORWARD_S,
    Speed,
    between,
    issue_seconds,
    run_seconds,
    speed_of,
    update_seconds,
)
from trainplan.profile.structure import structure
from trainplan.profile.trace import BlockTrace, Trace, trace, trace_update
from trainplan.workload.workload import Workload

Progress = Callable[[str, float], None]


def estimate(
    workload: Workload,
    device: Device,
    *,
    samples: Sequence[int] | None = None,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Profile:
    """Estimate a workload on a device of the catalogue, for these micro-batch sizes (powers of two up to the batch)."""
    speed = speed_of(device, precision)
    sizes = sorted(set(samples)) if samples is not None else [2**k for k in range(max(1, workload.batch).bit_length())]
    if not sizes or sizes[0] < 1:
        raise InputError(f"micro-batch sizes {list(samples or ())}", "each must be at least 1", "1,2,4,8")
    say = progress or (lambda what, share: None)
    say("capturing the model", 0.0)
    skeleton = Skeleton(workload.build)
    example = workload.inputs(2, 0)
    captured = capture(skeleton.model, example, workload.loss)
    base = structure(captured, workload, example)
    say("tracing its operators", 0.5)
    traces = _traces(captured, workload, sizes, gpu=not speed.is_cpu)
    trained = {p.name: p.count for p in base.parameters if p.trainable}
    update = trace_update(captured, workload, trained, gpu=not speed.is_cpu)
    say("done", 1.0)
    blocks = tuple(
        _block(block, [t.blocks[index] for t in traces], sizes, speed, update.blocks[index], update.tensors[index])
        for index, block in enumerate(base.blocks)
    )
    if base.whole_sequences is None:
        blocks = tuple(_with_slices(block, traces[0].blocks[index], speed) for index, block in enumerate(blocks))
    return replace(
        base,
        device=device.name,
        kind="estimated",
        precision=precision,
        products_in="tf32" if speed.tensor_products else "fp32",
        convolutions_in="tf32" if speed.tensor_convolutions else "fp32",
        optimizer=update.optimizer,
        state_bytes_per_parameter=update.state_bytes / max(1, sum(trained.values())),
        samples=tuple(sizes),
        blocks=tuple(_with_accumulation(b, i, base, speed) for i, b in enumerate(blocks)),
        crossings=tuple(replace(c, saved_by=traces[0].saved_by.get(c.name, ())) for c in base.crossings),
        parameters=tuple(_ready(p, traces[-1], speed) for p in base.parameters),
        provenance=Provenance(
            machine=f"none: estimated for {device.name} from its data sheet",
            made=machine.now(),
            versions=machine.versions(),
        ),
    )


def _traces(captured: Captured, workload: Workload, sizes: list[int], gpu: bool) -> list[Trace]:
    """Traces for all sizes. Two are run, the others lie on the lines through them."""
    small, large = trace(captured, workload, 2, gpu), trace(captured, workload, 4, gpu)
    alike = small.saved_by == large.saved_by and all(
        [op.name for op in a.forward + a.backward] == [op.name for op in b.forward + b.backward]
        for a, b in zip(small.blocks, large.blocks, strict=True)
    )
    if not alike:  # a model that does other things for other batches: then every size is traced
        return [trace(captured, workload, size, gpu) for size in sizes]
    return [_between(small, large, size) for size in sizes]


def _between(small: Trace, large: Trace, samples: int) -> Trace:
    position = (samples - small.samples) / (large.samples - small.samples)

    def bytes_at(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * position))

    def ops_at(a: list[Op], b: list[Op]) -> list[Op]:
        return [between(x, y, position) for x, y in zip(a, b, strict=True)]

    blocks = [
        BlockTrace(
            forward=ops_at(a.forward, b.forward),
            backward=ops_at(a.backward, b.backward),
            saved_bytes=bytes_at(a.saved_bytes, b.saved_bytes),
            forward_workspace_bytes=bytes_at(a.forward_workspace_bytes, b.forward_workspace_bytes),
            backward_workspace_bytes=bytes_at(a.backward_workspace_bytes, b.backward_workspace_bytes),
            arrivals=a.arrivals,
        )
        for a, b in zip(small.blocks, large.blocks, strict=True)
    ]
    return Trace(samples, blocks, small.saved_by)


def _block(
    block: Block, traces: list[BlockTrace], sizes: list[int], speed: Speed, update: list[Op], tensors: int
) -> Block:
    def seconds(ops: list[Op]) -> float:
        return sum(run_seconds(op, speed) for op in ops)

    run, issue = update_seconds(update, tensors, speed)
    return replace(
        block,
        flops=traces[0].flops / sizes[0],
        convolution_flops=traces[0].convolution_flops / sizes[0],
        forward_s=tuple(seconds(t.forward) for t in traces),
        backward_s=tuple(seconds(t.backward) for t in traces),
        forward_issue_s=tuple(issue_seconds(t.forward, ISSUE_FORWARD_S, speed) for t in traces),
        backward_issue_s=tuple(issue_seconds(t.backward, ISSUE_BACKWARD_S, speed) for t in traces),
        update_s=run,
        update_issue_s=issue,
        saved_bytes=tuple(float(t.saved_bytes) for t in traces),
        forward_workspace_bytes=tuple(float(t.forward_workspace_bytes) for t in traces),
        backward_workspace_bytes=tuple(float(t.backward_workspace_bytes) for t in traces),
    )


# Operators of attention, which go by pairs of tokens; all others go by tokens.
ATTENTION = {"attention", "attention_backward", "bmm", "baddbmm", "_softmax", "_softmax_backward_data"}
_POINTS = [(0.25, 0.25), (0.25, 0.5), (0.25, 0.75), (0.25, 1.0), (0.5, 0.5), (0.5, 1.0)]  # share of the tokens, reach


def _with_slices(block: Block, traced: BlockTrace, speed: Speed) -> Block:
    """Seconds of slices of sequences, from the operators of whole ones."""

    def part(op: Op, share: float, reach: float) -> Op:
        amount = share * reach if op.name in ATTENTION else share
        read, written = round(op.read * share), round(op.written * share)
        # All pairs are computed, and then masked.
        return replace(op, flops=op.flops * amount, read=read, written=written, share=1.0)

    def fit(ops: list[Op], whole: float) -> Floats:
        points = [(x, r, sum(run_seconds(part(op, x, r), speed) for op in ops)) for x, r in _POINTS]
        return by_slice.terms(points, whole, whole, block.carried_bytes > 0) if ops else ()

    return replace(
        block,
        slice_forward=fit(traced.forward, block.forward_s[0]),
        slice_backward=fit(traced.backward, block.backward_s[0]),
    )


def _with_accumulation(block: Block, index: int, base: Profile, speed: Speed) -> Block:
    """Adding a gradient to another reads both and writes one."""
    own = [p for p in base.parameters if p.trainable and p.blocks[0] == index]
    adds = [Op("add_", 0.0, 2 * p.bytes, p.bytes) for p in own]
    return replace(block, accumulate_s=sum(run_seconds(op, speed) for op in adds))


def _ready(parameter: Parameter, at: Trace, speed: Speed) -> Parameter:
    """The share of its first block's backward pass that is over when a gradient arrives."""
    block = at.blocks[parameter.blocks[0]]
    if parameter.name not in block.arrivals:
        return parameter
    passed = list(accumulate((run_seconds(op, speed) for op in block.backward), initial=0.0))
    return replace(parameter, ready=passed[block.arrivals[parameter.name]] / passed[-1] if passed[-1] else 1.0)
