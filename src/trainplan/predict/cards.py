"""Which operations of a program meet at the network cards of the nodes.

A card is shared by everything that leaves its node (or comes in) at a moment; the port of a single device by what goes
to a parameter server, or comes from it, and by what stages send each other, where a probe has found out how; a node's
cores and memory by the collectives of its groups, where a probe has. Where replicas are alike and only the first is
played, its messages stand for those of all: they meet the others' at the card.
"""

from __future__ import annotations

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.plan.served import SERVED
from trainplan.predict.collectives import (
    Talk,
    all_gather,
    all_reduce,
    cards_between,
    curve_of,
    host_card,
    message,
    on_curve,
    reduce_scatter,
)
from trainplan.predict.exchanges import between_hosts, by_backend, summed
from trainplan.predict.flows import Flows
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.lower.backend import backend
from trainplan.program.ops import COLLECTIVES, PER_REPLICA, SENDS, SHARED_OUT, SPECS, Kind
from trainplan.program.program import CostClass, Program

_COLLECTIVE = {Kind.SCATTER_GRAD: reduce_scatter, Kind.GATHER_F: all_gather, Kind.GATHER_B: all_gather}
Shares = dict[int, float]  # card → share of its rate that is asked for
_TALKS = frozenset((*SENDS, *COLLECTIVES))
_SERVED = frozenset((Kind.SEND_G, Kind.SEND_W, Kind.SEND_INPUT))
_BETWEEN_STAGES = frozenset((Kind.SEND_F, Kind.SEND_B))
_NOTHING: tuple[float, Shares] = (0.0, {})


def flows_of(program: Program, plan: Plan, cluster: Cluster) -> Flows | None:
    """The flows of a program; None where nothing shares a card with anything."""
    if not shares_cards(cluster) and plan.exchange not in SERVED and not (plan.depth > 1 and _shares_ports(cluster)):
        return None
    stage = {plan.rank(0, s): s for s in range(plan.depth)}

    def talks(c: CostClass) -> list[Talk]:
        """Of a class that stands for all replicas: those of all of them, the first one first."""
        replicas = range(program.replicas)
        if c.kind in PER_REPLICA:
            if plan.tp > 1:  # all ranks of a replica take part
                return [all_reduce(cluster, c.members, c.bytes)]
            pipelines = [tuple(sorted({plan.rank(r, s) for s in range(plan.depth)})) for r in replicas]
            return [all_reduce(cluster, ranks, c.bytes) for ranks in (pipelines if len(replicas) > 1 else [c.members])]
        if SPECS[c.kind].collective:
            if c.by in BY_ROUNDS:
                return [summed(cluster, c)]
            how = _COLLECTIVE.get(c.kind) or by_backend(c)
            groups = [group for members in _beside(plan, program, c) for group in _slices(plan, members)]
            return [how(cluster, members, c.bytes) for members in groups]
        pairs = [(c.rank, c.peer)]
        if len(replicas) > 1 and cards_between(cluster, c.rank, c.peer):
            here, there = stage[c.rank], stage[c.peer]
            pairs = [(plan.rank(r, here), plan.rank(r, there)) for r in replicas]
        return [message(cluster, a, b, c.bytes) for pair in pairs for a, b in _slices(plan, pair)]

    found = [_together(talks(c)) if c.kind in _TALKS else _NOTHING for c in program.classes]
    ported = _SERVED | _BETWEEN_STAGES if _shares_ports(cluster) else _SERVED
    found = [
        _at_ports(c, cluster, *pair) if c.kind in ported else pair
        for c, pair in zip(program.classes, found, strict=True)
    ]
    if not any(cards for _, cards in found):
        return None
    count = np.array([len(cards) for _, cards in found], dtype=np.int64)
    begin = np.concatenate([[0], np.cumsum(count)])
    items = np.array([card for _, cards in found for card in cards], dtype=np.int64)
    share = np.array([value for _, cards in found for value in cards.values()], dtype=np.float64)
    cost = program.cost
    start = np.concatenate([[0], np.cumsum(count[cost])])
    which = np.repeat(begin[cost] - start[:-1], count[cost]) + np.arange(start[-1])
    lead = np.array([seconds for seconds, _ in found])
    cards = host_card(cluster, cluster.world - 1) + 1  # the last one
    return Flows(start, items[which], share[which], lead[cost], cards)


