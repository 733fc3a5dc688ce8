"""The numbers that differ among many."""

from __future__ import annotations

import numpy as np
from numba import njit

from trainplan.program.program import Ints


@njit(cache=True)
def distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """Where each number that occurs stands first, in ascending order of these numbers; and which of them each is. As
    `np.unique` says it, whose detours take longer than what it does for a small program.

    >>> first, which = distinct(np.array([7, 3, 7, 5]))
    >>> first.tolist(), which.tolist()
    ([1, 3, 0], [2, 0, 2, 1])
    """
    first, which = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    count = 0
    if not len(numbers):
        return first, which
    low, high = numbers.min(), numbers.max()
    if high - low < 4 * len(numbers):  # close together: a table of all between takes less long than to sort them
        place = np.full(high - low + 1, -1, np.int64)
        for k in range(len(numbers) - 1, -1, -1):
            place[numbers[k] - low] = k
        for at in range(len(place)):
            if place[at] >= 0:
                first[count], place[at] = place[at], count
                count += 1
        for k in range(len(numbers)):
            which[k] = place[numbers[k] - low]
        return first[:count], which
    order = np.argsort(numbers, kind="mergesort")
    for k in range(len(order)):
        if k == 0 or numbers[order[k]] != numbers[order[k - 1]]:
            first[count] = order[k]
            count += 1
        which[order[k]] = count - 1
    return first[:count], which
