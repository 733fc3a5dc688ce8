"""Bytes over time: a running sum over the program that really runs.

A value counts on its rank from the start of the operation that makes it to the end of the operation that frees it (or,
of values that come and go while such an operation runs, from its end, and to its start: `Program.value_late`). What has
no maker is there from the start, what is never freed stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.predict.clock import Floats, Played
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints, Program

_NAMES = tuple(kind.name.lower() for kind in Value)


@dataclass(frozen=True)
class Track:
    """The memory of one rank in the order of time: one entry for each change."""

    rank: int
    start: NDArray[np.int64]  # bytes by kind of value before the first change
    op: Ints  # the operation that makes or frees something
    seconds: Floats
    kind: NDArray[np.uint8]  # of the value
    change: Ints  # bytes, negative where it is freed

    @property
    def level(self) -> Ints:
        """Bytes after each change."""
        return np.asarray(self.start.sum() + np.cumsum(self.change))


@dataclass(frozen=True)
class Peak:
    """The worst moment of a rank."""

    rank: int
    bytes: int
    op: str  # the operation that made something then; "" where nothing is ever allocated
    breakdown: dict[str, int]  # bytes by kind of value at that moment


@dataclass(frozen=True)
class Changes:
    """What comes and goes, in the order of time, rank after rank."""

    value: Ints
    op: Ints  # that makes or frees it
    sign: Ints  # 1: it comes, -1: it goes
    seconds: Floats
    bounds: Ints  # those of rank r are from bounds[r] to bounds[r + 1]


def changes(played: Played, host: bool = False) -> Changes:
    """All that is made and freed on some rank: on its device, or in the memory of its `host`."""
    program = played.program
    here = np.flatnonzero((program.value_rank >= 0) & (program.value_bytes > 0))
    here = here[(program.value_kind[here] == Value.HOST) == host]
    made, freed = program.value_maker[here], program.value_end[here]
    born, dies = here[made >= 0], here[freed >= 0]
    value = np.concatenate([born, dies])
    op = np.concatenate([made[made >= 0], freed[freed >= 0]])
    sign = np.repeat([1, -1], [len(born), len(dies)])
    # What an operation does: it gives up early values, takes memory, gives back, and leaves late ones.
    phase = np.concatenate([np.where(program.value_late[born], 3, 1), np.where(program.value_early[dies], 0, 2)])
    time = np.where(phase < 2, played.start[op], played.end[op])
    # At equal times in the order of the lists: an operation that ended makes room for the next, and one without
    # duration takes before it gives back.
    order = np.lexsort((4 * _places(program, op, program.value_rank[value]) + phase, time, program.value_rank[value]))
    value = value[order]
    bounds = np.searchsorted(program.value_rank[value], np.arange(program.world + 1))
    return Changes(value, op[order], sign[order], time[order], bounds)


def tracks(played: Played, host: bool = False) -> list[Track]:
    """The memory of every rank: of its device, or what it has in that of its `host`."""
    program, all_ = played.program, changes(played, host)
    change = all_.sign * program.value_bytes[all_.value]
    base = _at_start(program, host)
    found = []
    for rank in range(program.world):
        own = slice(all_.bounds[rank], all_.bounds[rank + 1])
        kind = program.value_kind[all_.value[own]]
        found.append(Track(rank, base[rank], all_.op[own], all_.seconds[own], kind, change[own]))
    return found


def _at_start(program: Program, host: bool) -> Ints:
    """Bytes of every rank by kind of value before the first change."""
    base = np.zeros((program.world, len(Value)), dtype=np.int64)
    first = program.initial
    first = first[(program.value_rank[first] >= 0) & ((program.value_kind[first] == Value.HOST) == host)]
    np.add.at(base, (program.value_rank[first], program.value_kind[first]), program.value_bytes[first])
    return base


def _places(program: Program, op: Ints, rank: Ints) -> Ints:
    """The place of each operation in the list of the rank beside it; lists stand one after the other."""
    lists = program.lists
    place = np.empty(len(program), dtype=np.int64)
    place[lists.items] = np.arange(len(lists.items))
    found = place[op]
    several = np.flatnonzero(program.group[op] >= 0)  # a collective has a place in every list
    if len(several):
        entries = np.flatnonzero(program.group[lists.items] >= 0)
        key = lists.items[entries] * program.world + lists.owner[entries]
        order = np.argsort(key)
        at = np.searchsorted(key[order], op[several] * program.world + rank[several])
        found[several] = entries[order[at]]
    return np.asarray(found)


def peaks(played: Played) -> list[Peak]:
    """The peak of every rank, with the operation at which it is reached."""
    program, all_ = played.program, changes(played)
    kinds = program.value_kind[all_.value]
    change = all_.sign * program.value_bytes[all_.value]
    highest, parts = _highest(all_.bounds, kinds, change, _at_start(program, host=False))
    found = []
    for rank, (at, own) in enumerate(zip(highest.tolist(), parts.tolist(), strict=True)):
        breakdown = {name: size for name, size in zip(_NAMES, own, strict=True) if size}
        found.append(Peak(rank, sum(own), program.name(all_.op[at]) if at >= 0 else "", breakdown))
    return found


@njit(cache=True)
def _highest(bounds: Ints, kind: NDArray[np.uint8], change: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Of every rank the change after which most bytes are there (-1: none, most are there at the start), and how many
    of each kind these are."""
    world = len(start)
    highest, parts = np.full(world, -1, np.int64), start.copy()
    for rank in range(world):
        level = most = np.int64(0)  # beyond what is there at the start
        for k in range(bounds[rank], bounds[rank + 1]):
            level += change[k]
            if level > most:
                most, highest[rank] = level, k
        for k in range(bounds[rank], highest[rank] + 1):
            parts[rank, kind[k]] += change[k]
    return highest, parts


def host_peaks(played: Played) -> list[int]:
    """The most bytes that each rank has in the memory of its host."""
    if not (played.program.value_kind == Value.HOST).any():
        return [0] * played.program.world
    return [int(max(track.level, default=0)) for track in tracks(played, host=True)]


def in_flight(played: Played, rank: int) -> int:
    """The most forward passes of a rank whose backward has not ended, at any time: activations held at once."""
    program = played.program
    begins: dict[tuple[int, ...], tuple[float, int, int]] = {}  # micro-batch → when its forward begins
    ends: dict[tuple[int, ...], tuple[float, int, int]] = {}  # … and when its backward is over
    columns = (program.job, program.step, program.pipeline, program.stage, program.micro_batch, program.slice)
    for place, op in enumerate(program.lists.row(rank).tolist()):
        key = tuple(int(column[op]) for column in columns)
        if program.kind[op] == Kind.F:
            begins.setdefault(key, (float(played.start[op]), 2 * place, 1))
        elif program.kind[op] in (Kind.B, Kind.W):
            ends[key] = (float(played.end[op]), 2 * place + 1, -1)
    changes = sorted([*begins.values(), *ends.values()])
    return int(np.cumsum([change for _, _, change in changes]).max(initial=0))
