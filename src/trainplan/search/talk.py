"""What ranks that talk to each other wait for at least: messages between stages, sums over replicas, and what those
that share blocks exchange inside a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster, Curve
from trainplan.predict import collectives
from trainplan.predict.cost import TALKS
from trainplan.profile.profile import Block, Exchange, Profile

Floats = NDArray[np.float64]
_LARGE = 2**30  # bytes, from which on what a collective takes beside its bytes does not grow
_SOME = (1, 2**20, 2**23, _LARGE)  # sizes between which what it takes beside its bytes changes
_FEW = 64  # ranks: of more only those are looked at whose groups are all alike


def aloud(profile: Profile, cluster: Cluster) -> Profile:
    """A profile of ranks that share blocks, with what they exchange inside a pass as part of its seconds: at the best
    place for them. The same one, where they do not share."""
    inside = {len(node.devices) for node in cluster.nodes}
    if profile.tp == 1 or any(devices % profile.tp for devices in inside) or not cluster.uniform:
        return profile  # (elsewhere nothing is certain, and nothing is said)
    # Through a switch all groups of a node are alike; over links between pairs some have more of these than others.
    firsts = range(0, min(inside) if cluster.nodes[0].pairs else 1, profile.tp)
    groups = [tuple(range(first, first + profile.tp)) for first in firsts]
    known: dict[tuple[Exchange, ...], Floats] = {}

    def seconds(talk: tuple[Exchange, ...]) -> Floats:
        if talk not in known:
            known[talk] = np.array([
                min(
                    sum(
                        part.times * TALKS[part.what](cluster, group, round(part.bytes_per_sample * n)).seconds
                        for part in talk if not part.hidden
                    ) for group in groups
                ) for n in profile.samples
            ])  # fmt: skip
        return known[talk]

    def block(old: Block) -> Block:
        return replace(
            old,
            forward_s=tuple(np.array(old.forward_s) + seconds(old.forward_talk)),
            backward_s=tuple(np.array(old.backward_s) + seconds(old.backward_talk)),
            recompute_s=tuple(np.array(old.recompute_s or old.forward_s) + seconds(old.forward_talk)),
        )

    return replace(profile, blocks=tuple(map(block, profile.blocks)))


def sums(cluster: Cluster, replicas: int, sharing: int, stages: int, shares: bool) -> tuple[float, float]:
    """Seconds that summing gradients over replicas takes at least (or, where they share them out, gathering or
    scattering): to begin with, and a byte. Of stages whose replicas lie otherwise, the least of all.

    >>> from trainplan.cluster.parse import cluster
    >>> start, byte = sums(cluster("2x8xA100-80"), replicas=8, sharing=1, stages=2, shares=False)
    >>> round(start * 1e6), round(1e-9 / byte)
    (38, 134)
    """
    span = replicas * sharing
    found = [summed(cluster, members, shares) for members in _groups(cluster, span, sharing, stages)]
    return (min(start for start, _ in found), min(byte for _, byte in found)) if found else (0.0, 0.0)


def _groups(cluster: Cluster, span: int, sharing: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The replicas of every stage; of stages that are alike only the first's. None where there are too many to ask."""
    inside = len(cluster.nodes[0].devices)
    alike = cluster.uniform and inside % sharing == 0 and (span % inside == 0 or inside % span == 0)
    if alike and not cluster.nodes[0].pairs:
        yield tuple(range(0, span, sharing))
    elif span * stages <= _FEW:
        yield from (tuple(range(stage * span, (stage + 1) * span, sharing)) for stage in range(stages))


def summed(cluster: Cluster, members: tuple[int, ...], shares: bool = False) -> tuple[float, float]:
    """The same of a group."""
    sums = (collectives.all_reduce, collectives.one_of_several)
    rules = (collectives.reduce_scatter, collectives.all_gather) if shares else sums
    curves = cluster.collectives if collectives.one_node(cluster, members) else ()
    if curves:
        return 0.0, min(min(rule(cluster, members, size).seconds / size for size in _sizes(curves)) for rule in rules)
    byte = min(
        (rule(cluster, members, 2 * _LARGE).seconds - rule(cluster, members, _LARGE).seconds) / _LARGE for rule in rules
    )
    return max(0.0, min(rule(cluster, members, size).seconds - byte * size for rule in rules for size in _SOME)), byte


def _sizes(curves: tuple[Curve, ...]) -> list[int]:
    """Sizes at one of which seconds a byte are least: along a line they only fall or only rise, so at its ends."""
    return sorted({size for curve in curves for size in curve.bytes if size > 0} | {2**50})


def hops(cluster: Cluster, apart: int, there_and_back: float) -> float:
    """Seconds of a message from stage to stage and of its answer, at least, where stages are so many ranks apart.

    >>> from trainplan.cluster.parse import cluster
    >>> [round(hops(cluster("2x4xTitanRTX+eth10"), apart, 1e6) * 1e6) for apart in (1, 4)]
    [41, 900]
    """
    return sent(cluster, apart, there_and_back, messages=2)


def sent(cluster: Cluster, apart: int, size: float, messages: int = 1) -> float:
    """Seconds of some messages with so many bytes together, at least."""
    nodes = {id(node): node for node in cluster.nodes}.values()  # of many machines most are one value
    inside = {len(node.devices) for node in nodes}
    near = [link for node in nodes for link in (node.inside, *(pair.link for pair in node.pairs))]
    far = [node.network for node in nodes if node.network is not None and len(cluster.nodes) > 1]
    leaves = bool(far) and len(inside) == 1 and apart % min(inside) == 0  # every message its node
    links = [*far, *([] if leaves else near)]
    curve = None if leaves else collectives.curve_of(cluster, "p2p", 2)
    if curve is None:
        return min(messages * link.latency_s + size / link.rate for link in links)
    byte = min(collectives.on_curve(curve, each) / each for each in _sizes((curve,)))
    measured = max(messages * collectives.on_curve(curve, 0), size * byte)
    return min([measured, *(messages * link.latency_s + size / link.rate for link in far)])
