"""The numbers of an exchange that is decided while running, where they are left open.

First those of the papers and programs that it is from; then the clock tries others, and takes the best, or what hardly
differs from it and has fewer rounds:

    horovod         threshold and cycle: 64 MiB and 5 ms, and from there larger and smaller ones
    p3              slice: 40,000 numbers, and parts of the largest gradient; threshold: nothing is put together, and
                    from there more and more
    bytescheduler   the same; slice and credit: 10⁶ and 4 · 10⁶ numbers, and credits for 1, 2 and 4 slices of each size
    pace            which gradients are fused: by its dynamic program (`fusion.py`); the slice as above
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.decided import MOST_PARTS
from trainplan.plan.plan import EXCHANGE_FIELDS, Plan, Request
from trainplan.plan.rules import micro_batches
from trainplan.plan.text import brief
from trainplan.predict import collectives
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.program.agenda import GRANULARITY, whole_threshold
from trainplan.program.lower.buckets import stage_buckets
from trainplan.solve.exchange import no_larger, whole_bucket
from trainplan.solve.fusion import Tensor, fused
from trainplan.units import KIB, MIB

# Numbers (of a tensor) or seconds, as published.
P3_SLICE, SCHEDULER_SLICE, SCHEDULER_CREDIT = 40_000, 1_000_000, 4_000_000
THRESHOLD, CYCLE = 64 * MIB, 5e-3
_THRESHOLDS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
_SMALL_THRESHOLDS = (64 * KIB, 256 * KIB)  # that are tried besides where slices go by priority
_CYCLES = (5e-4, 1e-3, 2.5e-3, 5e-3)
_CREDITS = (1, 2, 4)  # slices
# By so much a step may be longer if it has fewer rounds: each wakes threads on all ranks, which the clock leaves out.
HARDLY = 0.02
_TURNS = 5  # slices that are tried with each of them
_FEW_PARTS = 384  # what a trial of the clock has at most
_MANY = 48  # gradients; where there are more, those of a block are fused before anything is worked out

Best = Callable[[Sequence[Prediction]], Prediction]


def check_numbers(request: Request, profile: Profile, world: int) -> None:
    """Refused where what goes at once is larger than all gradients together, and than what was published, which any
    model may be asked for; and where credits are smaller than what they are for. Such numbers mean the same as others
    do, and nobody would see."""
    asked = f"plan {brief(request)!r}"
    own = [p.bytes for p in profile.parameters if p.trainable]
    published = _published(request.exchange or "", profile)
    published["threshold"] += GRANULARITY * world  # which is rounded up
    for field in EXCHANGE_FIELDS.get(request.exchange or "", ()):
        size = getattr(request, field)
        if field in published and size is not None and size > published[field]:
            no_larger(field, size, profile, asked)
    if request.credit is None or request.exchange != "bytescheduler":
        return
    if request.credit < 1:
        why = f"exchange=bytescheduler wants credit of 1 or more, and it is {request.credit}"
        raise PlanError(asked, why, f"credit={max(published['credit'], request.slice or 0)}B, or leaving credit out")
    # Without a slice: the smallest that there may be, since then it is chosen with the credit.
    least = -(-sum(own) // MOST_PARTS) if request.slice is None else min(request.slice, max(own, default=0))
    if request.credit < least:
        why = f"one slice is always let go, and a credit of {request.credit} bytes is less than one of {least}"
        # As little as that is accepted, and slow: every slice has its round. Whoever asked for none gets larger ones.
        first = "leaving credit out, or " if request.slice is None else ""
        raise PlanError(asked, why, f"{first}credit={least}B")


def begun(sketch: Plan, request: Request, profile: Profile, cluster: Cluster, batch: int) -> Plan:
    """The sketch with a number wherever its exchange wants one: what was asked for, or what was published."""
    wanted = EXCHANGE_FIELDS.get(sketch.exchange, ())
    # Also what does not belong here: the rules say so.
    given: dict[str, Any] = {field: getattr(request, field) for field in _ALL if getattr(request, field) is not None}
    if not wanted:
        return replace(sketch, **given)
    whole = sum(p.bytes for p in profile.parameters if p.trainable)
    least = max(1, -(-whole // MOST_PARTS))  # more parts than that are refused
    published = _published(sketch.exchange, profile)
    usual: dict[str, Any] = {
        "threshold": whole_threshold(published["threshold"], _local(sketch, cluster)),
        "cycle": CYCLE,
        "slice": max(min(published["slice"], given.get("credit", published["slice"])), least),
        "credit": max(published["credit"], given.get("slice", 0)),
    }
    numbers: dict[str, Any] = {field: given.pop(field, usual.get(field)) for field in wanted if field != "fused"}
    found = replace(sketch, **given, **numbers)
    if "fused" in wanted and request.fused is None and sketch.dp > 1:
        found = replace(found, fused=_fused(found, profile, cluster, batch))
    return found


_ALL = ("threshold", "cycle", "slice", "credit", "fused")


def _published(exchange: str, profile: Profile) -> dict[str, int]:
    """Bytes that go at once, as published in numbers of a tensor."""
    own = [p for p in profile.parameters if p.trainable]
    item = max((p.bytes // max(1, p.count) for p in own), default=4)
    slices = SCHEDULER_SLICE if exchange == "bytescheduler" else P3_SLICE
    threshold = THRESHOLD if exchange == "horovod" else 0
    return {"threshold": threshold, "slice": slices * item, "credit": SCHEDULER_CREDIT * item}


def _local(plan: Plan, cluster: Cluster) -> int:
    """Ranks of a node."""
    nodes = [cluster.node_of(rank) for rank in range(min(plan.world, cluster.world))]
    return max(nodes.count(node) for node in set(nodes))


def _fused(plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> tuple[int, ...]:
    """PACE's fusion with the seconds of the profile and the cluster."""
    samples = max(max(sizes) for sizes in micro_batches(plan, batch))
    own = [p for p in profile.parameters if p.trainable]
    alone = stage_buckets(profile, own, 0, plan.blocks, 1, samples)
    if not alone:
        return ()
    members = tuple(range(min(plan.dp, cluster.world)))
    largest = max(bucket.bytes for bucket in alone)
    latency = collectives.all_reduce(cluster, members, 8).seconds
    each = max(0.0, collectives.all_reduce(cluster, members, largest).seconds - latency) / largest
    backward = profile.total("backward_s", 0, plan.blocks, samples)
    forward = [profile.total("forward_s", block, block + 1, samples) for block in range(plan.blocks)]
    tensors, counts = list[Tensor](), list[int]()
    for bucket in alone:
        one = Tensor(bucket.ready * backward, each * bucket.bytes, bucket.block, str(bucket.element))
        before = tensors[-1] if tensors else None
        if len(alone) > _MANY and before is not None and (before.block, before.kind) == (one.block, one.kind):
            tensors[-1] = Tensor(one.ready, before.seconds + one.seconds, one.block, one.kind)
            counts[-1] += 1
        else:
            tensors.append(one)
            counts.append(1)
    # A sum has its round of bits before it.
    found, at, sizes = fused(tensors, forward, backward, 2 * latency).counts, 0, []
    for count in found:
        sizes.append(sum(counts[at : at + count]))
        at += count
    return tuple(sizes)


