"""The bottleneck partition: cut a chain into stages so that the slowest stage is as fast as can be.

A pipeline is as fast as its slowest stage, so this is the core that GPipe's, BaPipe's, LAMP's and Varuna's
partitioners share. A dynamic program over (stages left, first block left), O(blocks² · stages), exact:

    worst(s, i) = min over j of max( seconds of blocks i … j-1,  worst(s - 1, j) )

Times that were measured are hardly ever equal, yet a cut in a cheap place is worth more than the last percent of
balance. So a second pass looks for the cuts with the least traffic among all partitions whose slowest stage is within
`slack` of the best; then for the best balance among those, of the later stages too where an earlier one decides; then
for the earliest cuts, so that the answer is always the same.

>>> bottleneck([4, 2, 7, 1, 3, 5], stages=3)          # 4+2 | 7+1 | 3+5
(2, 4)
>>> bottleneck([1, 1, 1, 1, 8, 2], stages=4)          # the 8 decides: the earliest of several cuts
(1, 4, 5)
>>> bottleneck([1, 1, 1, 1, 8, 2], stages=4, traffic=[2, 5, 1, 3, 2])
(3, 4, 5)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.errors import PlanError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def bottleneck(
    seconds: Sequence[float] | Floats,
    stages: int,
    traffic: Sequence[float] | Floats = (),
    allowed: Bools | None = None,
    slack: float = 0.0,
) -> tuple[int, ...] | None:
    """The first block of every stage but the first; None where nothing is allowed.

    `traffic[j]` is what crosses the cut after block j. `allowed[s, i, j]` says whether stage s may hold the blocks
    i ≤ b < j (its memory); without it every stage may hold any.
    """
    times = np.asarray(seconds, dtype=np.float64)
    blocks = len(times)
    if not 1 <= stages <= blocks:
        raise PlanError(f"{stages} stages", f"the model has {blocks} blocks, and a stage holds at least one", "pp=1")
    crossing = np.zeros(blocks + 1)
    if len(traffic):
        crossing[1:blocks] = np.asarray(traffic, dtype=np.float64)[: blocks - 1]
    until = np.concatenate([[0.0], np.cumsum(times)])
    if allowed is None:
        allowed = np.ones((1, 1, 1), dtype=np.bool_)
    possible, cuts = _cuts(until, stages, crossing, allowed, slack)
    return tuple(int(cut) for cut in cuts) if possible else None


def slowest(seconds: Sequence[float] | Floats, cuts: tuple[int, ...]) -> float:
    """Seconds of the slowest stage of a partition.

    >>> slowest([4, 2, 7, 1, 3, 5], (2, 4))
    8.0
    """
    return float(np.add.reduceat(np.asarray(seconds, dtype=np.float64), [0, *cuts]).max())


@njit(cache=True)
def _cuts(until: Floats, stages: int, traffic: Floats, allowed: Bools, slack: float) -> tuple[bool, NDArray[np.int64]]:
    """Whether there is any, and the best. A mask of one entry allows everything."""
    blocks = len(until) - 1
    free = allowed.shape[0] == 1 and allowed.shape[1] == 1
    # worst[s, i]: slowest stage of the best partition of blocks i … into s stages.
    worst = np.full((stages + 1, blocks + 1), np.inf)
    worst[0, blocks] = 0.0
    for s in range(1, stages + 1):
        stage = stages - s
        for i in range(stage, blocks - s + 1):
            best = np.inf
            for j in range(i + 1, blocks - s + 2):
                own = until[j] - until[i]
                if own >= best:
                    break  # longer runs are only slower
                if free or allowed[stage, i, j]:
                    best = min(best, max(own, worst[s - 1, j]))
            worst[s, i] = best
    cuts = np.zeros(stages - 1, dtype=np.int64)
    if worst[stages, 0] == np.inf:
        return False, cuts
    limit = worst[stages, 0] * (1.0 + slack)
    # Among partitions within the limit: the least traffic, then the best balance.
    least = np.full((stages + 1, blocks + 1), np.inf)
    peak = np.full((stages + 1, blocks + 1), np.inf)
    then = np.full((stages + 1, blocks + 1), -1)
    least[0, blocks], peak[0, blocks] = 0.0, 0.0
    for s in range(1, stages + 1):
        stage = stages - s
        for i in range(stage, blocks - s + 1):
            for j in range(i + 1, blocks - s + 2):
                own = until[j] - until[i]
                if own > limit:
                    break
                if least[s - 1, j] == np.inf or not (free or allowed[stage, i, j]):
                    continue
                cost = traffic[j] + least[s - 1, j]
                high = max(own, peak[s - 1, j])
                if cost < least[s, i] or (cost == least[s, i] and high < peak[s, i]):
                    least[s, i], peak[s, i], then[s, i] = cost, high, j
    at = 0
    for s in range(stages, 1, -1):
        at = then[s, at]
        cuts[stages - s] = at
    return True, cuts
