"""Hosts go through their lists: what `events.py` does whenever one of them may go on."""

# Compiled code: to numba a numpy integer and a Python one are the same.
# mypy: disable-error-code="assignment, arg-type, misc"

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.program import Bools, Ints
from trainplan.program.wiring import Small

Floats = NDArray[np.float64]


@njit(cache=True, inline="always")
def go_on(
    rank: int, cursor: Ints, list_start: Ints, list_items: Ints, waits: Bools, free: Bools, unmet: Small, host: Floats,
    ready: Floats, issued: Floats, issue: Floats, stack: Small, top: int, attends: bool, attended: Small, heard: Floats,
    kept: Bools,
) -> int:  # fmt: skip
    """Let the host of a rank go on, up to and with the next operation that it waits for, or up to one before which it
    waits for collectives (`attended` is how many of them are not over).

    What can run now is put on the stack, whose new height is returned. `ready` is when everything that an operation
    waits for is there, `issued` when its host has finished issuing it, `heard` when the last of the collectives that
    its host waits for was over; a host that is `kept` has issued an operation that it waits for. Where hosts do not
    attend to collectives, the last three are not looked at.
    """
    if free[rank]:
        return top
    while cursor[rank] < list_start[rank + 1]:
        op = list_items[cursor[rank]]
        if attends:
            if attended[op] > 0:
                break
            if heard[op] > host[rank]:
                host[rank] = heard[op]
        cursor[rank] += 1
        if host[rank] > ready[op]:
            ready[op] = host[rank]
        host[rank] += issue[op]
        if host[rank] > issued[op]:
            issued[op] = host[rank]
        unmet[op] -= 1
        if unmet[op] == 0:
            stack[top] = op
            top += 1
        if waits[op]:
            if attends:
                kept[rank] = True
            break
    return top


@njit(cache=True, inline="always")
def hear(after: int, over: float, attended: Small, heard: Floats) -> bool:
    """A collective that an operation waits for is over: whether its host has now heard of all that it waits for.

    A collective and what computes hold no resource in common, so whoever computes after one reads what it makes.
    """
    if attended[after] == 0:
        return False
    attended[after] -= 1
    if over > heard[after]:
        heard[after] = over
    return attended[after] == 0
