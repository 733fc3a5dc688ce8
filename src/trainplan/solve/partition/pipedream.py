"""PipeDream's partition: stages of unequal width, level by level, for the least time a micro-batch in the steady state.

A stage may be held by several devices, which take micro-batches in turn. In a steady pipeline the slowest part decides,
and everything overlaps with everything else, so the value of a plan is a maximum (Narayanan et al., SOSP 2019):

    T(i..j, q)  = 1/q · max( Σ seconds,  2 (q−1)/q · Σ weights / rate )       q replicas; a ring all-reduce once in q
    S(i, q)     = min over j, q' of  max( T(i..j, q'),  2 · boundary / rate,  S(j, q − q') )

S(i, q) is the best for the blocks from i on, on exactly q devices; the answer is S(0, all). We go from the back,
because then memory is known where it is needed: of the q devices from this stage on, a replica keeps

    versions = ⌈q / q'⌉       of its weights, and as many micro-batches' saved values

which is the number of its warm-up forwards and one (weight stashing; PipeDream's own NOAM for the first stage).

**Levels.** Devices of a node talk faster than nodes. At the level of nodes, "the seconds of a segment" are the best
value of that segment on all devices of one node, the rate is that between nodes, and the recurrence is the same. So
level 0 is solved for every segment, level 1 uses its table, and so on: O(blocks³ · count²) a level below the top,
O(blocks² · count²) at the top. With a limit of memory, what a stage inside a node keeps depends on the devices in the
nodes after it: a table for every (nodes from here on, nodes of this stage), which is exact.

The published optimizer differs: see `pipedream_code.py`.

>>> from trainplan.solve.partition.instance import P1, P2, on
>>> found = pipedream(on(P1, devices=4, rate=1.0))
>>> found.cuts, found.replicas, found.value
((2, 5), (1, 2, 1), 6.0)
>>> pipedream(on(P2, levels=((2, 4.0), (2, 0.5)))).value                # two nodes of two devices
5.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numba import njit

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Floats, Instance, Ints, alike, does_not_fit


def pipedream(given: Instance, fewer: bool = False) -> Partition:
    """On all devices, or with `fewer` on as many as are best (of whole units of the highest level)."""
    speed = alike("pipedream", given)
    levels = _Levels(given, speed)
    value, used = levels.best(fewer)
    if not math.isfinite(value):
        raise does_not_fit("pipedream", given, lambda other: math.isfinite(_Levels(other, speed).best(fewer)[0]))
    stages = levels.stages(used)
    placement = tuple(devices for _, devices in stages)
    return Partition(tuple(first for first, _ in stages[1:]), tuple(map(len, placement)), value, placement=placement)


@dataclass(frozen=True)
class _Solved:
    """One level: the best for the blocks i ≤ b < j on q units, and the first stage of it."""

    value: Floats  # [j, i, q]; only j = blocks where that is all that is asked for
    end: Ints  # [j, i, q] where its first stage ends
    width: Ints  # [j, i, q] units that hold it
    which: Ints  # [q, q'] which table of the level below the first stage was taken from
    below: tuple[Fraction, ...]  # what distinguishes those tables


class _Levels:
    """The tables of all levels. A table is known by its level and by `after`: how many devices come after one unit.

    A stage that q' of the q units from here on hold is followed by (q − q') units and by what follows this level:
    shared by the q' replicas, ((q − q') · devices a unit + after) / q' for each.
    """

    def __init__(self, given: Instance, speed: float) -> None:
        self.given, self.speed = given, speed
        self.limit = min(given.memory)
        self.known: dict[tuple[int, Fraction], _Solved] = {}
        self.levels = [level for level in given.levels if level.count > 1] or [given.levels[0]]
        self.sizes = [math.prod(level.count for level in self.levels[:k]) for k in range(len(self.levels))]
        self.top = len(self.levels) - 1

    def best(self, fewer: bool) -> tuple[float, int]:
        """The value of the whole chain, and how many units of the highest level it uses."""
        blocks, most = self.given.blocks, self.levels[self.top].count
        table = self.solved(self.top, Fraction(0)).value
        return min((float(table[blocks, 0, q]), q) for q in range(1 if fewer else most, most + 1))

    def solved(self, level: int, after: Fraction) -> _Solved:
        key = level, after
        if key not in self.known:
            self.known[key] = self._solve(level, after)
        return self.known[key]

    def _solve(self, level: int, after: Fraction) -> _Solved:
        count, rate, size = self.levels[level].count, self.levels[level].rate, self.sizes[level]
        which = np.zeros((count + 1, count + 1), dtype=np.int64)
        below: dict[Fraction, int] = {}
        for q in range(1, count + 1):
            for share in range(1, q + 1):
                behind = ((q - share) * size + after) / share if math.isfinite(self.limit) else Fraction(0)
                if level == 0:
                    behind = Fraction(math.ceil(behind))  # versions are whole: a few tables instead of many
                which[q, share] = below.setdefault(behind, len(below))
        tables = np.stack([self._segments(level, behind) for behind in below])
        weights, crossing = self.given.arrays["weights"], 2 * self.given.crossing / rate
        value, end, width = _level(tables, which, weights / rate, crossing, count, level == self.top)
        return _Solved(value, end, width, which, tuple(below))

    def _segments(self, level: int, behind: Fraction) -> Floats:
        """[i, j]: seconds of the blocks i ≤ b < j on one unit of this level; infinite where they do not fit."""
        if level > 0:
            inner = self.solved(level - 1, behind)
            return np.ascontiguousarray(inner.value[:, :, self.levels[level - 1].count].T)
        sums = {name: values[None, :] - values[:, None] for name, values in self.given.arrays.items()}
        versions = 1 + int(behind)  # of one replica: its own device and those that come after
        need = versions * (sums["weights"] + sums["saved"]) + sums["states"]
        return np.where(need <= self.limit, sums["seconds"] / self.speed, np.inf)

    def stages(self, used: int) -> list[tuple[int, tuple[int, ...]]]:
        """(first block, devices) of every stage, levels flattened: replicas of a unit are cut alike."""
        return self._read(self.top, Fraction(0), 0, self.given.blocks, used)

    def _read(self, level: int, after: Fraction, first: int, end: int, units: int) -> list[tuple[int, tuple[int, ...]]]:
        if level < 0:
            return [(first, (0,))]
        table, size, found, start = self.solved(level, after), self.sizes[level], [], 0
        inner = self.levels[level - 1].count if level else 0
        while first < end:
            stop, width = int(table.end[end, first, units]), int(table.width[end, first, units])
            behind = table.below[table.which[units, width]]
            for block, devices in self._read(level - 1, behind, first, stop, inner):
                copies = ((start + unit) * size + device for unit in range(width) for device in devices)
                found.append((block, tuple(copies)))
            first, units, start = stop, units - width, start + width
        return found


@njit(cache=True)
def _level(
    segments: Floats, which: Ints, sync: Floats, crossing: Floats, count: int, whole: bool
) -> tuple[Floats, Ints, Ints]:
    """The recurrence, for every end of a segment (or for the whole chain only). `sync`: weights / rate, summed up."""
    blocks = len(sync) - 1
    value = np.full((blocks + 1, blocks + 1, count + 1), np.inf)
    end = np.zeros((blocks + 1, blocks + 1, count + 1), dtype=np.int64)
    width = np.zeros((blocks + 1, blocks + 1, count + 1), dtype=np.int64)
    for last in range(blocks if whole else 1, blocks + 1):
        best = value[last]
        for i in range(last - 1, -1, -1):
            for q in range(1, count + 1):
                for share in range(q, 0, -1):
                    # All q units on the rest is one stage; fewer leave some for the blocks behind.
                    ring = 2.0 * (share - 1) / share
                    table = segments[which[q, share]]
                    first, stop = (last, last + 1) if share == q else (i + 1, last)
                    for j in range(first, stop):
                        own = max(table[i, j], ring * (sync[j] - sync[i])) / share
                        if own >= best[i, q]:
                            if table[i, j] == np.inf or ring * (sync[j] - sync[i]) / share >= best[i, q]:
                                break  # more blocks are only slower
                            continue
                        rest = max(crossing[j], best[j, q - share]) if j < last else 0.0
                        total = max(own, rest)
                        if total < best[i, q]:
                            best[i, q] = total
                            end[last, i, q], width[last, i, q] = j, share
    return value, end, width
