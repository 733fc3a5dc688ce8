"""1F1B (DAPPLE, PipeDream-Flush, Megatron): as soon as the first micro-batch is through, a backward after each forward.

    rank 0  F0 F1 F2 F3 ·  ·  B0 ·  F4 …      warm-up: as many forwards as stages follow
    rank 1  ·  F0 F1 F2 ·  B0 F3 B1 …
    rank 2  ·  ·  F0 F1 B0 F2 B1 F3 …
    rank 3  ·  ·  ·  F0 B0 F1 B1 F2 …

The bubble is GPipe's, but rank r holds the activations of only min(m, p − r) micro-batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainplan.program.ops import Kind


def one_forward_one_backward(stages: int, micro_batches: int) -> list[NDArray[np.int64]]:
    """
    >>> one_forward_one_backward(2, 3)[0][:, 2].tolist()    # F0 F1 B0 F2 B1 B2
    [0, 1, 0, 2, 1, 2]
    """
    lists = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - 1 - stage)
        steady = micro_batches - warm_up
        order = np.empty((2 * micro_batches, 3), dtype=np.int64)
        order[:, 1] = stage
        order[:warm_up, 0], order[:warm_up, 2] = Kind.F, np.arange(warm_up)
        middle = order[warm_up : warm_up + 2 * steady]
        middle[0::2, 0], middle[0::2, 2] = Kind.F, np.arange(warm_up, micro_batches)
        middle[1::2, 0], middle[1::2, 2] = Kind.B, np.arange(steady)
        order[warm_up + 2 * steady :, 0], order[warm_up + 2 * steady :, 2] = Kind.B, np.arange(steady, micro_batches)
        lists.append(order)
    return lists
