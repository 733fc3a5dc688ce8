"""GPipe: all forwards, then all backwards, last micro-batch first.

    rank 0  F0 F1 F2 ·  ·  ·  ·  B2 B1 B0
    rank 1  ·  F0 F1 F2 ·  B2 B1 B0 ·  ·        (B as long as F here)

Every rank holds the activations of all micro-batches, which is why GPipe recomputes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainplan.program.ops import Kind


def gpipe(stages: int, micro_batches: int) -> list[NDArray[np.int64]]:
    """
    >>> gpipe(2, 2)[1][:, 2].tolist()
    [0, 1, 1, 0]
    """
    forward = np.arange(micro_batches)
    kinds = np.repeat([Kind.F, Kind.B], micro_batches)
    micro = np.concatenate([forward, forward[::-1]])
    return [np.column_stack([kinds, np.full(len(kinds), stage), micro]) for stage in range(stages)]
