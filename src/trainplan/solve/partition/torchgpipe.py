"""torchgpipe's partition: blocks of a sequence whose sums differ by no more than the largest element.

The algorithm is Bárány and Grinberg's ("Block partitions of sequences", 2013). Scale the costs so that each is at most
1, start anywhere, and let p be a block (here: a stage) of the largest sum, M:

    while M > m + 1, where m is the smallest sum:
        q := a block of the smallest sum, the one closest to p
        move one element into q from its neighbour on the side of p
        if that neighbour was p itself: choose p anew

Then any two stages differ by at most 1, that is by at most the costliest element, after O(stages · blocks³) steps. Note
what this promises: the *difference* is small, not the *maximum* as small as can be (`bottleneck.py` does that;
torchgpipe says that it minimises the variance, and it does not do that either).

The code that torchgpipe ships departs from the theorem in three places, and each can break it:

    published                                           the theorem, and `corrected` below
    costs become (t − min) / (max − min)                t / max: a shift changes which stage is the largest
    q is the *first* block of the smallest sum          the one closest to p: else the neighbour between may be empty
    starts with ⌊n/k⌋ layers a stage, rest in the last  cuts at ⌊n(i+1)/k⌋

`torchgpipe` does what was published, and puts what went wrong into `faults`: a stage that holds nothing, or a layer
that is in two stages (the cuts do not rise). A partition with faults cannot be run.

>>> from trainplan.solve.partition.instance import P1, P2, on
>>> found = torchgpipe(on(P1, devices=4))                      # lengths 1, 1, 1, 3: the slowest takes 9, not 7
>>> found.cuts, found.value, found.faults
((1, 2, 3), 9.0, ())
>>> torchgpipe(on(P2, devices=3)).faults
('stage 1 holds no block',)
>>> torchgpipe(on(P2, devices=4)).faults
('stage 2 holds no block', 'block 5 is in stages 1 and 3')
>>> corrected(on(P2, devices=4)).cuts
(1, 3, 5)
"""

from __future__ import annotations

import numpy as np
from numba import njit

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Floats, Instance, Ints, enough_blocks

_STEPS = 1_000_000  # hundreds of blocks take thousands


def torchgpipe(given: Instance) -> Partition:
    """As published; look at `faults` before the cuts."""
    times = _times("torchgpipe", given)
    spread = float(times.max() - times.min())
    scaled = (times - times.min()) / spread if spread > 0 else np.zeros(given.blocks)
    start = np.array([given.blocks // given.devices * (i + 1) for i in range(given.devices - 1)] + [given.blocks])
    return _answer(times, *_blocks(scaled, start.astype(np.int64), False))


def corrected(given: Instance) -> Partition:
    """As the theorem says: never an empty stage, and stages differ by no more than the costliest block."""
    times = _times("torchgpipe-corrected", given)
    scaled = times / times.max() if times.max() > 0 else times
    start = np.array([given.blocks * (i + 1) // given.devices for i in range(given.devices)])
    return _answer(times, *_blocks(scaled, start.astype(np.int64), True))


def _times(name: str, given: Instance) -> Floats:
    enough_blocks(name, given, given.devices)
    return np.asarray(given.seconds, dtype=np.float64)


@njit(cache=True)
def _blocks(cost: Floats, ends: Ints, closest: bool) -> tuple[Ints, bool]:
    """The end of every stage, and whether it came to an end: nothing proves that the published rule does."""
    stages = len(ends)
    sums = np.zeros(stages)
    for k in range(stages):
        sums[k] = cost[(ends[k - 1] if k else 0) : ends[k]].sum()
    p = -1
    for _ in range(_STEPS):
        if p < 0:
            for k in range(stages):
                if p < 0 or sums[k] >= sums[p]:
                    p = k  # the last of the largest, as max() of (sum, stage) takes it
        q = 0
        for k in range(stages):
            if sums[k] < sums[q] or (closest and sums[k] == sums[q] and abs(k - p) < abs(q - p)):
                q = k
        if sums[p] <= sums[q] + 1:
            return ends, True
        if p < q:
            neighbour = q - 1
            ends[neighbour] -= 1
        else:
            neighbour = q + 1
            ends[q] += 1
        for k in range(max(min(q, neighbour) - 1, 0), min(max(q, neighbour) + 2, stages)):
            sums[k] = cost[(ends[k - 1] if k else 0) : ends[k]].sum()  # anew, as published: no rounding adds up
        if neighbour == p:
            p = -1
    return ends, False


def _answer(times: Floats, ends: Ints, ended: bool) -> Partition:
    cuts = [int(end) for end in ends]
    bounds = list(zip([0, *cuts[:-1]], cuts, strict=True))
    faults = [] if ended else ["it goes round in circles"]
    faults += [f"stage {stage} holds no block" for stage, (first, last) in enumerate(bounds) if last <= first]
    for block in range(len(times)):
        holders = [stage for stage, (first, last) in enumerate(bounds) if first <= block < last]
        if len(holders) != 1:
            names = " and ".join(str(stage) for stage in holders)
            faults.append(f"block {block} is in stages {names}" if holders else f"block {block} is in no stage")
    value = max(float(times[first:last].sum()) for first, last in bounds)
    return Partition(tuple(cuts[:-1]), (1,) * len(cuts), value, faults=tuple(faults))
