"""Zero-bubble pipelines (ZB-H1, ZB-H2): backward in two parts, so that the second can fill the bubble.

The gradient of a stage's *input* (I) is what the stage before waits for. The gradient of its *weights* (W) is wanted
only by the optimizer, so it can wait until there is nothing better to do:

    1F1B    F0 F1 ·  ·  B0 ——                 rank 0 of 2: idle until B0 comes back
    ZB-H1   F0 F1 ·  I0 W0 …                  the others are through with I0 before they do their W

* **H1** keeps 1F1B's memory. Rank r puts its first W off by r, so that I's follow one another: the bubble falls to
  (p − 1) · max(F, I, F + I − W).
* **H2** takes twice the memory and fills the start, too: 2(p − r) − 1 forwards before the first I. No rank idles
  between its first and its last operation while W ≤ F and 2W ≤ F + I. It needs m ≥ 2p − 1 for that.

The two parts together take longer than the whole, 1.2 to 2 times: they are measured apart (`profile`), and whether it
pays is for the clock to say.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, by_slot, rows


def zb_h1(size: Size) -> list[Order]:
    """For n = 0, 1, …: the next F if there is one, I(n), and from n = r on the next W."""
    return [
        _order(size, rank, warm_up=size.ranks - 1 - rank, delay=rank, turns=(0, 1, 2)) for rank in range(size.ranks)
    ]


def zb_h2(size: Size) -> list[Order]:
    """For n = 0, 1, …: I(n), from n = 2r on the next W, and the next F if there is one."""
    return [
        _order(size, rank, warm_up=2 * (size.ranks - rank) - 1, delay=2 * rank, turns=(2, 0, 1))
        for rank in range(size.ranks)
    ]


def _order(size: Size, rank: int, warm_up: int, delay: int, turns: tuple[int, int, int]) -> Order:
    """`delay`: how many I's go before the first W; `turns`: which of F, I, W is first in a round."""
    micro = np.arange(size.micro_batches)
    count, warm_up = len(micro), min(len(micro), warm_up)
    forward_turn, input_turn, weight_turn = turns
    forward = np.where(micro < warm_up, micro - warm_up, 3 * (micro - warm_up) + forward_turn)
    late = micro + delay
    weight = np.where(late < count, 3 * late + weight_turn, 3 * count + micro)
    return by_slot(
        (rows(Kind.F, rank, micro), forward),
        (rows(Kind.I, rank, micro), 3 * micro + input_turn),
        (rows(Kind.W, rank, micro), weight),
    )
