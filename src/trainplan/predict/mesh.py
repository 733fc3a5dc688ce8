"""Rings through links between pairs of devices, where there is no switch: a hybrid cube mesh, for example.

NCCL lays as many rings as it can, each over lanes of its own, and sends a share of the bytes around each of them. A
lane carries a ring's bytes one way and those of the same ring backwards the other way, so with three ranks or more
every cycle that passes all of them is two rings. Ranks that have no lane between them may be joined through a device
that has one to each; that takes both.

>>> lanes = {(0, 1): 1, (0, 2): 1, (1, 3): 1, (0, 3): 2, (1, 2): 2, (2, 3): 2}      # four devices of a DGX-1
>>> [rings(lanes, members) for members in ((0, 1), (0, 3), (0, 1, 2), (0, 1, 2, 3))]
[1, 2, 2, 4]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, permutations

from trainplan.cluster.cluster import Link, Node

Pair = tuple[int, int]  # the lower one first
MOST = 8  # devices: of more, nobody tries all cycles


def bus(node: Node, members: tuple[int, ...]) -> tuple[Link, float] | None:
    """The link of a lane, and the bytes a second that all rings of these devices of a node have together by NCCL; None
    where there is no ring, or nothing is known of what such links reach."""
    if not node.pairs or not 2 <= len(members) <= MOST:
        return None
    lane = min((pair.link for pair in node.pairs), key=lambda link: link.rate)
    if any(not pair.link.reached for pair in node.pairs):
        return None
    lanes = {_pair(pair.a, pair.b): round(pair.link.rate / lane.rate) for pair in node.pairs}
    count = _known(tuple(sorted(lanes.items())), tuple(sorted(members)))
    return (lane, count * lane.reached * lane.rate) if count else None


@lru_cache(maxsize=1024)
def _known(lanes: tuple[tuple[Pair, int], ...], members: tuple[int, ...]) -> int:
    """The same of all nodes that are alike."""
    return rings(dict(lanes), members)


def rings(lanes: Mapping[Pair, int], members: tuple[int, ...]) -> int:
    """How many rings through these devices have lanes of their own."""
    if len(members) == 2:
        return lanes.get(_pair(*members), 0)
    cycles = list(_cycles(lanes, members, through=False)) or list(_cycles(lanes, members, through=True))
    own = [sum(count for pair, count in lanes.items() if rank in pair) for rank in members]
    return 2 * _packed(cycles, Counter(lanes), min(own) // 2)


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _cycles(lanes: Mapping[Pair, int], members: tuple[int, ...], through: bool) -> Iterator[Counter[Pair]]:
    """The lanes of every cycle that passes all members; `through`: also by way of another device, from one to the
    next."""
    first, *others = members
    for order in permutations(others):
        if order[0] > order[-1]:  # the same one backwards
            continue
        used: Counter[Pair] = Counter()
        for a, b in pairwise((first, *order, first)):
            way = _way(lanes, a, b, through)
            if not way:
                break
            used.update(way)
        else:
            if all(lanes[pair] >= count for pair, count in used.items()):
                yield used


def _way(lanes: Mapping[Pair, int], a: int, b: int, through: bool) -> list[Pair]:
    """The lanes from one device to another."""
    if lanes.get(_pair(a, b)):
        return [_pair(a, b)]
    both = [
        [_pair(a, c), _pair(c, b)]
        for c in sorted({device for pair in lanes for device in pair} - {a, b})
        if lanes.get(_pair(a, c)) and lanes.get(_pair(c, b))
    ]
    return max(both, key=lambda way: min(lanes[pair] for pair in way), default=[]) if through else []


def _packed(cycles: list[Counter[Pair]], free: Counter[Pair], most: int, begin: int = 0) -> int:
    """The most of these cycles, one of them several times if need be, that have lanes of their own."""
    best = 0
    for number in range(begin, len(cycles)):
        if best == most:
            break
        cycle = cycles[number]
        if all(free[pair] >= count for pair, count in cycle.items()):
            best = max(best, 1 + _packed(cycles, free - cycle, most - 1, number))
    return best
