"""How long an operator should take on a device that is not here.

Where the device has a file of measurements, or one like it has, the file says (`profile.device`). Elsewhere a roofline
with plain efficiencies does: an operator takes as long as its arithmetic or its memory traffic, whichever is longer, at
the share of the device's peak that such operators reach; plus what every kernel costs. Nothing is fitted to the model
at hand. Each constant says where it is from; those marked *assumed* are round numbers that wait for a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Device
from trainplan.errors import InputError, nearest
from trainplan.profile.composite import COMPOSITE, pieces
from trainplan.profile.device.families import PRECISIONS, convolution_flops, family_of, place, places
from trainplan.profile.device.file import LIKE
from trainplan.profile.device.model import Model, tiled
from trainplan.profile.efficiency import Efficiency, efficiency
from trainplan.profile.op import BIAS, BY_CUDNN, CONVOLUTIONS, Op
from trainplan.profile.winograd import fused, in_steps
from trainplan.units import percent

Pass = Literal["forward", "backward"]
HALF = ("bf16", "fp16")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
ATTENTIONS = {"attention", "attention_backward"}
# Operators that go over their input twice: once for its statistics, once to use them.
READ_TWICE = {"native_batch_norm", "native_batch_norm_backward", "_log_softmax", "_softmax"}

# Share of the peak.
PRODUCT = 0.70  # in fp32 without tensor cores (a GPT of 124 M parameters on an H200: 0.56 to 0.65)
CONVOLUTION = 0.68  # ResNets in fp32 on a Titan RTX (cgnorthcutt/cnn-gpu-benchmarks@eb762d8)
CONVOLUTION_CPU = 0.92  # 3 × 3 at stride 1 on a CPU, which mostly computes what is counted (assumed)
# Of the products that are left where one kernel does Winograd's: at most, since of 64 → 128 channels on a V100 cudnn
# found nothing faster than that (pipedream's layers of VGG-16, with `cudnn.benchmark`).
CONVOLUTION_FUSED = 0.45
CONVOLUTION_TENSOR_CORES = 0.25  # ResNet-50 in tf32 on an H200, batch 32: layers are small for so large a peak
STREAM = Efficiency().stream
DEPTHWISE_STREAM = 0.25  # assumed: MobileNet takes about twice what its bytes would
MISALIGNED = Efficiency().misaligned

# Seconds.
KERNEL_S = Efficiency().kernel_s
# Of the host for an eager operator, with the views and the bookkeeping around it (ResNets and a GPT on the host of an
# H200, torch 2.11: 27 to 42 µs forward, 33 to 51 µs backward).
ISSUE_FORWARD_S, ISSUE_BACKWARD_S = 30e-6, 45e-6
FOREACH_TENSOR_S = 3e-6  # of the host for each tensor that an operator of an update goes over (same machine)
_BESIDE: dict[Pass, str] = {
    "forward": "elementwise",
    "backward": "reduction",
}  # how the bias of a convolution is issued
CPU_OP_S = 5e-6  # of a CPU worker for calling an operator at all (assumed)


@dataclass(frozen=True)
class Speed:
    """Rates of a device for one precision."""

    device: Device
    precision: str
    plain: float  # FLOP/s at peak of units that are no tensor cores
    products: float  # of products of 32-bit numbers
    convolutions: float
    tensor_products: bool  # on tensor cores
    tensor_convolutions: bool
    model: Model | None = None  # of measured curves; None: plain efficiencies
    reaches: Efficiency = field(default_factory=Efficiency)  # these

    @property
    def words(self) -> str:
        """Where the seconds are from, and how good they are."""
        if self.model is None:
            sheet = catalogue.peak(self.device, self.precision)
            return "from its data sheet" if sheet else "from the best that was measured of products and copies"
        file = self.model.file
        error = f": operators within {percent(self.model.error)} (median)" if self.model.error is not None else ""
        if self.model.scaled:
            words = f"scaled from the device file of {file.device} by data sheets (measured {file.made[:10]}){error}"
        else:
            words = f"from its device file (measured {file.made[:10]}, torch {file.versions.get('torch', '?')}){error}"
        if file.host_lacks:
            words += f"; {self._host_words(file.host_lacks)}"
        if file.host_rounds and LIKE in file.host:
            words += f"; its host within {percent(file.host_spread)} (middle half of {file.host_rounds} readings)"
        if file.coverage:
            words += f"; {file.coverage}"
        lacking = [f"{name} as {other}" for name, other in self.model.stood_in.items()]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            words += f"; not measured, so taken: {', '.join(lacking[:3])}{more}"
        return words

    def _host_words(self, lacks: tuple[str, ...]) -> str:
        """What is taken for what a file does not say of its host."""
        if lacks == ("host",):
            there, back = (self.reaches.issue_s or usual for usual in (ISSUE_FORWARD_S, ISSUE_BACKWARD_S))
            taken = f"{there * 1e6:g} µs, and {back * 1e6:g} going back"
            return f"its host was not measured, so an operator is taken to need {taken}"
        how = [f"{name} as {LIKE}" if name != "optimizer" else "steps as on an H200" for name in lacks]
        return f"of its host not measured, so taken: {', '.join(how)}"

    def peak(self, op: Op) -> tuple[float, bool]:
        """(FLOP/s, whether on tensor cores) of an operator's arithmetic."""
        if op.precision in HALF and op.precision in self.device.flops:
            return self.device.flops[op.precision], self.device.flops[op.precision] > self.plain
        if op.name in BY_CUDNN:
            return self.convolutions, self.tensor_convolutions
        return self.products, self.tensor_products

    @property
    def of_cudnn(self) -> Speed:
        """What products run at that cudnn does: as convolutions."""
        return replace(self, products=self.convolutions, tensor_products=self.tensor_convolutions)

    @property
    def is_cpu(self) -> bool:
        return self.device.name == "cpu"


