"""What a method does to communication, batch, FLOPs and memory: the columns of a published table, counted.

Gusak and others (2022, table 1) say of every method to train large networks whether it raises or lowers what is moved
in an iteration (activations, weights, and the gradients of both), the batch that a device takes, and FLOPs. Here each
is a plan, its program is lowered, and operations are counted: an arrow is a number over that of the method that it is
compared with. Methods that no plan stands for yet have the keys of the systems that will carry them, and no numbers.

An iteration is a step of the same batch under all methods. Bytes are those that all devices send together, to each
other or to their hosts and back. Of the batch with which a method just fits, those samples are counted that go through
one device: of replicas a part, of stages all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse, text
from trainplan.predict.planned import planned
from trainplan.predict.predict import predict
from trainplan.profile.profile import Amount, Portion, Profile
from trainplan.program.lower import lower
from trainplan.program.ops import COPIES, Kind
from trainplan.program.program import Program
from trainplan.program.traffic import sent
from trainplan.solve.offload import all_away, offloaded
from trainplan.solve.resolve import resolve

SAME = 0.02  # a change below is none: what is left of rounding, of counts and of losses
ALONE, REPLICAS = "one device", "data parallelism"

# What an operation moves; sums of counts and losses are next to nothing, and of neither kind.
MOVES: dict[Kind, str] = {
    Kind.SEND_F: "activations", Kind.OFFLOAD: "activations", Kind.FETCH: "activations",
    Kind.SEND_W: "weights", Kind.GATHER_F: "weights", Kind.GATHER_B: "weights",
    Kind.SEND_B: "activation_gradients",
    Kind.SEND_G: "weight_gradients", Kind.REDUCE_GRAD: "weight_gradients", Kind.SCATTER_GRAD: "weight_gradients",
    # What ranks that share blocks exchange inside a pass.
    Kind.F: "activations", Kind.R: "activations", Kind.B: "activation_gradients",
}  # fmt: skip
PASSES = {Kind.F: 1, Kind.R: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}  # FLOPs of a pass, in forward passes


@dataclass(frozen=True)
class Method:
    """A row of the table: the plan that stands for it, and what the survey says."""

    name: str
    line: str  # with N devices; "": there is no such plan yet
    beside: str  # the method that it is compared with
    survey: str  # activations, weights, gradients of both, batch, FLOPs; "?": not to be read, "": not in the table
    keys: tuple[str, ...] = ()  # of the systems that carry it, or will


METHODS = (
    Method(ALONE, "dp=1", "", "", ("single",)),
    Method("rematerialisation", "dp=1 recompute=full", ALONE, "= = = = ↑ ↑"),
    Method("offloading of activations", "dp=1 offload=activations", ALONE, "↑ = = = ↑ =", ("zero-r",)),
    Method("offloading of weights", "", ALONE, "= ↑ = ↑= ↑ =", ("l2l", "granular", "zero-infinity")),
    Method("offloading of any tensors", "", ALONE, "↑= ↑= = ↑= ↑ =", ("tflms", "autoswap", "swapadvisor")),
    Method("activation gradients of fewer bits", "", ALONE, "↓ = = = ↑ ↓=", ("fourbit", "fewbit")),
    Method("approximate products", "", ALONE, "↓ = = = ↑ ?", ("randomised-linear",)),
    Method("weight gradients of fewer bits", "", ALONE, "= = = ↓ ↑ ↓=", ("half-gradients", "qsgd", "signsgd")),
    Method(REPLICAS, "dp=N", ALONE, "? ? ? ? × =", ("ddp",)),
    Method("partitioned optimizer states", "dp=N zero=1", REPLICAS, "= ↑ = = ↑ =", ("zero1",)),
    Method("… and gradients", "dp=N zero=2", REPLICAS, "= ↑ = = ↑ =", ("zero2",)),
    Method("… and parameters", "dp=N zero=3", REPLICAS, "= ↑ = = ↑ =", ("zero3",)),
    Method("model parallelism", "pp=N schedule=naive recompute=none", REPLICAS, "↑ = ↑ ↓ ↑ =", ("naive",)),
    Method("pipeline parallelism", "pp=N schedule=gpipe micro=8 recompute=none", REPLICAS, "↑ = ↑ ↑↓ ↑ =", ("gpipe",)),
    Method("pipelines, asynchronous", "", REPLICAS, "↑ = ↑ ↑↓ ↑ =", ("pipedream", "2bw", "pipemare")),
    Method("tensor slicing", "tp=N", REPLICAS, "", ("megatron",)),
)  # fmt: skip


@dataclass(frozen=True)
class Influence:
    """What one method does in a step: bytes over all devices, FLOPs, bytes of the fullest device; and the most samples
    that go through a device and fit."""

    method: str
    beside: str
    plan: str
    devices: int
    activations: int
    weights: int
    activation_gradients: int
    weight_gradients: int
    samples: int
    flops: float
    peak_bytes: int
    step_s: float


COLUMNS = tuple(field.name for field in fields(Influence))[4:-1]  # those that have arrows


def influences(
    profile: Profile, cluster: Cluster, batch: int, report: Callable[[str, float], None]
) -> Iterator[Influence]:
    """A row for every method that there is a plan for."""
    there = [method for method in METHODS if method.line]
    for number, method in enumerate(there):
        report(method.name, number / len(there))
        line = method.line.replace("N", f"{cluster.world}")
        plan = resolve(parse(line), profile, cluster, batch)
        if plan.offload != "none":  # else only what has to go does, and at this batch that may be nothing
            plan = all_away(plan, profile, cluster, batch)
        found = predict(plan, profile, cluster, batch)
        program = lower(plan, planned(plan, profile, cluster), batch, cluster.backend, steps=1)
        most = _most_samples(replace(plan, away=()), profile, cluster)
        yield Influence(
            method.name, method.beside, text(plan), plan.world, **bytes_moved(program), samples=most // plan.dp,
            flops=flops(program, profile), peak_bytes=found.peak_bytes, step_s=found.step_s,
        )  # fmt: skip


def arrow(number: float, beside: float) -> str:
    """Whether a number is more than, less than or the same as that of the method beside it.

    >>> arrow(3, 0), arrow(1, 2), arrow(100, 101), arrow(0, 0)
    ('↑', '↓', '=', '=')
    """
    if abs(number - beside) <= SAME * beside:
        return "="
    return "↑" if number > beside else "↓"


def agrees(ours: str, theirs: str) -> bool:
    """Whether an arrow is what the survey says: one of several, or no rise where it has a cross. (What cannot be read
    agrees with all.)

    >>> agrees("↑", "↑="), agrees("=", "↑"), agrees("↓", "×"), agrees("↑", "×"), agrees("↓", "?")
    (True, False, True, False, True)
    """
    return theirs == "?" or (ours != "↑" if theirs == "×" else ours in theirs)


def bytes_moved(program: Program) -> dict[str, int]:
    """Bytes of a step that all devices send, by what they are."""
    total = dict.fromkeys(COLUMNS[:4], 0)
    for op in range(len(program)):
        kind = Kind(int(program.kind[op]))
        if kind in MOVES:
            total[MOVES[kind]] += int(program.bytes[op]) if kind in COPIES else sum(sent(program, op).values())
    return {name: size // program.steps for name, size in total.items()}


def flops(program: Program, profile: Profile) -> float:
    """FLOPs of a step on all devices: a backward pass has twice those of forward, and recomputation counts."""
    total = 0.0
    for number in program.cost.tolist():
        c = program.classes[number]
        if c.kind in PASSES:
            blocks = profile.blocks[c.first : c.last]
            # Of what is recomputed, all but what backward does not need.
            forward = sum(block.flops - (block.tail_flops if c.kind is Kind.R else 0.0) for block in blocks)
            total += PASSES[c.kind] * (c.until - c.since) * forward * _whole(c.samples)
    return total / program.steps


def _whole(samples: Amount) -> float:
    if isinstance(samples, Portion):
        raise PlanError("FLOPs of slices of sequences", "only whole samples are counted here", "a plan without slices")
    return samples


def _most_samples(plan: Plan, profile: Profile, cluster: Cluster) -> int:
    """The largest batch with which a plan fits, in steps of a sample for every device; 0: not even the smallest."""
    foresee = offloaded if plan.offload != "none" else predict

    def fits(samples: int) -> bool:
        return foresee(plan, profile, cluster, samples * plan.world).fits

    fewest = -(-plan.dp * plan.micro // plan.world)
    if not fits(fewest):
        return 0
    low, high = fewest, 2 * fewest
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * plan.world