def tuned(
    found: Prediction, request: Request, profile: Profile, try_out: Callable[[Plan], Prediction], best: Best
) -> Prediction:
    """The best by the clock of the numbers that were left open."""
    wanted = EXCHANGE_FIELDS.get(found.plan.exchange, ())
    left = [field for field in wanted if getattr(request, field) is None]

    def others(field: str, values: Sequence[Any]) -> None:
        nonlocal found
        plan = found.plan
        trials = [replace(plan, **{field: value}) for value in dict.fromkeys(values) if value != getattr(plan, field)]
        found = best([found, *(try_out(trial) for trial in trials)])

    def fewest(field: str, values: Sequence[Any]) -> None:
        """The largest of these, and so the fewest rounds, with which a step is hardly longer than with the best."""
        nonlocal found
        plan, own = found.plan, getattr(found.plan, field)
        falling = sorted({own, *values}, reverse=True)
        trials = [found if value == own else try_out(replace(plan, **{field: value})) for value in falling]
        found = fastest = best(trials)
        if fastest.fits:
            found = next(t for t in trials if t.fits and t.step_s <= (1 + HARDLY) * fastest.step_s)

    whole = sum(p.bytes for p in profile.parameters if p.trainable)
    if "threshold" in left:
        tried = _THRESHOLDS if found.plan.exchange == "horovod" else (*_SMALL_THRESHOLDS, *_THRESHOLDS)
        fewest("threshold", [size for size in tried if size < whole] + [-(-whole // MIB) * MIB])
    if "cycle" in left:
        fewest("cycle", _CYCLES)
    if "slice" in left and "credit" not in left:
        most = found.plan.credit or whole
        others("slice", [size for size in _slices(found.plan, profile) if size <= most])
    if "fused" in left:  # the dynamic program takes slices for infinitely small
        others("fused", [(1,) * sum(found.plan.fused)])
        if "slice" in left:
            others("slice", _slices(found.plan, profile))
    if "credit" in left:
        sizes = _slices(found.plan, profile)[:_TURNS] if "slice" in left else [found.plan.slice]
        most = whole_bucket(profile)
        pairs = dict.fromkeys((size, max(size, min(count * size, most))) for size in sizes for count in _CREDITS)
        found = best([found, *(try_out(replace(found.plan, slice=size, credit=credit)) for size, credit in pairs)])
    return found


def _slices(plan: Plan, profile: Profile) -> list[int]:
    """Slices worth trying: the largest tensor whole, and its halves, as long as there are not too many of them."""
    own = [p.bytes for p in profile.parameters if p.trainable]
    if plan.fused:
        ends = [sum(plan.fused[: n + 1]) for n in range(len(plan.fused))]
        own = [sum(own[end - count : end]) for end, count in zip(ends, plan.fused, strict=True)]
    largest = max(own, default=1)
    sizes = [math.ceil(largest / 2**k) for k in range(8)]
    return [size for size in sizes if sum(math.ceil(one / size) for one in own) <= max(_FEW_PARTS, 2 * len(own))]
