"""Seconds of NCCL's collectives over NVLink, where the catalogue says what share of a link's rate they reach.

A collective takes a lead, which does not depend on its bytes once there are some, and its bytes at a bus rate:

    ring       2 (n − 1)/n · B / (reached · rate)       reached: 0.76 to 0.82 of NVLink's rate from Ampere to Blackwell
               Without a switch, as many rings as there are lanes for (`mesh.py`), each with 0.89 of a lane's rate
    in switch  B / (in_switch · rate)                   NVLS: the switch adds up, everybody sends and gets B once
    nodes      a ring through all nodes uses all their cards: the slower of what leaves a node and what stays inside.
               Where nodes have unlike numbers of members, there are rings and cards for those of the one with fewest.
               Its 2 (nodes − 1) latencies are more than a sum of few bytes takes otherwise
    tree       of nodes: 2 B / (0.92 · the ring's rate), and 2 log₂(nodes) latencies (two trees, each of half of the
               bytes, in which everybody is a leaf of one; as NCCL's own model of itself has it, graph/tuning.cc)

NCCL takes the fastest of these for sums; gatherings and scatterings go around rings. Lead and ramp are of nccl-tests on
8 A100 (stas00/ml-engineering@744d01e) and of vTrain's table for 2 to 8 A100 (VIA-Research/vTrain@f8dda84): about 40 µs
for a few kilobytes, and 20 + 6 n µs from a megabyte on, growing by another 25 µs up to 8 MiB. With a switch that adds
up it does not depend on n, and grows more slowly: nccl-tests on 8 H200, from the same place as A100's.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.cluster.cluster import Cluster, Link, Node
from trainplan.predict import mesh

FEW_S = 38e-6  # a call with next to no bytes
CALL_S, RANK_S = 20e-6, 6e-6  # a call from a megabyte on, and for each rank
RAMP_S = 25e-6
SWITCH_S = 52e-6  # that a call takes longer from 32 MiB on, where a switch adds up; before, by the root of its bytes
PAIR = 0.86  # two ranks use fewer channels: of the rate that more of them reach
TREE = 0.92  # of the rate of a ring
CARDS = 0.95  # share of the network cards' rate (B200 4 × 8 on EFA 0.95, A100 3 × 8 on HDR 0.96)
_MIB = 2**20


def all_reduce(cluster: Cluster, members: tuple[int, ...], size: float) -> float | None:
    """Seconds of a sum of `size` bytes; None where the links do not say.

    >>> from trainplan.cluster.parse import cluster
    >>> eight = tuple(range(8))
    >>> [round(all_reduce(cluster(f"8x{name}"), eight, 2**30) * 1e3, 1) for name in ("A100-80", "H200")]
    [8.1, 4.1]
    """
    lie = _lie(cluster, members)
    if lie is None:
        return None
    seconds = 2 * (lie.ranks - 1) / lie.ranks * size / lie.ring
    if lie.nodes > 1:
        return lie.lead(size) + min(lie.around + seconds, lie.up_and_down + 2 * size / (TREE * lie.ring))
    if lie.inside.in_switch:
        seconds = min(seconds, size / (lie.inside.in_switch * lie.inside.rate))
    return lie.lead(size) + seconds


def shared_out(cluster: Cluster, members: tuple[int, ...], size: float) -> float | None:
    """The same of a gathering of `size` bytes in all, or of a scattering of their sum: half of a ring."""
    lie = _lie(cluster, members)
    if lie is None:
        return None
    return (lie.lead(size) + lie.around) / 2 + (lie.ranks - 1) / lie.ranks * size / lie.ring


@dataclass(frozen=True)
class Lie:
    """How the members of a collective lie on nodes: all that its seconds depend on beside its bytes."""

    ranks: int
    nodes: int
    most: int  # of them on one node
    inside: Link
    network: Link | None
    ring: float  # bytes a second: those inside nodes, or those that leave one over all its members' cards

    def lead(self, size: float) -> float:
        """Seconds of a collective beside those of its bytes at the full rate, and of latencies between nodes."""
        if self.inside.in_switch:
            return FEW_S + SWITCH_S * min(1.0, size / (32 * _MIB)) ** 0.5
        much = max(FEW_S, CALL_S + RANK_S * self.most)
        return FEW_S + (much - FEW_S) * min(1.0, size / _MIB) + RAMP_S * min(1.0, size / (8 * _MIB))

    @property
    def around(self) -> float:
        """Latencies of a ring through all nodes, twice around."""
        return 2 * (self.nodes - 1) * self.network.latency_s if self.network is not None else 0.0

    @property
    def up_and_down(self) -> float:
        """Latencies of a tree of all nodes."""
        return 2 * (self.nodes - 1).bit_length() * self.network.latency_s if self.network is not None else 0.0


def _lie(cluster: Cluster, members: tuple[int, ...]) -> Lie | None:
    """How members lie, where the link inside their nodes is the same for all and its share is known. Kept with the
    cluster: a search asks for the same groups again and again."""
    known = cluster.known_groups
    if members not in known:
        known[members] = _found(cluster, members)
    found: Lie | None = known[members]
    return found


def _found(cluster: Cluster, members: tuple[int, ...]) -> Lie | None:
    if cluster.backend != "nccl" or len(members) < 2:
        return None
    places: dict[int, list[int]] = {}
    for rank in members:
        node, device = cluster.ranks[rank]
        places.setdefault(node, []).append(device)
    nodes, own = [cluster.nodes[place] for place in places], [len(devices) for devices in places.values()]
    if any(node.inside != nodes[0].inside or bool(node.pairs) != bool(nodes[0].pairs) for node in nodes):
        return None
    if len(nodes) > 1 and any(node.network is None or node.network.shared for node in nodes):
        return None
    most, least = max(own), min(own)
    # A member that is alone on its node sends nothing inside; it counts only where all are.
    several = {node: devices for node, devices in places.items() if len(devices) > 1} or places
    rates = [_inside(cluster.nodes[node], tuple(devices)) for node, devices in several.items()]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    link, reached = min(known, key=lambda rate: rate[1])
    network = min(
        (node.network for node in nodes if node.network is not None), key=lambda link: link.rate, default=None
    )
    if len(members) == 2 and not nodes[0].pairs:
        reached *= PAIR
    ring = reached
    if len(nodes) > 1:
        out = CARDS * least * network.rate if network is not None else reached
        ring = min(out, reached) if most > 1 else out
    return Lie(len(members), len(nodes), most, link, network, ring)


def _inside(node: Node, devices: tuple[int, ...]) -> tuple[Link, float] | None:
    """A link inside a node, and the bytes a second of rings over such; None where nobody says what they reach."""
    if node.pairs:
        return mesh.bus(node, devices)
    return (node.inside, node.inside.reached * node.inside.rate) if node.inside.reached else None
