"""Seconds of sums that are made in rounds (`program/exchanges`), from first principles.

A round takes as long as its busiest member and its busiest network card:

    latency    of the slowest message; messages of one member to several others are on their way at the same time
    host       of the thread that posts and takes them, so many seconds each
    transfer   what a member sends in a round goes over its link in turn, and so does what it receives; what leaves a
               node, or comes in, shares the node's card where that is one
    adding     what arrived to be added: two numbers are read and one is written, at the rate of the device's memory

The next round begins when the last member is through. (Members wait only for those that they hear from; but each hears
from all others in the end, and a slow one is waited for round by round.)

Within a node whose messages were measured, the curve of these takes the place of latency and transfer. They were
measured one at a time; where many ranks send at once they share cores, caches and memory. How much that costs was
measured, too, while all ranks are at it (`cluster/probe/parts.py`): messages of ranks that receive as much as they
send, additions, and the copies of slices of a GPU, which copy the whole to the host, go through the rounds there, and
copy it back. In a round in which fewer send (of a tree half, then a quarter of the ranks) a message takes between as
long as alone, and as long as where all do.

Of clusters that were probed before that was measured, gloo's own all-reduce tells it: it is a ring, in every round of
which all ranks send, and takes so many times longer than a ring of messages one at a time would.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from trainplan.cluster.cluster import Cluster, Curve
from trainplan.predict.collectives import Talk, all_reduce, cards_between, curve_of, on_curve, one_node, one_of_several
from trainplan.program.exchanges import BY_ROUNDS, TELLING, rounds_of
from trainplan.program.exchanges.rounds import Round
from trainplan.program.lower.backend import backend
from trainplan.program.ops import Kind
from trainplan.program.program import CostClass

PARTS = ("round", "add")  # of sums in rounds, as a probe measures them


class Load(NamedTuple):
    """What a round asks for; shares are of the bytes that are summed."""

    latency_s: float
    host_s: float
    messages: int  # that the busiest member sends and receives
    share: float  # that the busiest member sends, or receives
    link_s: float  # seconds a byte of its link
    added_s: float  # seconds a byte of adding
    cards: tuple[tuple[int, float], ...]  # (shared card, seconds a byte)
    senders: int  # members that send
    adds: float  # share that the busiest member adds


def summed(cluster: Cluster, c: CostClass) -> Talk:
    """A sum, by whoever makes it."""
    if c.by not in (*BY_ROUNDS, TELLING):
        return by_backend(c)(cluster, c.members, c.bytes)
    return in_rounds(cluster, c.by, c.members, c.bytes, c.node)


def by_backend(c: CostClass) -> Callable[[Cluster, tuple[int, ...], int], Talk]:
    """How the backend makes a sum: buckets of a backward pass several at a time, unless a thread of its own takes care
    of them, which has one on its way."""
    return one_of_several if c.kind is Kind.REDUCE_GRAD and not c.background else all_reduce


def in_rounds(cluster: Cluster, by: str, members: tuple[int, ...], size: int, node: int = 0) -> Talk:
    """A sum of `size` bytes by an algorithm of ours. A search asks for the same ones again and again: they are kept."""
    known, key = cluster.known_sums, (by, members, size, node)
    if key not in known:
        known[key] = _in_rounds(cluster, by, members, size, node)
    found: Talk = known[key]
    return found


def _in_rounds(cluster: Cluster, by: str, members: tuple[int, ...], size: int, node: int) -> Talk:
    rounds = loads(cluster, by, members, node)
    if one_node(cluster, members) and curve_of(cluster, "p2p", 2) is not None:
        exchanging, adding = (curve_of(cluster, part, len(members)) for part in PARTS)
        if exchanging is not None and adding is not None:
            return Talk(_of_parts(cluster, rounds, exchanging, adding, size))
        seconds = [_on_curve(cluster, load, size) * _crowded(cluster, load, len(members), size) for load in rounds]
        return Talk(sum(seconds))
    lead = transfer = 0.0
    asked: dict[int, float] = defaultdict(float)  # seconds of each card
    for load in rounds:
        lead += load.latency_s + load.host_s + size * load.added_s
        busiest = size * max([load.link_s, *(per_byte for _, per_byte in load.cards)])
        if load.cards:
            transfer += busiest
            for card, per_byte in load.cards:
                asked[card] += size * per_byte
        else:
            lead += busiest
    if not transfer:
        return Talk(lead)
    return Talk(lead, transfer, tuple((card, seconds / transfer) for card, seconds in sorted(asked.items())))


def _on_curve(cluster: Cluster, load: Load, size: int) -> float:
    """A round by the measured curve of messages, which has a sender's and a receiver's host in it."""
    curve = curve_of(cluster, "p2p", 2)
    assert curve is not None
    further = load.host_s * max(0, load.messages - 2) / load.messages
    return on_curve(curve, size * load.share) + further + size * load.added_s


def _of_parts(cluster: Cluster, rounds: list[Load], exchanging: Curve, adding: Curve, size: int) -> float:
    """By the measured parts of a sum."""
    copying = curve_of(cluster, "stage", exchanging.ranks)
    total = on_curve(copying, size) if copying is not None else 0.0
    for load in rounds:
        sent = size * load.share
        alone = between_hosts(cluster, sent)
        company = (load.senders - 1) / (exchanging.ranks - 1)
        total += alone + company * max(0.0, on_curve(exchanging, sent) - alone)
        total += load.host_s * max(0, load.messages - 2) / load.messages
        total += on_curve(adding, size * load.adds) if load.adds else 0.0
    return total


def between_hosts(cluster: Cluster, size: float) -> float:
    """Seconds of a measured message by itself, without the copies at its ends where it is a GPU's."""
    curve = curve_of(cluster, "p2p", 2)
    assert curve is not None
    copies = 0.0 if backend(cluster.backend).receives_on_device else 2 * size / cluster.device(0).host_rate
    return on_curve(curve, size) - copies


