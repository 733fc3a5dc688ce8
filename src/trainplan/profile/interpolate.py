"""Between the sizes that were measured, and beyond them. No torch here."""

from __future__ import annotations

from bisect import bisect_left


def before(sizes: tuple[int, ...], at: float) -> int:
    """The place of the first of the two sizes whose straight line it is on.

    >>> before((1, 2, 4), 3), before((1, 2, 4), 8), before((4,), 8)
    (1, 1, 0)
    """
    return max(0, min(max(bisect_left(sizes, at), 1), len(sizes) - 1) - 1)


def through(sizes: tuple[int, ...], left: int, low: float, high: float, at: float) -> float:
    """The piecewise linear curve through some sizes: the straight line through its values at one and at the next.

    >>> through((1, 2, 4), before((1, 2, 4), 3), 1.5, 2.5, 3), through((1, 2, 4), before((1, 2, 4), 8), 1.5, 2.5, 8)
    (2.0, 4.5)
    >>> through((4,), 0, 2.0, 2.0, 8)
    4.0
    """
    if len(sizes) == 1:
        return float(low) * at / sizes[0]
    slope = (high - low) / (sizes[left + 1] - sizes[left])
    if at > sizes[-1]:
        slope = max(slope, 0.0)
        return float(high + slope * (at - sizes[-1]))
    if at < sizes[0]:
        slope = min(max(slope, 0.0), low / sizes[0])
    return float(low + slope * (at - sizes[left]))
