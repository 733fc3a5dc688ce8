"""Interleaved 1F1B (Megatron-LM): every rank holds several stages, so a micro-batch passes every rank several times.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 …        two ranks, two chunks: stages 0 and 2
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 …                        stages 1 and 3

Filling the pipeline takes a stage and not a rank's worth of layers, so the bubble shrinks by the number of chunks:
T = (m + (p − 1) / v)(F + B). The price: v times the messages, and rank r holds 2(p − 1 − r) + (v − 1)g + 1 chunks.

Micro-batches go in rounds of g: g of them through the first chunk, then the same through the next (*depth first*).
Megatron takes g = p and wants m to be a multiple of it; torch divides m into m // p rounds. Here the rounds are torch's
where they divide m, and otherwise Megatron's with a last round of fewer (it may have fewer than p only if it is the
only one: else a rank would wait for a micro-batch that stands behind its own).
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.one_forward_one_backward import steady
from trainplan.program.schedules.order import Ints, Order, Size, by_slot, only, rows


def round_length(ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through a chunk before the next chunk has its turn.

    >>> round_length(4, 8), round_length(4, 10), round_length(4, 3), round_length(4, 9)
    (4, 5, 3, 4)
    """
    rounds = max(1, micro_batches // ranks)
    return micro_batches // rounds if micro_batches % rounds == 0 else ranks


def interleaved(size: Size) -> list[Order]:
    """
    >>> [order[:4, 2].tolist() for order in interleaved(Size(2, 2, chunks=2))]
    [[0, 0, 2, 2], [1, 1, 3, 3]]
    """
    ranks, chunks = size.ranks, size.chunks
    group = round_length(ranks, size.micro_batches)
    # Whole rounds: what is beyond the last micro-batch is left out again.
    total = -(-size.micro_batches // group) * group
    number = np.arange(total * chunks)
    chunk, micro = _walk(number, group, chunks)
    lists = []
    for rank in range(ranks):
        warm_up = min(len(number), (chunks - 1) * group + 2 * (ranks - 1 - rank))
        forward, backward = steady(len(number), warm_up)
        order = by_slot(
            (rows(Kind.F, chunk * ranks + rank, micro), forward),
            (rows(Kind.B, (chunks - 1 - chunk) * ranks + rank, micro), backward),
        )
        lists.append(only(order, size.micro_batches))
    return lists


def _walk(number: Ints, group: int, chunks: int) -> tuple[Ints, Ints]:
    """Chunk and micro-batch of the n-th forward of a rank."""
    return number // group % chunks, number // (group * chunks) * group + number % group
