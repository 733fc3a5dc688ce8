"""Who does something together: groups of ranks, by their numbers in the program and in the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from trainplan.program.lower.layout import Layout

Group = tuple[tuple[int, ...], tuple[int, ...]]  # the ranks in the program, and in the cluster


def stage_group(layout: Layout, stages: tuple[int, ...]) -> Group:
    """The ranks that hold any of these stages."""
    here = {holding.rank for holding in layout.holdings if holding.stage in stages}
    everywhere = {rank for stage in stages for rank in layout.plan.replicas_of(stage)}
    return tuple(sorted(here)), tuple(sorted(everywhere))


def share_group(layout: Layout, stage: int, group: int) -> Group:
    """The ranks that share out a stage."""
    size = layout.plan.sharers
    return _of_replicas(layout, stage, range(group * size, (group + 1) * size))


def across_group(layout: Layout, stage: int, place: int) -> Group:
    """The ranks that have the same share of a stage in every group."""
    return _of_replicas(layout, stage, range(place, layout.plan.dp, layout.plan.sharers))


def _of_replicas(layout: Layout, stage: int, replicas: range) -> Group:
    here = {layout.local(replica, stage) for replica in replicas if replica in layout.replicas}
    return tuple(sorted(here)), tuple(sorted({layout.rank(replica, stage) for replica in replicas}))


def norm_group(layout: Layout, replica: int) -> Group:
    """The ranks whose gradients together are those of the model, once each."""
    if not layout.plan.zero:
        here, everywhere = replica_group(layout, replica)
        return here, _slicers(layout, everywhere)
    size, group = layout.plan.sharers, layout.sharing(replica)
    found = [_of_replicas(layout, stage, range(group * size, (group + 1) * size)) for stage in layout.stages]
    together, all_of_them = ({rank for pair in found for rank in pair[side]} for side in (0, 1))
    return tuple(sorted(together)), _slicers(layout, all_of_them)


def _slicers(layout: Layout, ranks: Iterable[int]) -> tuple[int, ...]:
    """These ranks of the cluster, and those that share stages with them."""
    return tuple(sorted({other for rank in ranks for other in layout.plan.slicers(rank)}))


def replica_group(layout: Layout, replica: int) -> Group:
    """The ranks of a replica."""
    pairs = [(stage, line) for stage in layout.stages for line in range(layout.plan.lines)]
    here, everywhere = ({where(replica, *pair) for pair in pairs} for where in (layout.local, layout.rank))
    return tuple(sorted(here)), tuple(sorted(everywhere))
