"""A quantity of every block by itself, all at once: what `Profile.total` says of each. No torch here."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from trainplan.profile.profile import Profile


def by_block(profile: Profile, quantity: str, samples: int) -> NDArray[np.float64]:
    """The same numbers, to the last bit, as `profile.total(quantity, b, b + 1, samples)` of every block b."""
    table, sizes = np.diff(profile.curves[quantity], axis=1), profile.samples
    if len(sizes) == 1:
        return np.asarray(table[0] * samples / sizes[0])
    right = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
    left = right - 1
    slope = (table[right] - table[left]) / (sizes[right] - sizes[left])
    if samples > sizes[-1]:
        return np.asarray(table[-1] + np.maximum(slope, 0.0) * (samples - sizes[-1]))
    if samples < sizes[0]:
        slope = np.minimum(np.maximum(slope, 0.0), table[0] / sizes[0])
        return np.asarray(table[0] + slope * (samples - sizes[0]))
    return np.asarray(table[left] + slope * (samples - sizes[left]))