def speed_of(device: Device, precision: str, model: Model | None = None) -> Speed:
    """The rates that apply: torch runs fp32 convolutions in tf32 where a device has it, products only if told to.

    In bf16 or fp16, what is left in 32 bits runs as torch would run it by itself.

    >>> from trainplan.cluster.catalogue import device
    >>> speed_of(device("A100-80"), "fp32").convolutions > speed_of(device("A100-80"), "fp32").products
    True
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision}", "there is no such precision", nearest(precision, PRECISIONS))
    have = ", ".join(device.flops)
    if precision not in device.flops and "fp32" in device.flops:
        raise InputError(f"an estimate in {precision} for {device.name}", f"the device has {have}", have)
    # Measured curves stand for each other where one is missing; a number that nobody gave has nothing to stand for it.
    if "fp32" not in device.flops and (model is None or device.efficiency or precision not in device.flops):
        why = f"its peak in fp32 is not known, only in {have}, and numbers that are left in 32 bits run at it"
        instead = "giving it in a cluster file, as flops: {fp32: 20TFLOP/s}; of a device file, measuring it again"
        raise InputError(f"an estimate in {precision} for {device.name}", why, instead)
    plain, fast = device.flops.get("fp32") or _ceiling(model), device.flops.get("tf32", 0.0)
    cores = fast > plain
    return Speed(
        device=device,
        precision=precision,
        plain=plain,
        products=fast if precision == "tf32" else plain,
        convolutions=max(plain, fast),
        tensor_products=cores and precision == "tf32",
        tensor_convolutions=cores,
        model=None if device.efficiency else model,
        reaches=efficiency(device),
    )


def _ceiling(model: Model | None) -> float:
    """What stands for the peak in fp32 where a file was measured without it."""
    return model.ceiling("fp32") if model is not None else 0.0


def run_seconds(op: Op, speed: Speed) -> float:
    """Seconds of one operator on a device that does nothing else.

    >>> from trainplan.cluster.cluster import Device
    >>> toy = Device("toy", 2**30, {"fp32": 1e12}, 1e12)
    >>> square = Op("mm", 2 * 1024**3, 8 * 1024**2, 4 * 1024**2, (1024, 1024, 1024))
    >>> round(run_seconds(square, speed_of(toy, "fp32")) * 1e3, 3)  # 2.147 GFLOP at 0.70 TFLOP/s
    3.071
    """
    if speed.model is not None:
        at = places(op, "tf32" if _in_tf32(op, speed) else "fp32")
        return sum(speed.model.seconds(place) for place in at)
    return plain_seconds(op, speed)


def pass_seconds(ops: Sequence[Op], speed: Speed) -> float:
    """Seconds of operators one after the other, as in a training that goes on for long.

    The more of its units they use on average, the hotter a device gets, and the slower are those that use them.
    """
    model = speed.model
    if model is None:
        return sum(plain_seconds(op, speed) for op in ops)
    at = [place for op in ops for place in places(op, "tf32" if _in_tf32(op, speed) else "fp32")]
    taken = [model.seconds(place) for place in at]
    cold = sum(taken)
    uses = [model.use(place) for place in at]
    average = sum(use * seconds for use, seconds in zip(uses, taken, strict=True)) / cold if cold else 0.0
    return cold + sum(
        seconds * use * model.slowed(place.precision, average)
        for place, use, seconds in zip(at, uses, taken, strict=True)
        if use
    )


def _in_tf32(op: Op, speed: Speed) -> bool:
    return speed.tensor_convolutions if op.name in BY_CUDNN else speed.tensor_products


def plain_seconds(op: Op, speed: Speed) -> float:
    """Seconds of one operator by the device's peaks and plain efficiencies."""
    if op.name in COMPOSITE:
        like = speed.of_cudnn if op.name in BY_CUDNN else speed
        return sum(count * plain_seconds(part, like) for part, count in pieces(op))
    arithmetic, reaches = 0.0, speed.reaches
    stream = reaches.stream
    peak, cores = speed.peak(op)
    if op.name in CONVOLUTIONS:
        groups = op.shape[-1] if op.shape else 1
        nine = op.shape[4:6] == (9, 1)
        dense = CONVOLUTION_CPU if speed.is_cpu and nine else CONVOLUTION
        arithmetic = op.flops / (peak * (CONVOLUTION_TENSOR_CORES if cores else dense))
        if op.shape and not cores and not speed.is_cpu:
            arithmetic = min(arithmetic, _with_fewer_products(op, peak, speed))
        if groups > 1:
            stream = DEPTHWISE_STREAM
    elif op.name in ATTENTIONS:
        arithmetic = op.flops * op.share / (peak * reaches.attention)
    elif op.flops:
        share, flops = PRODUCT, op.flops
        if cores:
            share = reaches.product * (reaches.misaligned if any(size % 8 for size in op.shape) else 1.0)
            flops = _in_tiles(op, speed.device.processors)
        arithmetic = flops / (peak * share)
    moved = op.read * (2 if op.name in READ_TWICE else 1) + op.written
    traffic = moved / (speed.device.memory_rate * stream)
    return max(arithmetic, traffic) / reaches.sustained + (CPU_OP_S if speed.is_cpu else reaches.kernel_s)


