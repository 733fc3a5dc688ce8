"""ZB-V: a zero-bubble pipeline with the memory of 1F1B. Every rank holds two stages, and the stages run in a V.

    stage    0 1 2 3         down: rank 0 first …
             7 6 5 4         and up again: rank 0 holds the first stage and the last

The loss is on rank 0, right beside the inputs, so the first gradients come back early where they are needed last. With
F = I = W the ranks idle nowhere between their first and last operation (m ≥ 2p − 1), and hold 2p chunks, which is what
1F1B holds on its first rank.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order, Size, counted, only


def zb_v(size: Size) -> list[Order]:
    """Needs two chunks a rank: stages r and 2p − 1 − r on rank r.

    >>> order = zb_v(Size(2, 4, chunks=2))[0]
    >>> order[:6, 2].tolist()                    # 0F0 0F1 0F2 3F0 3I0 3W0
    [0, 0, 0, 3, 3, 3]
    """
    ranks = size.ranks
    # The pattern is drawn for so many micro-batches at least; those that are not there are left out again.
    count = max(2 * ranks - 1, size.micro_batches)
    lists = []
    for rank in range(ranks):
        left = ranks - rank
        sorts = [(kind, 0, stage) for stage in (rank, 2 * ranks - 1 - rank) for kind in (Kind.F, Kind.I, Kind.W)]
        more = count - (ranks + left - 1)  # forwards of the first stage that are left after the beginning
        # 0 1 2 are F, I, W of the stage on the way down, 3 4 5 those of the one on the way up.
        pattern = [
            ("0", 2 * left - 1), ("30", rank), ("345", left), ("012345", more), ("12345", count - ranks - more),
            ("14", rank), ("12", left), ("5", rank), ("2", rank),
        ]  # fmt: skip
        lists.append(only(counted(sorts, pattern, [np.arange(count)]), size.micro_batches))
    return lists
