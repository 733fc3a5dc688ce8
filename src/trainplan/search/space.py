"""What plans may consist of: how many devices, which orders of work on them, who shares out what, and what is left out.

`columns.py` multiplies these to all plans that there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.offload import check_offload
from trainplan.plan.plan import WORDS, Plan, plan

ALL_COUNTS_UP_TO = 16  # devices; beyond them only powers of two of devices or nodes, and all

CHUNKS = (2, 4)  # stages a rank, for orders that have several
PAIRS = (2,)  # of directions, beside one
ALL_SPREADS_UP_TO = 4  # devices; beyond them stages have as many ranks each
# What a plan can say and is not searched for, and why: every answer says so.
LEFT_OUT = {
    "lockstep": "gpipe with barriers, never faster than gpipe",
    "terapipe": "sequences in slices: no bound is known that all of them keep",
}
ALSO_LEFT_OUT = (
    f"different numbers of ranks a stage on more than {ALL_SPREADS_UP_TO} devices",
    "other placements of stages",
    "parameter servers and exchanges that are decided while running (horovod, p3, bytescheduler, pace)",
)


def device_counts(cluster: Cluster, most: int | None = None) -> list[int]:
    """How many devices a plan may use: all (or as many as are allowed), or fewer, since more are not always faster.

    >>> from trainplan.cluster.parse import cluster
    >>> device_counts(cluster("3x8xA100-80"))
    [1, 2, 4, 8, 16, 24]
    """
    world = min(cluster.world, most or cluster.world)
    if world <= ALL_COUNTS_UP_TO:
        return list(range(1, world + 1))
    inside = len(cluster.nodes[0].devices)
    counts = {2**k for k in range(world.bit_length())} | {inside * 2**k for k in range(world.bit_length())} | {world}
    return sorted(count for count in counts if count <= world)


def outlines(dp: int, pp: int, blocks: int, in_parts: bool) -> Iterator[Plan]:
    """Every order of work that goes with so many ranks, with how many stages each and how many pairs of directions;
    without micro-batches.

    The words of a plan are tried, and its rules say which of them go; `LEFT_OUT` says which are not tried, and why.

    >>> [(p.schedule, p.chunks) for p in outlines(1, 3, 6, in_parts=True)][-4:]
    [('zb-h1', 1), ('zb-h2', 1), ('zb-v', 2), ('gems', 1)]
    >>> [(p.schedule, p.pairs) for p in outlines(1, 4, 6, in_parts=False)][-3:]
    [('chimera', 1), ('chimera', 2), ('chimera-doubled', 1)]
    >>> [p.schedule for p in outlines(4, 1, 6, in_parts=True)]
    ['naive']
    """
    for schedule in WORDS["schedule"]:
        if schedule in LEFT_OUT or (schedule in rules.SPLIT_BACKWARD and not in_parts):
            continue
        for chunks in CHUNKS if schedule in rules.CHUNKED else (1,):
            if pp * chunks > blocks:
                continue
            for pairs in (1, *(PAIRS if pp > 1 else ())):
                outline = plan(dp=dp, pp=pp, schedule=schedule, chunks=chunks, pairs=pairs, blocks=blocks)
                if rules.is_order(replace(outline, micro=rules.least_micro(outline))):
                    yield outline


def spreads(used: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Every way in which stages have different numbers of ranks, of so many devices: of few only.

    >>> list(spreads(4, blocks=6)), list(spreads(16, blocks=6))
    ([(1, 3), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)], [])
    """
    if used > ALL_SPREADS_UP_TO:
        return
    for stages in range(2, min(used, blocks + 1)):
        for cuts in itertools.combinations(range(1, used), stages - 1):
            found = tuple(b - a for a, b in itertools.pairwise((0, *cuts, used)))
            if len(set(found)) > 1:
                yield found


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


Shape = tuple[object, ...]


def shape_of(sketch: Plan) -> Shape:
    """Plans of one shape differ in their micro-batches, chunks, cuts and buckets, and in what their replicas share out;
    a table shows the best of them."""
    return *plain_shape(sketch), sketch.recompute


def plain_shape(sketch: Plan) -> Shape:
    """The same without a word about recomputation."""
    served = sketch.exchange if sketch.servers else ""
    return sketch.dp, sketch.pp, sketch.schedule, sketch.tp, sketch.sequence, sketch.spread, served