def _with_fewer_products(op: Op, peak: float, speed: Speed) -> float:
    """Seconds of a convolution by Winograd's algorithm, where cudnn would take it (`winograd`); else endless."""
    once = convolution_flops(op.shape)
    if speed.reaches.searched:
        if (fewer := in_steps(op.shape)) is None:
            return inf
        left, moved = fewer
        return op.flops * left / (peak * PRODUCT) + op.flops / once * moved / (
            speed.device.memory_rate * speed.reaches.stream
        )
    if (share := fused(op.shape)) is None:
        return inf
    weights = once if op.name == "convolution_backward" else 0.0  # of their gradient there is none
    return (weights / CONVOLUTION + (op.flops - weights) * share / CONVOLUTION_FUSED) / peak


def _in_tiles(op: Op, processors: int) -> float:
    """FLOPs of a product with whole tiles in whole waves over the processors."""
    if not processors or len(op.shape) != 3:
        return op.flops
    rows, inner, columns = op.shape
    batch = max(1, round(op.flops / max(1.0, 2.0 * rows * inner * columns)))
    return tiled(batch, rows, inner, columns, processors)


def streaming(size: float, speed: Speed) -> float:
    """Seconds in which so many bytes are read and written."""
    rate = speed.model.memory_rate if speed.model is not None else speed.device.memory_rate * speed.reaches.stream
    return size / rate


