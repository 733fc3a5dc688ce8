"""Orders that are decided while running.

A rank with a policy takes, whenever it is free, the best of its operations that are ready. A policy is a pure function
of (ready operations, state), so that the clock and the engine decide alike; what was decided is recorded and can be
replayed as a list.
"""

from __future__ import annotations

from enum import IntEnum

from numba import njit


class Policy(IntEnum):
    """How a rank chooses among the operations that are ready."""

    LIST = 0  # it does not: the list decides
    ARRIVAL = 1  # whichever was ready first
    PRIORITY = 2  # the one with the lowest priority number, then whichever was ready first
    PUSH = 3  # whichever was ready first, and of several at one moment the one with the lowest priority number


@njit(cache=True, inline="always")
def goes_before(
    policy: int, ready_a: float, priority_a: int, op_a: int, ready_b: float, priority_b: int, op_b: int
) -> bool:
    """Whether ready operation a is taken before ready operation b. Ties go to the lower number: always the same way.

    >>> goes_before(Policy.ARRIVAL, 1.0, 9, 7, 2.0, 0, 3), goes_before(Policy.PRIORITY, 1.0, 9, 7, 2.0, 0, 3)
    (True, False)
    """
    if policy == 2 and priority_a != priority_b:
        return priority_a < priority_b
    if ready_a != ready_b:
        return ready_a < ready_b
    if policy == 3 and priority_a != priority_b:
        return priority_a < priority_b
    return op_a < op_b
