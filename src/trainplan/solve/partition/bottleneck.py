"""The bottleneck partition: cut a chain into stages so that the slowest stage is as fast as can be.

A pipeline is as fast as its slowest stage, so this is the core that GPipe's, BaPipe's, LAMP's and Varuna's
partitioners share. A dynamic program over (stages left, first block left), O(blocks² · stages) at most, exact:

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
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.errors import PlanError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


_NONE = np.zeros((1, 1))


class Room(NamedTuple):
    """Which blocks a stage may hold, by bytes: i ≤ b < j where max(fixed[i, j] + held · each[i, j], step[i, j]) and
    what is always there stay within a limit. A table for every stage would be as large as all of these together, for
    hundreds of stages and blocks; and few of its entries are ever looked at: where the bytes of a step, which only grow
    with every block, are too many, or those that no longer run has less of, no longer run needs to be."""

    fixed: Floats  # [i, j]
    each: Floats  # [i, j] of every micro-batch in flight
    step: Floats  # [i, j] never less for a longer run
    held: NDArray[np.int64]  # micro-batches in flight, of every stage
    always: float
    limit: float
    fixed_on: Floats = _NONE  # [i, j] the least of `fixed` from j on; of one entry: not known
    each_on: Floats = _NONE  # … and of `each`


_BYTE = 1.0  # sums of bytes may be off by a fraction of one
EVERYTHING = np.ones((1, 1, 1), dtype=np.bool_)
_NOTHING = Room(_NONE, _NONE, _NONE, np.zeros(1, dtype=np.int64), 0.0, 0.0)


def bottleneck(
    seconds: Sequence[float] | Floats,
    stages: int,
    traffic: Sequence[float] | Floats = (),
    allowed: Bools | Room | None = None,
    slack: float = 0.0,
) -> tuple[int, ...] | None:
    """The first block of every stage but the first; None where nothing is allowed.

    `traffic[j]` is what crosses the cut after block j. `allowed[s, i, j]` says whether stage s may hold the blocks
    i ≤ b < j (its memory), or a `Room` does; without it every stage may hold any.
    """
    times = np.asarray(seconds, dtype=np.float64)
    blocks = len(times)
    if not 1 <= stages <= blocks:
        raise PlanError(f"{stages} stages", f"the model has {blocks} blocks, and a stage holds at least one", "pp=1")
    crossing = np.zeros(blocks + 1)
    if len(traffic):
        crossing[1:blocks] = np.asarray(traffic, dtype=np.float64)[: blocks - 1]
    until = np.concatenate([[0.0], np.cumsum(times)])
    room = allowed if isinstance(allowed, Room) else _NOTHING
    mask = EVERYTHING if allowed is None or isinstance(allowed, Room) else allowed
    possible, cuts = _cuts(until, stages, crossing, mask, room, slack)
    return tuple(int(cut) for cut in cuts) if possible else None


def slowest(seconds: Sequence[float] | Floats, cuts: tuple[int, ...]) -> float:
    """Seconds of the slowest stage of a partition.

    >>> slowest([4, 2, 7, 1, 3, 5], (2, 4))
    8.0
    """
    return float(np.add.reduceat(np.asarray(seconds, dtype=np.float64), [0, *cuts]).max())


def least_limit(stages: int, room: Room) -> float:
    """The smallest limit within which there is any partition, whatever the room's own is.

    >>> bytes_ = np.array([[0.0, 3.0, 5.0, 9.0], [0.0, 0.0, 2.0, 6.0], [0.0, 0.0, 0.0, 4.0], [0.0] * 4])
    >>> least_limit(2, Room(bytes_, 0 * bytes_, bytes_, np.array([1, 1]), always=10.0, limit=0.0))
    15.0
    """
    return float(_least(len(room.fixed) - 1, stages, room))


@njit(cache=True)
def _need(room: Room, stage: int, i: int, j: int) -> float:
    return float(max(room.fixed[i, j] + room.held[stage] * room.each[i, j], room.step[i, j]) + room.always)


@njit(cache=True)
def _from_here(room: Room, stage: int, i: int, j: int) -> float:
    """Bytes that a stage has at least with the blocks i ≤ b < j, and with more of them."""
    least = float(room.step[i, j])
    if room.each_on.shape[0] > 1:
        least = max(least, room.fixed_on[i, j] + room.held[stage] * room.each_on[i, j])
    return least + room.always


@njit(cache=True)
def _filled(blocks: int, stages: int, room: Room, limit: float) -> float:
    """Bytes of the fullest stage of a partition in which each takes as many blocks as it may within a limit; without
    end where blocks are left over."""
    i, fullest = 0, 0.0
    for stage in range(stages):
        end, bytes_ = 0, 0.0
        for j in range(i + 1, blocks - (stages - stage) + 2):
            if _from_here(room, stage, i, j) > limit + _BYTE:
                break
            need = _need(room, stage, i, j)
            if need <= limit:
                end, bytes_ = j, need
        if end == 0:
            return np.inf
        i, fullest = end, max(fullest, bytes_)
    return fullest if i == blocks else np.inf


@njit(cache=True)
def _least(blocks: int, stages: int, room: Room) -> float:
    # Some partition is found by halving; then what is fuller than that need not be looked at.
    low, known = 0.0, np.inf
    high = room.always + 2.0 * (room.fixed.max() + room.held.max() * room.each.max() + room.step.max())
    for _ in range(30):
        found = _filled(blocks, stages, room, high if known == np.inf else 0.5 * (low + known))
        if known == np.inf and found == np.inf:
            break
        if found < known:
            known = found
        else:
            low = 0.5 * (low + known)
        if known - low <= 1e-6 * known:
            break
    # worst[i]: bytes of the fullest stage of the best partition of blocks i … into the stages that are left.
    worst = np.full(blocks + 1, np.inf)
    worst[blocks] = 0.0
    for s in range(1, stages + 1):
        stage, now = stages - s, np.full(blocks + 1, np.inf)
        for i in range(stage, blocks - s + 1):
            best = np.inf
            for j in range(i + 1, blocks - s + 2):
                if _from_here(room, stage, i, j) > min(best, known) + _BYTE:
                    break
                if worst[j] < best and worst[j] <= known:
                    best = min(best, max(_need(room, stage, i, j), worst[j]))
            now[i] = best
        worst = now
    return float(worst[0])


@njit(cache=True)
def _may(allowed: Bools, room: Room, stage: int, i: int, j: int) -> bool:
    """Whether a stage may hold the blocks i ≤ b < j. A mask of one entry, and a room of none, allow everything."""
    if room.fixed.shape[0] > 1:
        return _need(room, stage, i, j) <= room.limit
    return allowed.shape[1] == 1 or bool(allowed[stage, i, j])


@njit(cache=True)
def _greedy(until: Floats, stages: int, allowed: Bools, room: Room, limit: float) -> float:
    """The slowest stage of a partition in which each takes as many blocks as it may within a limit of seconds; without
    end where blocks are left over. (Others may be possible: more blocks may be allowed where fewer are not.)"""
    blocks, i, slowest = len(until) - 1, 0, 0.0
    by_bytes = room.fixed.shape[0] > 1
    for stage in range(stages):
        end, most = 0, blocks - (stages - stage) + 1
        for j in range(i + 1, most + 1):
            if until[j] - until[i] > limit or (by_bytes and _from_here(room, stage, i, j) > room.limit + _BYTE):
                break
            if _may(allowed, room, stage, i, j):
                end = j
        if end == 0:
            return np.inf
        slowest = max(slowest, until[end] - until[i])
        i = end
    return slowest if i == blocks else np.inf


@njit(cache=True)
def _known(until: Floats, stages: int, allowed: Bools, room: Room) -> float:
    """The slowest stage of some good partition, by halving; without end where none was found so."""
    low, best = until[-1] / stages, _greedy(until, stages, allowed, room, until[-1])
    for _ in range(20):
        if best <= low * (1.0 + 1e-6) or best == np.inf:
            break
        middle = 0.5 * (low + best)
        found = _greedy(until, stages, allowed, room, middle)
        if found <= middle:
            best = min(best, found)
        else:
            low = middle
    return best


@njit(cache=True)
def _within(until: Floats, stages: int, limit: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last block with which every stage can begin if none takes longer than that: those before it
    hold all that is ahead, and those from it on all that is left."""
    blocks = len(until) - 1
    first, last = np.zeros(stages, np.int64), np.full(stages, blocks)
    if limit == np.inf:
        return first, last
    roomy = limit * (1.0 + 1e-9)  # sums may be off by rounding
    start = 0
    for stage in range(1, stages):
        while start < blocks and until[blocks] - until[start] > (stages - stage) * roomy:
            start += 1
        first[stage] = start
    end = 0
    for stage in range(stages):
        while end < blocks and until[end + 1] <= stage * roomy:
            end += 1
        last[stage] = end
    return first, last


