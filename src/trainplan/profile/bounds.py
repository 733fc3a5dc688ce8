"""Under which roof each operator of a model is: its arithmetic intensity, and what bounds it on a device.

    intensity = FLOPs / bytes read and written;   compute-bound above peak / memory rate, memory-bound below

Profiles count the FLOPs of products and convolutions only, as MFU does. Here every operator counts something for each
number that it makes (`OPERATIONS`), so that the intensity of a ReLU or a norm can be told, too; and bytes are those of
numbers: where a pool found its maxima is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainplan.cluster import catalogue
from trainplan.profile.device.families import ITEM_BYTES, family_of
from trainplan.profile.op import Op
from trainplan.profile.roofline import Speed, issue_seconds, run_seconds
from trainplan.profile.traced import Trace

if TYPE_CHECKING:
    from trainplan.workload.workload import Workload

# Operations for each element, by a word in the operator's name; the first that fits counts. A logarithm, an exponential
# or a root is one operation, as in a count by instructions.
OPERATIONS = (
    ("layer_norm_backward", 12.0), ("batch_norm_backward", 12.0), ("rms_norm_backward", 9.0),
    ("layer_norm", 8.0), ("batch_norm", 8.0), ("group_norm", 8.0), ("rms_norm", 5.0),
    ("softmax_backward", 4.0), ("softmax", 5.0), ("gelu_backward", 12.0), ("gelu", 8.0), ("silu", 4.0), ("tanh", 4.0),
    ("sigmoid", 3.0), ("dropout", 2.0), ("addcmul", 3.0), ("addcdiv", 3.0), ("lerp", 3.0),
)  # fmt: skip
_MOVES = ("copy", "clone", "cat", "embedding", "index", "gather", "zeros", "ones", "fill", "zero_", "slice", "select")


@dataclass(frozen=True)
class Bound:
    """Equal operators of one pass, and the roof that they are under."""

    block: str  # the first that has it
    passing: str  # forward or backward
    name: str
    family: str
    shape: tuple[int, ...]
    precision: str
    count: int
    flops: float  # of one
    bytes: float
    peak: float  # FLOP/s that its arithmetic could have
    bound: str  # compute or memory
    seconds: float  # of all of them

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Bounds:
    """A step of a model on a device, operator by operator."""

    workload: str
    device: str
    words: str  # where the seconds are from
    batch: int
    precision: str
    memory_rate: float
    rows: tuple[Bound, ...]  # the longest first
    run_s: float  # of forward and backward on the device
    issue_s: float  # of the host that issues them
    peak_known: bool

    @property
    def ideal_s(self) -> float:
        """What the arithmetic alone would take at the peaks."""
        return sum(row.count * row.flops / row.peak for row in self.rows if row.peak and row.family in _COUNTED)


_COUNTED = ("product", "convolution", "attention")


def work(op: Op) -> tuple[float, float]:
    """FLOPs of an operator, all kinds counted, and the bytes of the numbers that it reads and writes.

    >>> relu = Op("relu", 0.0, 2 * 4096, 2 * 4096, precision="bf16", elements=4096)
    >>> flops, moved = work(relu)
    >>> flops / moved
    0.25
    """
    moved = float(op.read + op.written)
    if op.flops:
        return op.flops * op.share, moved
    size = ITEM_BYTES.get(op.precision, 4)
    if "pool" in op.name and op.shape:
        # A maximum has a number and, in eight bytes, its place.
        placed = "indices" in op.name
        made = (op.read if op.name.endswith("backward") else op.written) / (size + (8 if placed else 0))
        if op.name.endswith("backward"):
            return float(op.elements), moved - 8.0 * made if placed else moved
        return op.shape[0] * made, op.read + size * made
    if any(word in op.name for word in _MOVES):
        return 0.0, moved
    each = next((count for word, count in OPERATIONS if word in op.name), 1.0)
    return each * op.elements, moved


def bounds(found: Trace, blocks: Sequence[str], workload: str, speed: Speed) -> Bounds:
    """The roofs over a traced model's operators; `blocks` are the names of its blocks."""
    rows: dict[tuple[str, Op], list[str]] = {}
    issue = 0.0
    for name, block in zip(blocks, found.blocks, strict=True):
        for passing, ops in (("forward", block.forward), ("backward", block.backward)):
            issue += issue_seconds(ops, "forward" if passing == "forward" else "backward", speed)
            for op in ops:
                rows.setdefault((passing, op), []).append(name)
    made = [_row(op, passing, names, speed) for (passing, op), names in rows.items()]
    model = speed.model
    return Bounds(
        workload=workload,
        device=speed.device.name,
        words=speed.words,
        batch=found.samples,
        precision=speed.precision,
        memory_rate=speed.device.memory_rate,
        rows=tuple(sorted(made, key=lambda row: -row.seconds)),
        run_s=sum(row.seconds for row in made),
        issue_s=issue,
        peak_known=(
            bool(model.file.peak)
            if model is not None and not model.scaled
            else catalogue.peak(speed.device, speed.precision) is not None
        ),
    )


def _row(op: Op, passing: str, names: list[str], speed: Speed) -> Bound:
    flops, moved = work(op)
    family = family_of(op.name)
    # What is not a product runs on plain units, whatever it reads.
    peak = speed.peak(op)[0] if family in _COUNTED else speed.plain
    compute = moved > 0 and flops / moved > peak / speed.device.memory_rate
    return Bound(
        block=names[0],
        passing=passing,
        name=op.name,
        family=family,
        shape=op.shape,
        precision=op.precision,
        count=len(names),
        flops=flops,
        bytes=moved,
        peak=peak,
        bound="compute" if compute else "memory",
        seconds=len(names) * run_seconds(op, speed),
    )


def in_half(workload: Workload, precision: str) -> Workload:
    """The workload with all its numbers in bf16 or fp16; any other precision leaves them as they are."""
    from dataclasses import replace

    import torch
    from torch import Tensor, nn

    from trainplan.workload.batch import each_tensor
    from trainplan.workload.workload import Batch

    if precision not in ("bf16", "fp16"):
        return workload
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def build() -> nn.Module:
        return workload.build().to(dtype)

    def inputs(samples: int, seed: int) -> Batch:
        return each_tensor(workload.inputs(samples, seed), narrow)

    return replace(workload, build=build, inputs=inputs)
