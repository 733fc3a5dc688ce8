"""How long one flush of a pipeline of unequal stages takes: DAPPLE's formula, and the recursion that it approximates.

Every link between two stages counts as a stage of its own, with forward = backward = its transfer, and after its last
backward a stage sums its gradients (`exchange`). M micro-batches.

**The formula** (DAPPLE, PPoPP 2021): one stage, the pivot Q, is taken to have no bubble between its micro-batches.

    Q = the last stage; for s = last−1 … 0:   Q = s if (M−1)(F_s+B_s) > (M−1)(F_Q+B_Q) + Σ over s<a<Q of (F_a+B_a)
    L = Σ over a≤Q of F_a  +  (M−1)(F_Q+B_Q)  +  max over s of ( exchange_s + Σ over s≤a≤Q of B_a   if s ≤ Q
                                                                 exchange_s − Σ over Q<a<s of B_a   if s > Q )

**The recursion** (of HPGO, DAPPLE's planner): when forward f and backward b of micro-batch i end on stage x, φ = S − x
of them in flight:

    f(i, x) = F_x + max( b(i−φ, x),  f(i−1, x),  f(i, x−1) )
    b(i, x) = B_x + max( b(i, x+1),  b(i−1, x),  f(i+φ−1, x) )
    L = max over x of b(M−1, x) + exchange_x

As links count in S, the stage before p−1 others has 2p−1 in flight: this is DAPPLE's second warm-up, "PB", which hides
transfers; and a link carries one direction at a time. The published code leaves out b(i−1, x), so that backwards of one
stage may overlap while the pipeline drains; here they do not. Both take O((M + S) · S) or less.

The formula is never much above the recursion (3 %), and up to 18 % below it for M ≥ 2S, more for fewer: it is there to
reproduce, the recursion to decide.

>>> formula([1, 1, 1, 1], [2, 2, 2, 2], micro=8), recursion([1, 1, 1, 1], [2, 2, 2, 2], micro=8)
(33.0, 33.0)
>>> formula([2, 4, 2], [4, 8, 4], micro=5), recursion([2, 4, 2], [4, 8, 4], micro=5)
(66.0, 68.0)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from trainplan.solve.partition.instance import Floats


def formula(forward: Sequence[float], backward: Sequence[float], micro: int, exchange: Sequence[float] = ()) -> float:
    """DAPPLE's latency of a flush, links among the stages."""
    return _seconds(forward, backward, exchange, micro, exact=False)


def recursion(forward: Sequence[float], backward: Sequence[float], micro: int, exchange: Sequence[float] = ()) -> float:
    """The latency of a flush as it is played, links among the stages."""
    return _seconds(forward, backward, exchange, micro, exact=True)


def _seconds(
    forward: Sequence[float], backward: Sequence[float], exchange: Sequence[float], micro: int, exact: bool
) -> float:
    f, b, x = (np.array(c or [0.0] * len(forward), dtype=np.float64) for c in (forward, backward, exchange))
    return float(latency(f, b, x, len(forward), micro, exact))


@njit(cache=True)
def latency(forward: Floats, backward: Floats, exchange: Floats, stages: int, micro: int, exact: bool) -> float:
    """Of the first so many stages of these columns."""
    if not exact:
        return _formula(forward, backward, exchange, stages, micro)
    ends_f, ends_b = np.zeros((micro, stages)), np.zeros((micro, stages))
    for step in range(micro + stages):
        # Backward k = step − φ of a stage is due before forward `step`; all it waits for was due at an earlier step.
        for x in range(stages):
            k = step - (stages - x)
            if 0 <= k < micro:
                ready = ends_f[min(k + stages - x - 1, micro - 1), x]
                if x + 1 < stages:
                    ready = max(ready, ends_b[k, x + 1])
                if k > 0:
                    ready = max(ready, ends_b[k - 1, x])
                ends_b[k, x] = ready + backward[x]
        if step >= micro:
            continue
        for x in range(stages):
            ready = ends_f[step, x - 1] if x > 0 else 0.0
            if step > 0:
                ready = max(ready, ends_f[step - 1, x])
            if step >= stages - x:
                ready = max(ready, ends_b[step - (stages - x), x])
            ends_f[step, x] = ready + forward[x]
    longest = 0.0
    for x in range(stages):
        longest = max(longest, ends_b[micro - 1, x] + exchange[x])
    return longest


@njit(cache=True)
def _formula(forward: Floats, backward: Floats, exchange: Floats, stages: int, micro: int) -> float:
    pivot, between = stages - 1, 0.0
    for s in range(stages - 2, -1, -1):
        both = forward[s] + backward[s]
        if (micro - 1) * both > (micro - 1) * (forward[pivot] + backward[pivot]) + between:
            pivot, between = s, 0.0
        else:
            between += both
    tail, total = -np.inf, 0.0
    behind = 0.0
    for s in range(pivot, -1, -1):
        behind += backward[s]
        tail = max(tail, exchange[s] + behind)
        total += forward[s]
    ahead = 0.0
    for s in range(pivot + 1, stages):
        tail = max(tail, exchange[s] - ahead)
        ahead += backward[s]
    return total + (micro - 1) * (forward[pivot] + backward[pivot]) + tail
