"""TeraPipe: pipelining along the tokens of one sequence.

    rank 0  F0.0 F0.1 F0.2 ·    ·    ·    B0.2 B0.1 B0.0        0.1: micro-batch 0, slice 1
    rank 1  ·    F0.0 F0.1 F0.2 B0.2 B0.1 B0.0

With causal attention a token sees only those before it, so a slice of the sequence can go on to the next stage while
the next slice is at work; its keys and values stay behind for the later ones. Backward must go in the opposite order:
the keys of an early slice get gradients from all later slices.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, rows


def terapipe(size: Size) -> list[Order]:
    """
    >>> terapipe(Size(1, 1, slices=2))[0][:, [0, 4]].tolist()
    [[0, 0], [0, 1], [1, 1], [1, 0]]
    """
    micro = np.repeat(np.arange(size.micro_batches), size.slices)
    part = np.tile(np.arange(size.slices), size.micro_batches)
    return [
        np.concatenate([rows(Kind.F, rank, micro, 0, part), rows(Kind.B, rank, micro, 0, part)[::-1]])
        for rank in range(size.ranks)
    ]
