"""Seconds of messages and collectives: measured curves where the cluster was probed, first principles elsewhere.

First principles for an all-reduce of B bytes on W ranks, of which m sit on each of n nodes:

    ring          2 (W − 1) messages one after the other, each of B/W bytes; all ranks send at once and then wait for
                  each other, so a round takes as long as its slowest message. Ranks of a node stand side by side in
                  the ring, so that one message of a round leaves the node, and one comes in.
    hierarchical  the ranks of each node scatter the sum among themselves, m rings over the nodes sum the pieces of B/m
                  bytes side by side, and the ranks of each node gather: 2 (m − 1) messages of B/m inside, and 2 (n − 1)
                  messages of B/(m n) between nodes; where a node has one network card, m of these share it.

gloo runs the ring. NCCL chooses, and uses all cards that there are: the faster of the two; over switches whose share
of their rate is known, as `nccl.py` says. (What we sum ourselves, in rounds: `exchanges.py`.)

Where collectives were measured, groups of one node that are at it at the same time share its cores and memory: that is
a card, too. Where g groups at once take f times as long as one alone, each asks for f / g of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from trainplan.cluster.cluster import Cluster, Curve
from trainplan.predict import nccl

Cards = tuple[tuple[int, float], ...]  # (card, share of its rate)


@dataclass(frozen=True)
class Talk:
    """A message or a collective that nobody disturbs."""

    lead_s: float  # in which it disturbs nobody either: latencies, and what happens inside nodes
    bytes_s: float = 0.0  # in which its bytes pass network cards that it shares with others
    cards: Cards = ()  # these

    @property
    def seconds(self) -> float:
        return self.lead_s + self.bytes_s


def on_curve(curve: Curve, size: float) -> float:
    """Seconds at a size: linear between the measured sizes, by the last slope beyond them.

    >>> curve = Curve("p2p", 2, (0, 1000, 2000), (1.0, 2.0, 4.0))
    >>> on_curve(curve, 500), on_curve(curve, 3000)
    (1.5, 6.0)
    """
    seconds = rising(curve.seconds)
    if len(curve.bytes) == 1:
        return seconds[0]
    if size >= curve.bytes[-1]:
        slope = (seconds[-1] - seconds[-2]) / (curve.bytes[-1] - curve.bytes[-2])
        return seconds[-1] + slope * (size - curve.bytes[-1])
    return float(np.interp(size, curve.bytes, seconds))


@cache
def rising(seconds: tuple[float, ...]) -> tuple[float, ...]:
    """The nearest numbers that never fall: more bytes are not faster, and a probe that says so was disturbed.

    >>> rising((1.0, 4.0, 2.0, 5.0))
    (1.0, 3.0, 3.0, 5.0)
    """
    runs: list[tuple[float, int]] = []  # (mean, how many): neighbours that fall are put together
    for value in seconds:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            before, many = runs.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        runs.append((mean, count))
    return tuple(mean for mean, count in runs for _ in range(count))


def curve_of(cluster: Cluster, op: str, ranks: int) -> Curve | None:
    """What was measured of a collective, or of messages, for so many ranks; None: nothing."""
    return next((c for c in cluster.collectives if c.op == op and c.ranks == ranks and c.groups == 1), None)


def _probed(cluster: Cluster, op: str, members: tuple[int, ...], size: int) -> Talk | None:
    """As it was measured of as many ranks, where these are on one node; None: it was not."""
    if not cluster.collectives or not one_node(cluster, members):
        return None
    alone = curve_of(cluster, op, len(members))
    if alone is None:
        return None
    seconds = on_curve(alone, size)
    beside = [c for c in cluster.collectives if c.op == op and c.ranks == len(members) and c.groups > 1]
    if not beside or not seconds:
        return Talk(seconds)
    most = max(beside, key=lambda c: c.groups)
    longer = min(max(1.0, on_curve(most, size) / seconds), float(most.groups))  # one alone takes as long as one alone
    return Talk(0.0, seconds, ((host_card(cluster, members[0]), longer / most.groups),))


def host_card(cluster: Cluster, rank: int) -> int:
    """The cores and the memory of a node, as something that groups share: numbered after all cards and ports."""
    return 2 * (len(cluster.nodes) + cluster.world) + cluster.node_of(rank)


def one_node(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    """Whether all these ranks are on one. Kept with the cluster, as are their links' hosts."""
    known, key = cluster.known_groups, ("one node", ranks)
    if key not in known:
        known[key] = len({cluster.node_of(rank) for rank in ranks}) == 1
    return bool(known[key])