def issue_seconds(ops: Sequence[Op], passing: Pass, speed: Speed) -> float:
    """Seconds of the host that issues these operators in a pass; on a CPU the host is the device."""
    if speed.is_cpu:
        return 0.0
    usual = speed.reaches.issue_s or {"forward": ISSUE_FORWARD_S, "backward": ISSUE_BACKWARD_S}[passing]
    if speed.model is None:
        return len(ops) * usual
    host = speed.model.file.host
    # A family whose issuing was not measured is issued like what is element by element.
    like = host.get(LIKE)
    total = 0.0
    for op in ops:
        known = host.get(family_of(op.name), like)
        total += usual if known is None else getattr(known, f"{passing}_s")
        if op.name in CONVOLUTIONS and BIAS in op.layout:  # cudnn has none, so it is added afterwards, and summed
            beside = host.get(_BESIDE[passing], like)
            total += usual if beside is None else getattr(beside, f"{passing}_s")
    return total


def update_seconds(
    ops: Sequence[Op], tensors: int, speed: Speed, whole: tuple[int, int] | None = None
) -> tuple[float, float]:
    """(run, issue) of an optimizer's step: a GPU goes over all tensors with one kernel for each kind of operator.

    `whole` are the bytes and the tensors of the step that these are a part of.
    """
    if not ops:
        return 0.0, 0.0
    if speed.model is not None:
        if speed.is_cpu:
            return sum(run_seconds(op, speed) for op in ops), 0.0
        return _measured_update(ops, tensors, speed.model, whole)
    traffic = sum(op.read + op.written for op in ops) / (speed.device.memory_rate * speed.reaches.stream)
    if speed.is_cpu:
        return traffic + len(ops) * CPU_OP_S, 0.0
    kinds = len(ops) / max(1, tensors)  # operators for each tensor
    return traffic + kinds * speed.reaches.kernel_s, len(ops) * FOREACH_TENSOR_S


def _measured_update(
    ops: Sequence[Op], tensors: int, model: Model, whole: tuple[int, int] | None
) -> tuple[float, float]:
    """The same by measured curves: the part that these tensors have in one step over all."""
    at_once = any("foreach" in op.name or "fused" in op.name for op in ops)  # else they are listed tensor by tensor
    kinds = len(ops) if at_once else max(1.0, len(ops) / max(1, tensors))
    moved = moved_by(ops)
    all_moved, all_tensors = (max(1, size) for size in whole or (moved, tensors))
    variant = "fused" if any("fused" in op.name for op in ops) else "foreach"
    at = place("optimizer", variant, "fp32", (max(1, round(all_moved / kinds)), all_tensors))
    run = max(moved / model.memory_rate, moved / all_moved * kinds * model.seconds(at))
    each = (model.file.update_tensor_s or FOREACH_TENSOR_S) + model.file.update_op_s / all_tensors
    return run, kinds * tensors * each


def made_by(ops: Sequence[Op]) -> int:
    """Bytes of new tensors that an optimizer's step over all tensors at once has at the same time.

    >>> made_by([Op("mul_", 0.0, 8, 8), Op("sqrt", 0.0, 8, 8), Op("sqrt", 0.0, 4, 4), Op("addcdiv_", 0.0, 24, 8)])
    12
    """
    sums: dict[str, int] = {}
    for op in ops:
        if not op.name.endswith("_"):
            sums[op.name] = sums.get(op.name, 0) + op.written
    return max(sums.values(), default=0)


def moved_by(ops: Sequence[Op]) -> int:
    """Bytes that operators read and write."""
    return sum(op.read + op.written for op in ops)


def between(small: Op, large: Op, position: float) -> Op:
    """The operator for another number of samples: everything about it is a straight line in the samples.

    >>> between(Op("mm", 10.0, 4, 2, (2, 8, 8)), Op("mm", 20.0, 6, 4, (4, 8, 8)), 2.0)
    Op(name='mm', flops=30.0, read=8, written=6, shape=(6, 8, 8), share=1.0, precision='', layout='', elements=0)
    """

    def line(a: float, b: float) -> float:
        return a + (b - a) * position

    return Op(  # in full: `replace` takes many times as long, and a variant of a profile asks for hundreds
        small.name,
        line(small.flops, large.flops),
        round(line(small.read, large.read)),
        round(line(small.written, large.written)),
        tuple([round(line(a, b)) for a, b in zip(small.shape, large.shape, strict=True)]),
        small.share,
        small.precision,
        small.layout,
        round(line(small.elements, large.elements)),
    )
