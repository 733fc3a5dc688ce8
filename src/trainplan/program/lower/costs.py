"""Cost classes: operations that take equally long share one, so that seconds are worked out once a class."""

from __future__ import annotations

import numpy as np

from trainplan.program.lower.edges import message_bytes
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import SENDS, SPECS, Kind
from trainplan.program.program import CostClass, Ints


def cost_classes(
    layout: Layout, kind: Ints, stage: Ints, unit: Ints, micro: Ints, peer: Ints, replica: Ints, adds: Ints,
    last: Ints, group: Ints, spans: tuple[tuple[int, ...], ...],
) -> tuple[Ints, tuple[CostClass, ...], Ints]:  # fmt: skip
    """Class of each operation, the classes, and the payload bytes of each operation."""
    table = np.array(layout.sizes, dtype=np.int64)  # replica, micro-batch → samples
    about_batch = np.isin(kind, (Kind.REDUCE_GRAD, Kind.COUNT, Kind.LOSS, Kind.NORM, Kind.STEP))
    samples = np.where(about_batch, 0, table[replica, np.where(about_batch, 0, micro)])
    adds = adds * np.isin(kind, (Kind.B, Kind.I, Kind.W))
    last = last * (kind == Kind.B)
    columns = (kind, stage, unit, peer + 1, replica, samples, adds, last, group + 1)
    key = np.zeros(len(kind), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, cost = np.unique(key, return_index=True, return_inverse=True)
    classes = tuple(
        _class(
            layout, Kind(int(kind[i])), int(stage[i]), int(unit[i]), int(peer[i]), int(replica[i]), int(samples[i]),
            bool(adds[i]), bool(last[i]), spans[group[i]] if group[i] >= 0 else (),
        )
        for i in first
    )  # fmt: skip
    return (
        cost.astype(np.int64),
        classes,
        np.array([c.bytes for c in classes], dtype=np.int64)[cost]
        * (np.array([SPECS[c.kind].message or SPECS[c.kind].collective for c in classes])[cost]),
    )


def _class(
    layout: Layout, kind: Kind, stage: int, unit: int, peer: int, replica: int, samples: int, adds: bool,
    last_pass: bool, members: tuple[int, ...],
) -> CostClass:  # fmt: skip
    plan, profile = layout.plan, layout.profile
    first, last = plan.bounds[stage]
    rank = layout.rank(replica, stage)
    if SPECS[kind].message:
        forward = kind in (Kind.SEND_F, Kind.RECV_F)
        sends = kind in SENDS
        source, target = (stage, peer) if forward == sends else (peer, stage)
        edge = next(e for e in layout.edges if (e.source, e.target) == (source, target))
        numbers = edge.crossings if forward else edge.gradients
        size = message_bytes(profile, numbers, samples)
        return CostClass(kind, rank, layout.rank(replica, peer), first, last, samples, size, tensors=len(numbers))
    if kind is Kind.REDUCE_GRAD:
        most = max((len(buckets) for buckets in layout.buckets), default=0)
        size = layout.ties[unit - most].bytes if unit >= most else layout.buckets[stage][unit].bytes
        return CostClass(kind, rank, -1, first, last, 0, size, members)
    if kind in (Kind.COUNT, Kind.LOSS, Kind.NORM):
        return CostClass(kind, rank, -1, first, last, 0, 8, members)
    if kind is Kind.B and last_pass and not layout.recomputes and len(layout.buckets[stage]) > 1:
        return _piece(layout, stage, unit, samples, adds, rank, first, last)
    if layout.recomputes and kind in (Kind.R, Kind.B):
        return CostClass(kind, rank, -1, unit, unit + 1, samples, accumulate=adds)
    return CostClass(kind, rank, -1, first, last, samples, accumulate=adds)


def _piece(
    layout: Layout, stage: int, unit: int, samples: int, adds: bool, rank: int, first: int, last: int
) -> CostClass:
    """A piece of the backward pass that is cut where buckets become ready."""
    buckets = layout.buckets[stage]
    since = buckets[unit - 1].ready if unit else 0.0
    until = buckets[unit].ready if unit < len(buckets) - 1 else 1.0
    return CostClass(Kind.B, rank, -1, first, last, samples, since=since, until=until, accumulate=adds)