@njit(cache=True)
def _cuts(
    until: Floats, stages: int, traffic: Floats, allowed: Bools, room: Room, slack: float
) -> tuple[bool, NDArray[np.int64]]:  # fmt: skip
    """Whether there is any, and the best."""
    blocks = len(until) - 1
    by_bytes = room.fixed.shape[0] > 1
    # No partition that is slower than one which is known is of interest, nor are runs that none of the others begin
    # with: of hundreds of blocks in as many stages, few are left.
    known = _known(until, stages, allowed, room)
    first, last = _within(until, stages, known * (1.0 + slack))
    # worst[s, i]: slowest stage of the best partition of blocks i … into s stages.
    worst = np.full((stages + 1, blocks + 1), np.inf)
    worst[0, blocks] = 0.0
    for s in range(1, stages + 1):
        stage = stages - s
        for i in range(max(stage, first[stage]), min(blocks - s, last[stage]) + 1):
            best = np.inf
            for j in range(i + 1, blocks - s + 2):
                own = until[j] - until[i]
                if own >= best or own > known:
                    break  # longer runs are only slower
                if by_bytes and _from_here(room, stage, i, j) > room.limit + _BYTE:
                    break  # … and larger
                if max(own, worst[s - 1, j]) < best and _may(allowed, room, stage, i, j):
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
        for i in range(max(stage, first[stage]), min(blocks - s, last[stage]) + 1):
            for j in range(i + 1, blocks - s + 2):
                own = until[j] - until[i]
                if own > limit or (by_bytes and _from_here(room, stage, i, j) > room.limit + _BYTE):
                    break
                if least[s - 1, j] == np.inf or not _may(allowed, room, stage, i, j):
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
