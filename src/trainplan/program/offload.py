"""Which parcels go away: whichever are read last, as soon as what is there is more than there is room for.

`goes` is the policy, a pure function of what is alive, how much may be, and when what is there is read next. ZeRO-R
asks it while running. But a rank's list is fixed, and so are the bytes of what stands in it: what the policy would be
told at every operation is known beforehand, and so is what it answers. So it is asked when a plan is made
(`solve/offload.py`), the answer is in the plan, and a parcel starts on its way behind the pass that made it, not when
it is in the way.

That is done on the program of a plan in which everything goes away that can: `levels` are the bytes there, and keeping
a parcel adds its own while it would be away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints, Program


def goes(alive: int, budget: int, there: Sequence[tuple[int, int]]) -> list[int]:
    """Of parcels (bytes, when it is read next) those that go so that no more is alive than may be; all, if need be.

    >>> goes(100, 70, [(20, 9), (20, 7), (20, 8)]), goes(100, 100, [(20, 9)]), goes(100, 10, [(20, 9)])
    ([0, 2], [], [0])
    """
    chosen = []
    for number in sorted(range(len(there)), key=lambda number: -there[number][1]):
        if alive <= budget:
            break
        chosen.append(number)
        alive -= there[number][0]
    return chosen


@dataclass(frozen=True)
class Absence:
    """A parcel of a rank, and the places of its list at which it is away."""

    stage: int
    micro: int
    section: int
    bytes: int
    gone: int  # from this place on
    back: int  # until this one


def absences(program: Program, rank: int) -> list[Absence]:
    """The parcels of a rank that go away in the first step of a program."""
    own = program.lists.row(rank)
    place = {int(op): number for number, op in enumerate(own)}
    found = []
    for op in own[(program.kind[own] == Kind.OFFLOAD) & (program.step[own] == 0)].tolist():
        (parcel,) = [v for v in program.reads.row(op).tolist() if program.value_kind[v] == Value.SAVED]
        (host,) = [v for v in program.makes.row(op).tolist() if program.value_kind[v] == Value.HOST]
        found.append(
            Absence(
                int(program.stage[op]), int(program.micro_batch[op]), int(program.unit[op]),
                int(program.value_bytes[parcel]), place[int(program.value_end[parcel])],
                place[int(program.value_end[host])],
            )
        )  # fmt: skip
    return found


def levels(program: Program, rank: int) -> Ints:
    """The most bytes on a rank's device while each operation of its list runs, one after the other."""
    own = program.lists.row(rank)
    place = np.full(len(program), -1, dtype=np.int64)
    place[own] = np.arange(len(own))
    here = np.flatnonzero((program.value_rank == rank) & (program.value_kind != Value.HOST))
    size, late, early = program.value_bytes[here], program.value_late[here], program.value_early[here]
    maker, end = program.value_maker[here], program.value_end[here]
    made, freed = np.where(maker >= 0, place[maker], -1), np.where(end >= 0, place[end], len(own))
    # A value counts from the place where it is made (a late one from the next) to that where it is freed (not there).
    begin = np.where(maker >= 0, made + late, 0)
    until = np.where(end >= 0, freed + ~early, len(own))
    change = np.zeros(len(own) + 1, dtype=np.int64)
    there = until > begin
    np.add.at(change, begin[there], size[there])
    np.add.at(change, np.minimum(until, len(own))[there], -size[there])
    return np.asarray(np.cumsum(change)[:-1])


def decide(level: Ints, parcels: Sequence[Absence], budget: int) -> list[bool]:
    """Which parcels go, asked at every place of a list in turn. `level`: bytes there if all of them went."""
    away = [False] * len(parcels)
    alive = level.copy()
    for parcel in parcels:
        alive[parcel.gone : parcel.back] += parcel.bytes
    for place in np.flatnonzero(alive > budget).tolist():
        if alive[place] <= budget:
            continue
        kept = [n for n, p in enumerate(parcels) if p.gone <= place < p.back and not away[n]]
        for number in goes(int(alive[place]), budget, [(parcels[n].bytes, parcels[n].back) for n in kept]):
            parcel = parcels[kept[number]]
            away[kept[number]] = True
            alive[parcel.gone : parcel.back] -= parcel.bytes
    return away
