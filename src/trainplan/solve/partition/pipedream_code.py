"""PipeDream's optimizer as its code has it, to reproduce the plans that it printed.

The same dynamic program as in `pipedream.py`, from the front, with these costs (`optimizer_graph_hierarchical.py`):

    T(i..j, q) = ( Σ seconds  +  4 (q−1)/q · Σ weights / rate ) / q
    A(j, q)    = min( T(0..j, q),  min over i, q' of max( A(i, q − q'), T(i+1..j, q') ) )

What differs from the paper, and from ours:

* The exchange of weights is added to the compute, not overlapped with it, and is a parameter server's, twice a ring's.
* Activations between stages cost nothing unless a compression ratio is given; then 2 · boundary / (rate · q') of the
  later stage's input and output, divided by the ratio. The first stage's output counts only as the next one's input.
* At a higher level, the weights of a *first* stage are divided by the units of the level below (not of all levels
  below, and not for later stages).
* Memory: a stage keeps ⌈(n − devices used up to and with it) / q'⌉ times its saved values and weights. That is one
  version less than a stage needs, so the last stage needs nothing, and one stage on all devices passes at any limit;
  and n counts the units of one level only.
* All devices are used, unless `fewer`.

Ties go to the earliest cut and the fewest replicas of the last stage. O(blocks³ · count²) a level.

>>> from trainplan.solve.partition.instance import P1, on
>>> found = pipedream_code(on(P1, devices=4, rate=1.0))
>>> found.cuts, found.replicas, found.value
((2, 3, 5), (1, 1, 1, 1), 7.0)
>>> nodes = on(P1, levels=((2, 4.0), (2, 0.5)))
>>> pipedream_code(nodes).value, pipedream_code(nodes, compression=1.0).value
(7.0, 8.0)
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Floats, Instance, Ints, alike

_Level = tuple[Floats, Ints, Ints, Ints]  # value, end of the part before the last stage, units of that part, replicas


def pipedream_code(given: Instance, compression: float | None = None, fewer: bool = False) -> Partition:
    """`compression`: how many times smaller activations are sent (1: as they are); None: they cost nothing."""
    speed = alike("pipedream-code", given)
    levels = _solve(given, speed, compression, fewer)
    value = float(levels[-1][0][0, -1, -1])
    stages = [(0, given.blocks, 1)]
    for level in reversed(levels):
        stages = [(a, b, q * more) for first, end, q in stages for a, b, more in _read(level, first, end)]
    return Partition(tuple(first for first, _, _ in stages[1:]), tuple(q for _, _, q in stages), value)


def _solve(given: Instance, speed: float, compression: float | None, fewer: bool) -> list[_Level]:
    sums = given.arrays
    segments = (sums["seconds"][None, 1:] - sums["seconds"][:-1, None]) / speed
    ratio = compression if compression is not None else math.inf
    limit, found, below = min(given.memory), [], 1
    for number, level in enumerate(given.levels):
        solved = _level(
            segments, sums["weights"], sums["saved"], 2 * given.crossing[1:] / level.rate / ratio, level.count,
            level.rate, below, number == len(given.levels) - 1, limit, fewer,
        )  # fmt: skip
        found.append(solved)
        segments, below = np.ascontiguousarray(solved[0][:, :, level.count]), level.count
    return found


def _read(level: _Level, first: int, end: int) -> list[tuple[int, int, int]]:
    """The stages of the blocks first ≤ b < end at this level: (first block, end, replicas)."""
    _, before, units, replicas = level
    found, left = [], before.shape[2] - 1
    while True:
        split = int(before[first, end - 1, left])
        found.append((max(split, first), end, int(replicas[first, end - 1, left])))
        if split < 0:
            return found[::-1]
        left, end = int(units[first, end - 1, left]), split


@njit(cache=True)
def _level(
    segments: Floats, weights: Floats, saved: Floats, crossing: Floats, count: int, rate: float, below: int,
    whole: bool, limit: float, fewer: bool,
) -> _Level:  # fmt: skip
    """[i, j, q]: the blocks i … j on q units. `before` < 0: one stage."""
    blocks = len(crossing)
    value = np.full((blocks, blocks, count + 1), np.inf)
    before = np.full((blocks, blocks, count + 1), -1)
    units = np.zeros((blocks, blocks, count + 1), dtype=np.int64)
    replicas = np.zeros((blocks, blocks, count + 1), dtype=np.int64)
    for i in range(blocks):
        for j in range(i, blocks):
            held = saved[j + 1] - saved[i] + weights[j + 1] - weights[i]
            for q in range(1, count + 1):
                replicas[i, j, q] = q
                if -(-(count - q) // q) * held <= limit:
                    sync = 4.0 * (q - 1) * (weights[j + 1] - weights[i]) / (rate * q) / below
                    value[i, j, q] = (segments[i, j] + sync) / q
    for i in range(1 if whole else blocks):
        for q in range(2, count + 1):
            for j in range(i + 1, blocks):
                if fewer and value[i, j, q - 1] < value[i, j, q]:
                    value[i, j, q], before[i, j, q] = value[i, j, q - 1], before[i, j, q - 1]
                    units[i, j, q], replicas[i, j, q] = units[i, j, q - 1], replicas[i, j, q - 1]
                for k in range(i, j):
                    held = saved[j + 1] - saved[k + 1] + weights[j + 1] - weights[k + 1]
                    for share in range(1, q):
                        if -(-(count - q) // share) * held > limit:
                            continue
                        sync = 4.0 * (share - 1) * (weights[j + 1] - weights[k + 1]) / (rate * share)
                        total = max(value[i, k, q - share], (segments[k + 1, j] + sync) / share)
                        total = max(total, crossing[k] / share)
                        if j < blocks - 1:
                            total = max(total, crossing[j] / share)
                        if total < value[i, j, q]:
                            value[i, j, q], before[i, j, q] = total, k + 1
                            units[i, j, q], replicas[i, j, q] = q - share, share
    return value, before, units, replicas
