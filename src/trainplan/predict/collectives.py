"""Seconds of messages and collectives: measured curves where the cluster was probed, first principles elsewhere.

First principles for an all-reduce of B bytes on W ranks is the ring, whatever the backend does inside:
2 (W − 1) messages one after the other, each of B/W bytes, over the slowest link of the ring.
"""

from __future__ import annotations

import numpy as np

from trainplan.cluster.cluster import Cluster, Curve


def on_curve(curve: Curve, size: float) -> float:
    """Seconds at a size: linear between the measured sizes, by the last slope beyond them.

    >>> curve = Curve("p2p", 2, (0, 1000, 2000), (1.0, 2.0, 4.0))
    >>> on_curve(curve, 500), on_curve(curve, 3000)
    (1.5, 6.0)
    """
    if len(curve.bytes) == 1:
        return curve.seconds[0]
    if size >= curve.bytes[-1]:
        slope = (curve.seconds[-1] - curve.seconds[-2]) / (curve.bytes[-1] - curve.bytes[-2])
        return curve.seconds[-1] + max(slope, 0.0) * (size - curve.bytes[-1])
    return float(np.interp(size, curve.bytes, curve.seconds))


def _curve(cluster: Cluster, op: str, ranks: int) -> Curve | None:
    return next((c for c in cluster.collectives if c.op == op and c.ranks == ranks), None)


def _one_node(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    return len({cluster.node_of(rank) for rank in ranks}) == 1


def is_probed(cluster: Cluster, source: int, target: int) -> bool:
    """Whether messages between two ranks were measured from end to end."""
    return _one_node(cluster, (source, target)) and _curve(cluster, "p2p", 2) is not None


def message(cluster: Cluster, source: int, target: int, size: int) -> float:
    """Seconds that a message holds the link."""
    curve = _curve(cluster, "p2p", 2) if _one_node(cluster, (source, target)) else None
    if curve is not None:
        return on_curve(curve, size)
    link = cluster.link(source, target)
    return link.latency_s + size / link.rate


def all_reduce(cluster: Cluster, members: tuple[int, ...], size: int) -> float:
    """Seconds of a sum over the members of `size` bytes each."""
    ranks = len(members)
    if ranks == 1:
        return 0.0
    curve = _curve(cluster, "all_reduce", ranks) if _one_node(cluster, members) else None
    if curve is not None:
        return on_curve(curve, size)
    ring = [cluster.link(a, b) for a, b in zip(members, (*members[1:], members[0]), strict=True)]
    # All ranks send at once and then wait for each other: a round takes as long as its slowest message.
    return 2 * (ranks - 1) * max(link.latency_s + size / ranks / link.rate for link in ring)