def starting(cluster: Cluster, members: tuple[int, ...]) -> float:
    """Seconds of the first member's host for the slowest message to another."""
    known, key = cluster.known_groups, ("starting", members)
    if key not in known:
        links = (cluster.link(members[0], other) for other in members[1:])
        known[key] = max((link.message_s for link in links), default=0.0)
    return float(known[key])


def is_probed(cluster: Cluster, source: int, target: int) -> bool:
    """Whether messages between two ranks were measured from end to end."""
    return one_node(cluster, (source, target)) and curve_of(cluster, "p2p", 2) is not None


# -- messages -----------------------------------------------------------------------------------------------------


def message(cluster: Cluster, source: int, target: int, size: int) -> Talk:
    """A message that holds its link. A search asks for the same messages again and again: they are kept."""
    known: dict[tuple[int, int, int], Talk] = cluster.known_messages
    if (source, target, size) not in known:
        known[source, target, size] = _message(cluster, source, target, size)
    return known[source, target, size]


def _message(cluster: Cluster, source: int, target: int, size: int) -> Talk:
    curve = curve_of(cluster, "p2p", 2) if one_node(cluster, (source, target)) else None
    if curve is not None:
        return Talk(on_curve(curve, size))
    link = cluster.link(source, target)
    cards = cards_between(cluster, source, target)
    if not cards:
        return Talk(link.latency_s + size / link.rate)
    return Talk(link.latency_s, size / link.rate, tuple((card, link.rate / rate) for card, rate in cards.items()))


def cards_between(cluster: Cluster, source: int, target: int) -> dict[int, float]:
    """The shared network cards that a message passes, with their rates: a node's way out, and another's way in."""
    a, b = cluster.node_of(source), cluster.node_of(target)
    if a == b:
        return {}
    ways = ((2 * a, cluster.nodes[a].network), (2 * b + 1, cluster.nodes[b].network))
    return {card: network.rate for card, network in ways if network is not None and network.shared}


# -- collectives --------------------------------------------------------------------------------------------------


def all_reduce(cluster: Cluster, members: tuple[int, ...], size: int) -> Talk:
    """A sum over the members of `size` bytes each. A search asks for the same sums again and again: they are kept."""
    known = cluster.known_sums
    if (members, size) not in known:
        known[members, size] = _all_reduce(cluster, members, size)
    found: Talk = known[members, size]
    return found


def _all_reduce(cluster: Cluster, members: tuple[int, ...], size: int) -> Talk:
    ranks = len(members)
    if ranks == 1:
        return Talk(0.0)
    measured = _probed(cluster, "all_reduce", members, size)
    if measured is not None:
        return measured
    known = nccl.all_reduce(cluster, members, size)
    if known is not None:
        return Talk(known)
    flat = ring(cluster, members, size)
    if cluster.backend != "nccl":
        return flat
    tiered = hierarchical(cluster, members, size)
    return flat if tiered is None or flat.seconds <= tiered.seconds else tiered


def one_of_several(cluster: Cluster, members: tuple[int, ...], size: int) -> Talk:
    """A sum while others of the same ranks are on their way, as the buckets of a backward pass are.

    gloo has two threads for them: of tensors of a GPU one is copied from or to the host while the other is summed.
    """
    known, key = cluster.known_sums, ("one of several", members, size)
    if key not in known:
        known[key] = _probed(cluster, "all_reduces", members, size) or all_reduce(cluster, members, size)
    found: Talk = known[key]
    return found


def all_gather(cluster: Cluster, members: tuple[int, ...], size: int) -> Talk:
    """Everybody's share of `size` bytes to everybody. In a ring that is the second half of a sum (NCCL); otherwise
    everybody sends its share to everybody else."""
    return _shared_out(cluster, members, size, "all_gather", ring=cluster.backend == "nccl")


def reduce_scatter(cluster: Cluster, members: tuple[int, ...], size: int) -> Talk:
    """Everybody's share of a sum of `size` bytes. In a ring that is the first half of a sum over all (NCCL).

    gloo has no such thing: its reduce-scatter is a whole sum, of which it throws most away. The engine has everybody
    send everybody else's share directly, and adds up what comes.
    """
    return _shared_out(cluster, members, size, "reduce_scatter", ring=cluster.backend == "nccl")


