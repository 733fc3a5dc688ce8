"""TeraPipe: GPipe along the tokens. With causal attention no token reads a later one, so a sequence can follow itself.

    rank 0  F0 F0/1 F0/2 ·    ·    ·    ·    ·    B0/2 B0/1 B0        one micro-batch in three slices
    rank 1  ·  F0   F0/1 F0/2 ·    B0/2 B0/1 B0   ·    ·    ·         (B as long as F here)

Within a micro-batch both orders are forced. Forward: a slice attends to the keys and values of all slices before it.
Backward: those keys and values get their gradients from all slices after it, so the last slice goes back first.

Several micro-batches follow each other as GPipe's do, all forwards and then all backwards, last first: the slices of
one fill the pipeline behind the last slice of the other, so T = m · Σt_i + (K − 1) · max t_i, filled and drained once.
Everything is held until the backward passes begin. That is no loss where sequences are cut at all: because there are
too few of them in a batch to fill the pipeline with micro-batches.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, rows


def terapipe(size: Size) -> list[Order]:
    """
    >>> terapipe(Size(2, 1, slices=3))[1][:, [0, 3, 4]].tolist()
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 2], [1, 0, 1], [1, 0, 0]]
    """
    micro = np.repeat(np.arange(size.micro_batches), size.slices)
    part = np.tile(np.arange(size.slices), size.micro_batches)
    lists = []
    for rank in range(size.ranks):
        forward = rows(Kind.F, rank, micro, slice_=part)
        backward = rows(Kind.B, rank, micro, slice_=part)[::-1]
        lists.append(np.concatenate([forward, backward]))
    return lists
