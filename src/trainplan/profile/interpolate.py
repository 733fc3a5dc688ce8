"""Between the sizes that were measured, and beyond them. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def interpolate(sizes: tuple[int, ...], values: NDArray[np.float64] | Sequence[float], at: float) -> float:
    """The piecewise linear curve through (sizes, values), at a size.

    >>> interpolate((1, 2, 4), (1.0, 1.5, 2.5), 3), interpolate((1, 2, 4), (1.0, 1.5, 2.5), 8)
    (2.0, 4.5)
    >>> interpolate((4,), (2.0,), 8)
    4.0
    """
    if len(sizes) == 1:
        return float(values[0]) * at / sizes[0]
    right = min(max(bisect_left(sizes, at), 1), len(sizes) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    if at > sizes[-1]:
        slope = max(slope, 0.0)
        return float(values[-1] + slope * (at - sizes[-1]))
    if at < sizes[0]:
        slope = min(max(slope, 0.0), values[0] / sizes[0])
        return float(values[0] + slope * (at - sizes[0]))
    return float(values[left] + slope * (at - sizes[left]))
