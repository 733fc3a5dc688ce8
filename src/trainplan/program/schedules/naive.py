"""Naive model parallelism: the stages in turn, one micro-batch at a time.

    rank 0  F0 ·  ·  B0 F1 ·  ·  B1
    rank 1  ·  F0 B0 ·  ·  F1 B1 ·

With one stage it is gradient accumulation, and with one micro-batch plain training.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainplan.program.ops import Kind


def naive(stages: int, micro_batches: int) -> list[NDArray[np.int64]]:
    """
    >>> naive(1, 2)[0].tolist() == [[Kind.F, 0, 0], [Kind.B, 0, 0], [Kind.F, 0, 1], [Kind.B, 0, 1]]
    True
    """
    order = np.empty((2 * micro_batches, 3), dtype=np.int64)
    order[0::2, 0], order[1::2, 0] = Kind.F, Kind.B
    order[:, 2] = np.repeat(np.arange(micro_batches), 2)
    return [np.column_stack([order[:, 0], np.full(len(order), stage), order[:, 2]]) for stage in range(stages)]
