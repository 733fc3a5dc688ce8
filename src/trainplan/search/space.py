"""The plans that there are: replicas × stages, orders of work, micro-batches, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan, plan
from trainplan.solve.shape import ENOUGH, micro_counts

ALL_COUNTS_UP_TO = 16  # devices; beyond them only powers of two of devices or nodes, and all

# The orders of work that are searched; the others are predicted and run when they are asked for by name.
ORDERS = ("naive", "gpipe", "1f1b")
RECOMPUTE = ("none", "full")


def device_counts(cluster: Cluster) -> list[int]:
    """How many devices a plan may use: all, or fewer, since more of them are not always faster.

    >>> from trainplan.cluster.parse import cluster
    >>> device_counts(cluster("3x8xA100-80"))
    [1, 2, 4, 8, 16, 24]
    """
    world = cluster.world
    if world <= ALL_COUNTS_UP_TO:
        return list(range(1, world + 1))
    inside = len(cluster.nodes[0].devices)
    counts = {2**k for k in range(world.bit_length())} | {inside * 2**k for k in range(world.bit_length())} | {world}
    return sorted(count for count in counts if count <= world)


def sketches(blocks: int, cluster: Cluster, batch: int) -> Iterator[Plan]:
    """Every plan worth a thought, not yet cut into stages. Plans that are the same program come once."""
    for used in device_counts(cluster):
        for pp in (pp for pp in range(1, min(used, blocks) + 1) if used % pp == 0):
            dp = used // pp
            if dp > batch:
                continue
            few, many = micro_counts(plan(dp=dp, pp=pp), batch)
            for micro in few + many:
                # One stage has nothing to order, and one micro-batch has only one order.
                schedules = ("naive",) if pp == 1 or micro == 1 else ORDERS
                for schedule in schedules:
                    for recompute in RECOMPUTE:
                        yield plan(dp=dp, pp=pp, micro=micro, schedule=schedule, recompute=recompute, blocks=blocks)


def for_memory(sketch: Plan) -> bool:
    """Whether there are so many micro-batches that more of them only save memory."""
    return sketch.micro > ENOUGH * sketch.pp


Shape = tuple[int, int, str, str]


def shape_of(sketch: Plan) -> Shape:
    """Plans of one shape differ in their micro-batches, cuts and buckets only; a table shows the best of them."""
    return sketch.dp, sketch.pp, sketch.schedule, sketch.recompute
