"""The plans that there are: replicas × stages, orders of work, micro-batches, recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.offload import check_offload
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.solve.shape import ENOUGH, micro_counts

ALL_COUNTS_UP_TO = 16  # devices; beyond them only powers of two of devices or nodes, and all

CHUNKS = (2, 4)  # stages a rank, for orders that have several
NEVER_BETTER = ("lockstep",)  # gpipe with barriers: for those who have it, not for those who choose
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


def sketches(blocks: int, cluster: Cluster, batch: int, in_parts: bool = False) -> Iterator[Plan]:
    """Every plan worth a thought, not yet cut into stages. Plans that are the same program come once.

    `in_parts`: the profile has the two parts of backward, which some orders of work need.
    """
    for used in device_counts(cluster):
        for pp in (pp for pp in range(1, min(used, blocks) + 1) if used % pp == 0):
            dp = used // pp
            if dp > batch:
                continue
            for outline in outlines(dp, pp, blocks, in_parts):
                few, many = micro_counts(outline, batch)
                for micro in few + many:
                    # One stage has nothing to order, and one micro-batch has only one order.
                    if (pp == 1 or micro == 1) and outline.schedule != "naive":
                        continue
                    for recompute in RECOMPUTE:
                        sketch = replace(outline, micro=micro, recompute=recompute)
                        if rules.is_order(sketch):
                            yield sketch


def outlines(dp: int, pp: int, blocks: int, in_parts: bool) -> Iterator[Plan]:
    """Every order of work that goes with so many ranks, and with how many stages each; without micro-batches.

    The words of a plan are tried, and its rules say which of them go. (TeraPipe's slices are not searched for.)

    >>> [(p.schedule, p.chunks) for p in outlines(1, 3, 6, in_parts=True)][-4:]
    [('zb-h1', 1), ('zb-h2', 1), ('zb-v', 2), ('gems', 1)]
    >>> [p.schedule for p in outlines(4, 1, 6, in_parts=True)]
    ['naive']
    """
    for schedule in WORDS["schedule"]:
        if schedule in NEVER_BETTER or (schedule in rules.SPLIT_BACKWARD and not in_parts):
            continue
        for chunks in CHUNKS if schedule in rules.CHUNKED else (1,):
            if pp * chunks > blocks:
                continue
            outline = plan(dp=dp, pp=pp, schedule=schedule, chunks=chunks, blocks=blocks)
            if rules.is_order(replace(outline, micro=rules.least_micro(outline))):
                yield outline


def shared_out(sketch: Plan, stages: Iterable[int] = (1, 2, 3)) -> list[Plan]:
    """The same with its states shared out among its replicas, by ever more; none where they cannot be.

    >>> [p.zero for p in shared_out(plan(dp=4))], shared_out(plan(dp=1)), shared_out(plan(dp=2, pp=2, schedule="gems"))
    ([1, 2, 3], [], [])
    """
    found = [replace(sketch, zero=zero) for zero in stages]
    return [each for each in found if rules.can_share(each)]


def sent_away(sketch: Plan) -> list[Plan]:
    """The same with what passes save offloaded as far as need be, alone and with all states shared out; none where it
    cannot be.

    >>> [p.zero for p in sent_away(plan(dp=2))], sent_away(plan(pp=2, micro=2, schedule="gems"))
    ([0, 3], [])
    """
    away = replace(sketch, offload="activations", away=(), zero=0, exchange="all-reduce", node=0)
    try:
        check_offload(away, "")
    except PlanError:
        return []
    return [away, *shared_out(away, (3,))]


def for_memory(sketch: Plan) -> bool:
    """Whether there are so many micro-batches that more of them only save memory."""
    return sketch.micro > ENOUGH * sketch.pp


Shape = tuple[int, int, str, str]


def shape_of(sketch: Plan) -> Shape:
    """Plans of one shape differ in their micro-batches, chunks, cuts and buckets, and in what their replicas share out;
    a table shows the best of them."""
    return sketch.dp, sketch.pp, sketch.schedule, sketch.recompute
