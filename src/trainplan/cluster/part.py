"""Some of the devices of a cluster, as a cluster: those that are left when others have gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainplan.cluster.cluster import Cluster, Node
from trainplan.errors import PlanError
from trainplan.units import some


def part(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """The devices of these ranks, in their order; nodes of which none is left are left out.

    What was measured of so many ranks at a time (collectives, contention, hosts) is by their number and stays; how much
    compute and communication slow each other down was measured with all devices, so it is told of as many as are left.

    >>> from trainplan.cluster.parse import cluster
    >>> few = part(cluster("2x4xT4"), (0, 1, 3, 6))
    >>> few.name, [len(node.devices) for node in few.nodes]
    ('4 of 2x4xT4', [3, 1])
    """
    wanted = sorted(set(ranks))
    if list(ranks) != wanted or not wanted or wanted[0] < 0 or wanted[-1] >= cluster.world:
        why = f"it has {some(cluster.world, 'device')}, and each is there once, in the order of ranks"
        raise PlanError(f"the devices {list(ranks)} of {cluster.name}", why, f"{list(range(cluster.world))}")
    if len(wanted) == cluster.world:
        return cluster
    kept = [[d for n, d in (cluster.ranks[rank] for rank in wanted) if n == node] for node in range(len(cluster.nodes))]
    nodes = tuple(_without_others(node, own) for node, own in zip(cluster.nodes, kept, strict=True) if own)
    return replace(
        cluster,
        name=f"{len(wanted)} of {cluster.name}",
        nodes=nodes,
        slowdown=cluster.slowdown_of(len(wanted)),
    )


def _without_others(node: Node, devices: list[int]) -> Node:
    """A node with some of its devices; links of their own stay between the same two."""
    place = {old: new for new, old in enumerate(devices)}
    pairs = tuple(
        replace(pair, a=place[pair.a], b=place[pair.b]) for pair in node.pairs if pair.a in place and pair.b in place
    )
    return replace(node, devices=tuple(node.devices[old] for old in devices), pairs=pairs)
