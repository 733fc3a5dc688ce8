"""Hierarchical: within nodes, between nodes, within nodes.

The m members of each node scatter the sum of their node among themselves; those of all n nodes that have the same part
sum it in a ring; and the members of each node gather the parts. Between nodes only B/m goes round each ring, and the
rings run side by side.

>>> from trainplan.program.exchanges.rounds import sent
>>> rounds = hierarchical(((0, 1), (2, 3), (4, 5)), 120)
>>> len(rounds), sent(rounds, 6)                    # 2 (m − 1) + 2 (n − 1); 2 (m − 1)/m · B + 2 (n − 1)/n · B/m each
(6, (200, 200, 200, 200, 200, 200))
"""

from __future__ import annotations

from collections.abc import Sequence

from trainplan.program.exchanges.ring import gather, ring, scatter
from trainplan.program.exchanges.rounds import Rounds, cuts, moved, side_by_side, tidy


def hierarchical(nodes: Sequence[Sequence[int]], elements: int) -> Rounds:
    """The sum over the members of some nodes, as many on each."""
    inside = len(nodes[0])
    cut = cuts(elements, inside)
    within = [[moved(half(inside, elements), node) for node in nodes] for half in (scatter, gather)]
    between = [
        moved(ring(len(nodes), cut[part + 1] - cut[part]), [node[part] for node in nodes], cut[part])
        for part in range(inside)
    ]
    return tidy(side_by_side(within[0]) + side_by_side(between) + side_by_side(within[1]))


def nodes_of(members: Sequence[int], node: int) -> tuple[tuple[int, ...], ...]:
    """Places of the members by node, where so many ranks are on each: ranks count through the nodes.

    >>> nodes_of((0, 1, 4, 5), node=4)
    ((0, 1), (2, 3))
    """
    found: dict[int, list[int]] = {}
    for place, rank in enumerate(members):
        found.setdefault(rank // node, []).append(place)
    return tuple(map(tuple, found.values()))
