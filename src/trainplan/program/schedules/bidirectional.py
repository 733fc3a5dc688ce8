"""Pipelines in two directions at once (GEMS, Chimera): every stage lives on two ranks, and each rank holds two stages.

    GEMS      one micro-batch down, the next up: while the last rank of one direction turns round, the first of the
              other has begun. Two copies of the weights, but the activations of one micro-batch only.
    Chimera   half of the micro-batches down, half up, in slots that fit into each other: half of 1F1B's bubble.

Gradients of the copies are summed before the step, so both copies make the same update.

Chimera's slots: with D stages, F of the j-th own micro-batch of a unit of D micro-batches runs at stage s in slot
2j + s, and B in slot 2j + 2D − 1 − s; units follow each other by 2D. More than one pair of pipelines: pair d is shifted
by d · D / f ranks, each pipeline takes D / 2f micro-batches a unit, and the slots still never meet. Where the last unit
is short, the pipelines take what there is in turn: with a micro-batch for each of them, all have work.

The slots are as long as each other only if F = B. With B = 2F further units cost more than 1F1B's; *forward doubling*
(two forwards for each backward slot, units of 2D) repairs that at twice the activations.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Ints, Order, Size, by_slot, counted, only, rows


def gems(size: Size) -> list[Order]:
    """
    >>> gems(Size(2, 2))[0][:, 1:4].tolist()        # down: stage 0; up: stage 1
    [[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    """
    micro = np.arange(size.micro_batches)
    up = micro % 2
    lists = []
    for rank in range(size.ranks):
        stage = np.where(up, size.ranks - 1 - rank, rank)
        forward, backward = (rows(kind, stage, micro, up) for kind in (Kind.F, Kind.B))
        lists.append(by_slot((forward, 2 * micro), (backward, 2 * micro + 1)))
    return lists


def chimera(size: Size) -> list[Order]:
    """Needs an even number of ranks, and pairs that divide half of it.

    >>> chimera(Size(4, 2))[0][:, 1:4].tolist()     # one down: stage 0; one up: stage 3
    [[0, 0, 0], [1, 3, 1], [1, 3, 1], [0, 0, 0]]
    """
    depth, pairs = size.ranks, size.pairs
    own = depth // (2 * pairs)  # micro-batches of each pipeline in a unit
    units = -(-size.micro_batches // depth)
    unit, turn = (column.ravel() for column in np.indices((units, own)))
    parts: list[list[tuple[Order, Ints]]] = [[] for _ in range(depth)]
    for pipeline in range(2 * pairs):
        pair, up = divmod(pipeline, 2)
        place = up * pairs + pair
        whole = (unit + 1) * depth <= size.micro_batches
        micro = unit * depth + np.where(whole, place * own + turn, turn * 2 * pairs + place)
        for stage in range(depth):
            rank = ((depth - 1 - stage if up else stage) + pair * depth // pairs) % depth
            begin = 2 * depth * unit + 2 * turn
            parts[rank] += [
                (rows(Kind.F, stage, micro, pipeline), begin + stage),
                (rows(Kind.B, stage, micro, pipeline), begin + 2 * depth - 1 - stage),
            ]
    return [only(by_slot(*part), size.micro_batches) for part in parts]


def chimera_doubled(size: Size) -> list[Order]:
    """Forward doubling, one pair.

    A rank in the first half leads with the pipeline that runs down (P), the others with the one that runs up.
    """
    depth, half = size.ranks, size.ranks // 2
    units = -(-size.micro_batches // (2 * depth))
    unit, turn = (column.ravel() for column in np.indices((units, depth)))
    whole = 2 * depth * (unit + 1) <= size.micro_batches
    micro = [2 * depth * unit + np.where(whole, way * depth + turn, 2 * turn + way) for way in (0, 1)]  # down and up
    lists = []
    for rank in range(depth):
        lead = 0 if rank < half else 1
        first = half - rank if rank < half else rank - half + 1  # how far ahead the leading pipeline is
        rest = half - first
        stage = (rank, depth - 1 - rank)
        # 0 1 are F and B of the leading pipeline, 2 3 those of the other.
        sorts = [(kind, way, stage[way]) for way in (lead, 1 - lead) for kind in (Kind.F, Kind.B)]
        pattern: list[tuple[str, int]] = []
        for number in range(units):
            pattern += [("100" if number else "00", first), ("2200", rest), ("223", first), ("13", rest + half)]
        lists.append(only(counted(sorts, [*pattern, ("1", first)], micro), size.micro_batches))
    return lists
