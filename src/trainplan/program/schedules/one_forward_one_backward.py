"""1F1B (DAPPLE, PipeDream-Flush, Megatron): as soon as the first micro-batch is through, a backward after each forward.

    rank 0  F0 F1 F2 F3 ·  ·  B0 ·  F4 …      warm-up: as many forwards as stages follow
    rank 1  ·  F0 F1 F2 ·  B0 F3 B1 …
    rank 2  ·  ·  F0 F1 B0 F2 B1 F3 …
    rank 3  ·  ·  ·  F0 B0 F1 B1 F2 …

The bubble is GPipe's, but rank r holds the activations of only min(m, p − r) micro-batches.

That a gradient comes back just when the next forward is over holds only while messages take no time: with a latency c
the steady state takes 2c(p − 1) / p longer for every micro-batch. DAPPLE's policy B (`early`) starts 2(p − r) − 1
forwards before its first backward instead of p − r, holds nearly twice as much, and waits for no message while
c ≤ (F + B) / 2.

Stages may have different numbers of ranks (`dp=2,1,1`): micro-batch t is for rank t mod r of a stage with r. Such a
rank starts as many forwards early as rounds of its stage fit before the first gradient can be back (PipeDream's rule).
"""

from __future__ import annotations

import math

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Ints, Order, Size, by_slot, rows


def one_forward_one_backward(size: Size) -> list[Order]:
    """
    >>> one_forward_one_backward(Size(2, 3))[0][:, 3].tolist()    # F0 F1 B0 F2 B1 B2
    [0, 1, 0, 2, 1, 2]
    >>> [order[:, 3].tolist() for order in one_forward_one_backward(Size(2, 4, spread=(2, 1)))]
    [[0, 2, 0, 2], [1, 3, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    if size.spread:
        return [order for stage in range(size.ranks) for order in _spread(size, stage)]
    return [_order(size, rank, size.ranks - 1 - rank) for rank in range(size.ranks)]


def _spread(size: Size, stage: int) -> list[Order]:
    """The orders of all ranks of a stage."""
    own, ways = size.spread[stage], math.lcm(*size.spread)
    after = sum(size.spread[stage:]) - 1  # ranks that a micro-batch can be on before its gradient is back
    orders = []
    for turn in range(own):
        micro = np.arange(turn, size.micro_batches, own)
        forward, backward = steady(len(micro), min(len(micro), after // own))
        parts = [
            (rows(kind, stage, micro, micro % ways), slot) for kind, slot in ((Kind.F, forward), (Kind.B, backward))
        ]
        orders.append(by_slot(*parts))
    return orders


def early_one_forward_one_backward(size: Size) -> list[Order]:
    """DAPPLE's policy B.

    >>> early_one_forward_one_backward(Size(2, 3))[0][:, 3].tolist()    # F0 F1 F2 B0 B1 B2
    [0, 1, 2, 0, 1, 2]
    """
    return [_order(size, rank, 2 * (size.ranks - rank) - 2) for rank in range(size.ranks)]


def _order(size: Size, rank: int, warm_up: int) -> Order:
    micro = np.arange(size.micro_batches)
    forward, backward = steady(len(micro), min(len(micro), warm_up))
    return by_slot((rows(Kind.F, rank, micro), forward), (rows(Kind.B, rank, micro), backward))


def steady(count: int, warm_up: int) -> tuple[Ints, Ints]:
    """Slots of forwards and backwards: `warm_up` forwards, then one of each in turn, then the backwards that are left.

    >>> steady(3, 1)                      # F0 F1 B0 F2 B1 B2
    (array([0, 1, 3]), array([2, 4, 5]))
    """
    number = np.arange(count)
    forward = np.where(number < warm_up, number, 2 * number - warm_up)
    backward = np.where(number < count - warm_up, warm_up + 2 * number + 1, number + count)
    return forward, backward
