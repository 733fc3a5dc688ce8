"""Naive model parallelism: the stages in turn, one micro-batch at a time.

    rank 0  F0 ·  ·  B0 F1 ·  ·  B1
    rank 1  ·  F0 B0 ·  ·  F1 B1 ·

With one stage it is gradient accumulation, and with one micro-batch plain training. Where stages have different numbers
of ranks (`dp=2,1,1`), these take the micro-batches in turn, and each has one at a time.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, by_slot, in_turn, rows


def naive(size: Size) -> list[Order]:
    """
    >>> naive(Size(1, 2))[0][:, [0, 3]].tolist() == [[Kind.F, 0], [Kind.B, 0], [Kind.F, 1], [Kind.B, 1]]
    True
    """
    micro = np.arange(size.micro_batches)
    lists = [
        by_slot((rows(Kind.F, rank, micro), 2 * micro), (rows(Kind.B, rank, micro), 2 * micro + 1))
        for rank in range(size.ranks)
    ]
    return in_turn(lists, size.spread) if size.spread else lists
