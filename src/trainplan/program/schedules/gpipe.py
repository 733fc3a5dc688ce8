"""GPipe: all forwards, then all backwards, last micro-batch first.

    rank 0  F0 F1 F2 ·  ·  ·  ·  B2 B1 B0
    rank 1  ·  F0 F1 F2 ·  B2 B1 B0 ·  ·        (B as long as F here)

Every rank holds the activations of all micro-batches, which is why GPipe recomputes.

With several chunks a rank this is the *looped* (breadth-first) pipeline: all micro-batches through one chunk, then all
through the next. Its bubble is that of the interleaved one; it holds more, and its messages may be larger and fewer.

Stages may have different numbers of ranks (`dp=2,1,1`), which take the micro-batches in turn.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, in_turn, rows


def gpipe(size: Size) -> list[Order]:
    """
    >>> gpipe(Size(2, 2))[1][:, 3].tolist()
    [0, 1, 1, 0]
    >>> gpipe(Size(2, 2, chunks=2))[0][:, 2].tolist()
    [0, 0, 2, 2, 2, 2, 0, 0]
    >>> [order[:, 3].tolist() for order in gpipe(Size(2, 3, spread=(2, 1)))]
    [[0, 2, 2, 0], [1, 1], [0, 1, 2, 2, 1, 0]]
    """
    micro = np.tile(np.arange(size.micro_batches), size.chunks)
    chunk = np.repeat(np.arange(size.chunks), size.micro_batches)
    lists = []
    for rank in range(size.ranks):
        forward = rows(Kind.F, chunk * size.ranks + rank, micro)
        backward = rows(Kind.B, chunk * size.ranks + rank, micro)[::-1]
        lists.append(np.concatenate([forward, backward]))
    return in_turn(lists, size.spread) if size.spread else lists