def _at_ports(c: CostClass, cluster: Cluster, lead: float, cards: Shares) -> tuple[float, Shares]:
    """The same of a message between a worker and a server, or between two stages, whose own ways in and out are shared
    as well: all workers send to a server at once, wherever they are (incast), and a stage sends while it receives. What
    slices of a GPU copy to the host, and from it, is on its way but passes no port."""
    first = 2 * len(cluster.nodes)
    share = None
    if not cards:
        share = _hub(cluster, c.bytes) if c.kind in _SERVED else _both_ways(cluster, c.bytes)
    if share is not None:
        ports = {first + 2 * c.rank: share, first + 2 * c.peer: share}
    elif c.kind in _SERVED:
        ports = {first + 2 * c.rank: 1.0, first + 2 * c.peer + 1: 1.0}
    else:
        return lead, cards
    if not cards:
        lead = message(cluster, c.rank, c.peer, 0).seconds
        if not backend(cluster.backend).receives_on_device:
            lead += sum(c.bytes / cluster.device(rank).host_rate for rank in (c.rank, c.peer))
    return lead, {**cards, **ports}


def _hub(cluster: Cluster, size: int) -> float | None:
    """The share of a rank's port, in and out alike, that a message asks for where gloo's one thread carries both: what
    a probe found when one rank exchanges messages with all others, of what as many take one after the other."""
    found = [c for c in cluster.collectives if c.op == "hub"]
    if not found or curve_of(cluster, "p2p", 2) is None:
        return None
    curve = max(found, key=lambda c: c.ranks)
    return min(1.0, on_curve(curve, size) / (2 * (curve.ranks - 1) * between_hosts(cluster, size)))


def _shares_ports(cluster: Cluster) -> bool:
    """Whether it was measured what messages in and out at once take."""
    return curve_of(cluster, "p2p", 2) is not None and any(c.op == "round" for c in cluster.collectives)


def _both_ways(cluster: Cluster, size: int) -> float:
    """The share of a rank's port that a message between stages asks for: what a probe found when every rank sends one
    and receives one, of what two take one after the other."""
    curve = max((c for c in cluster.collectives if c.op == "round"), key=lambda c: c.ranks)
    return min(1.0, on_curve(curve, size) / (2 * between_hosts(cluster, size)))


def _slices(plan: Plan, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ranks that have the first slice of some stages, then those that have the second, and so on."""
    if plan.tp == 1:
        return [ranks]
    return list(zip(*(plan.slicers(rank) for rank in ranks), strict=True))


def _beside(plan: Plan, program: Program, c: CostClass) -> list[tuple[int, ...]]:
    """The members of a collective, and those of its like that other groups of replicas do at the same time, where these
    are not played themselves."""
    if program.replicas == 1 or not plan.shard:
        return [c.members]
    stage = next(s for s in range(plan.depth) if plan.rank(0, s) == c.rank)
    ranks, size = [plan.rank(r, stage) for r in range(plan.dp)], plan.shard
    if c.kind in SHARED_OUT:
        return [tuple(ranks[first : first + size]) for first in range(0, plan.dp, size)]
    if c.kind is Kind.REDUCE_GRAD and len(c.members) == plan.dp // size:
        return [tuple(ranks[place::size]) for place in range(size)]
    return [c.members]


def shares_cards(cluster: Cluster) -> bool:
    """Whether the devices of a node share a way out, or what groups of them do at once was measured."""
    way_out = any(node.network is not None and node.network.shared for node in cluster.nodes)
    return way_out or any(curve.groups > 1 for curve in cluster.collectives)


def _together(talks: list[Talk]) -> tuple[float, Shares]:
    """Lead of the first, and what all of them together ask of its cards."""
    asked: Shares = {}
    for talk in talks:
        for card, share in talk.cards:
            asked[card] = asked.get(card, 0.0) + share
    return talks[0].lead_s, {card: asked[card] for card, _ in talks[0].cards}


def meeting(plan: Plan, cluster: Cluster, source: int, target: int) -> list[Shares]:
    """Of every replica, for a message between two stages: by card, how many replicas' messages pass it."""
    ways = [cards_between(cluster, plan.rank(r, source), plan.rank(r, target)) for r in range(plan.dp)]
    count: Shares = {}
    for cards in ways:
        for card in cards:
            count[card] = count.get(card, 0.0) + 1.0
    return [{card: count[card] for card in cards} for cards in ways]