def _crowded(cluster: Cluster, load: Load, ranks: int, size: int) -> float:
    """How many times longer a round takes because many send at once; 1 where no all-reduce of so many was measured."""
    measured = curve_of(cluster, "all_reduce", ranks)
    if measured is None or load.senders == 1:
        return 1.0
    summed = size * load.share * ranks  # by a ring, whose members send as much in a round
    ring = loads(cluster, "ring", tuple(range(ranks)), 0)
    alone = sum(_on_curve(cluster, one, round(summed)) for one in ring)
    return 1.0 + max(0.0, on_curve(measured, summed) / alone - 1.0) * (load.senders - 1) / (ranks - 1)


def loads(cluster: Cluster, by: str, members: tuple[int, ...], node: int) -> list[Load]:
    """What each round asks for, worked out on as many elements as all algorithms cut into equal parts."""
    known, key = cluster.known_sums, (by, members, node)
    if key not in known:
        elements = len(members) << (len(members).bit_length() - 1)
        rounds = rounds_of(by, members, elements, node)
        known[key] = [_load(cluster, members, one, elements) for one in rounds]
    found: list[Load] = known[key]
    return found


def _load(cluster: Cluster, members: tuple[int, ...], one: Round, elements: int) -> Load:
    latency, messages = 0.0, Counter[int]()
    host, share, link_s, card_s, added, adds = (defaultdict[int, float](float) for _ in range(6))
    for t in one:
        a, b = members[t.source], members[t.target]
        link, part = cluster.link(a, b), (t.last - t.first) / elements
        latency = max(latency, link.latency_s)
        for end in (2 * t.source, 2 * t.target + 1):  # a member's way out, and its way in
            share[end] += part
            link_s[end] += part / link.rate
            host[end // 2] += link.message_s
            messages[end // 2] += 1
        for card, rate in cards_between(cluster, a, b).items():
            card_s[card] += part / rate
        if t.adds:
            added[t.target] += part * 3 / cluster.device(b).memory_rate
            adds[t.target] += part
    return Load(
        latency, max(host.values()), max(messages.values()), max(share.values()), max(link_s.values()),
        max(added.values(), default=0.0), tuple(card_s.items()), len({t.source for t in one}),
        max(adds.values(), default=0.0),
    )  # fmt: skip