def _shared_out(cluster: Cluster, members: tuple[int, ...], size: int, op: str, ring: bool) -> Talk:
    """As it was measured, where anything was; or half a sum in a ring; or everybody's messages to everybody else: as
    many bytes from each rank as in a ring, all at once, but more of them from node to node."""
    measured = _probed(cluster, op, members, size)
    if measured is not None:
        return measured
    known = nccl.shared_out(cluster, members, size)
    if known is not None:
        return Talk(known)
    if ring or len(members) == 1 or curve_of(cluster, "all_reduce", len(members)) is not None:
        return _half(all_reduce(cluster, members, size))
    return direct(cluster, members, size / len(members))


def direct(cluster: Cluster, members: tuple[int, ...], size: float) -> Talk:
    """A message of that size from everybody to everybody else, all at once: each rank's own go out one after the other,
    and what leaves a node shares its card."""
    pairs = [(a, b) for a in members for b in members if a != b]
    links = {pair: cluster.link(*pair) for pair in pairs}
    latency = max(link.latency_s for link in links.values())
    own = {rank: sum(size / links[rank, other].rate for other in members if other != rank) for rank in members}
    busy = max(own.values())
    through: dict[int, float] = {}  # seconds of each card
    for a, b in pairs:
        for card, rate in cards_between(cluster, a, b).items():
            through[card] = through.get(card, 0.0) + size / rate
    seconds = max(busy, *through.values()) if through else busy
    if not through or not seconds:
        return Talk(latency + seconds)
    return Talk(latency, seconds, tuple((card, used / seconds) for card, used in sorted(through.items())))


def _half(talk: Talk) -> Talk:
    return Talk(talk.lead_s / 2, talk.bytes_s / 2, talk.cards)


def barrier(cluster: Cluster, members: tuple[int, ...]) -> float:
    """Seconds from when the last member comes until all know.

    gloo's members tell each other in rounds, the next one, then the second next, the fourth next …, so that after
    log₂ W of them everybody has heard of everybody. NCCL sums one number.
    """
    ranks = len(members)
    if cluster.backend == "nccl":
        return all_reduce(cluster, members, 4).seconds
    steps = [2**k for k in range((ranks - 1).bit_length())]
    hops = [[(members[i], members[(i + step) % ranks]) for i in range(ranks)] for step in steps]
    return sum(max(message(cluster, a, b, 0).seconds for a, b in hop) for hop in hops)


def ring(cluster: Cluster, members: tuple[int, ...], size: float) -> Talk:
    """All ranks in one ring, in their order."""
    rounds, piece = 2 * (len(members) - 1), size / len(members)
    hops = list(pairwise((*members, members[0])))
    passing = Counter(card for a, b in hops for card in cards_between(cluster, a, b))  # messages of one round

    def seconds(a: int, b: int) -> tuple[float, float]:
        link = cluster.link(a, b)
        crowd = max((passing[c] * link.rate / rate for c, rate in cards_between(cluster, a, b).items()), default=1.0)
        return link.latency_s, piece / link.rate * max(crowd, 1.0)

    latency, transfer = max((seconds(a, b) for a, b in hops), key=sum)
    cards = {card: rate for a, b in hops for card, rate in cards_between(cluster, a, b).items()}
    if not cards or not transfer:
        return Talk(rounds * (latency + transfer))
    shares = tuple((card, passing[card] * piece / rate / transfer) for card, rate in sorted(cards.items()))
    return Talk(rounds * latency, rounds * transfer, shares)


def hierarchical(cluster: Cluster, members: tuple[int, ...], size: float) -> Talk | None:
    """Within nodes, between nodes, within nodes. None where nodes hold different numbers of members, or only one."""
    nodes: dict[int, list[int]] = {}
    for rank in members:
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    inside = {len(ranks) for ranks in nodes.values()}
    if len(nodes) == 1 or len(inside) > 1 or inside == {1}:
        return None
    m = inside.pop()
    local = max(ring(cluster, tuple(ranks), size).seconds for ranks in nodes.values())
    columns = [ring(cluster, column, size / m) for column in zip(*nodes.values(), strict=True)]
    slowest = max(columns, key=lambda talk: talk.seconds)
    if not slowest.cards:
        return Talk(local + slowest.seconds)
    asked: Counter[int] = Counter()  # of each card, by all rings together
    for talk in columns:
        for card, share in talk.cards:
            asked[card] += share  # type: ignore[assignment]
    crowd = max(1.0, *asked.values())
    shares = tuple((card, share / crowd) for card, share in sorted(asked.items()))
    return Talk(local + slowest.lead_s, slowest.bytes_s * crowd, shares)
