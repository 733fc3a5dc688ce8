"""What passes begin and end with.

A pass is one operation, or several in a row where it comes in pieces (by block, section or bucket). A backward pass may
also come in two parts, which do not follow each other at once: one for what came in (I), one for the weights (W).

    F F F    …    B B B              FIRST_FORWARD, FINAL_FORWARD    the first and the last F
    F F F    …    I    …    W        FIRST_BACK, GIVING              the first and the last B, or I
                                     GATHERING, FINAL_BACK           the first and the last B, or W

So gradients of what came in are there after GIVING, and GATHERING is the first to add to those of the weights.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints, are

FIRST_FORWARD, FINAL_FORWARD, FIRST_BACK, GIVING, GATHERING, FINAL_BACK = range(6)  # tables of `passes_of`
_FORWARD, _FOR_INPUTS, _FOR_WEIGHTS = are((Kind.F,)), are((Kind.B, Kind.I)), are((Kind.B, Kind.W))


def passes_of(kind: Ints, stage: Ints, place: Ints, stages: int, places: int) -> Ints:
    """The six tables, of every stage and place, from kind, stage and place of every operation; -1: there is none."""
    parts = [_first_and_last(own[kind], stage, place, stages, places) for own in (_FORWARD, _FOR_INPUTS, _FOR_WEIGHTS)]
    return np.concatenate(parts)


@njit(cache=True)
def _first_and_last(chosen: Bools, stage: Ints, place: Ints, stages: int, places: int) -> Ints:
    """Of the operations that are chosen; each is in the list of one rank, whose operations rise in number."""
    found = np.full((2, stages, places), -1, np.int64)
    for op in range(len(chosen)):
        if chosen[op]:
            if found[0, stage[op], place[op]] < 0:
                found[0, stage[op], place[op]] = op
            found[1, stage[op], place[op]] = op
    return found
