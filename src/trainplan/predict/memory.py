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
from trainplan.program.program import Bools, Ints, Program

_NAMES = tuple(kind.name.lower() for kind in Value)
# What an operation does in turn: it gives up early values, takes memory, gives back, and leaves late values.
_GIVES_UP, _TAKES, _GIVES_BACK, _LEAVES = range(4)
_HOST = int(Value.HOST)


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


def changes(played: Played, host: bool = False, only: int = -1) -> Changes:
    """All that is made and freed on some rank: on its device, or in the memory of its `host`. `only`: of this rank, and
    nothing of the others."""
    program, lists = played.program, played.program.lists
    value, op, phase, bounds = _in_order_of_lists(
        lists.start, lists.items, lists.owner, program.value_rank, program.value_bytes, program.value_maker,
        program.value_end, program.value_late, program.value_early, program.value_kind, host, only,
    )  # fmt: skip
    return Changes(*_in_order_of_time(value, op, phase, bounds, played.start, played.end), bounds)


@njit(cache=True)
def _in_order_of_time(
    value: Ints, op: Ints, phase: Ints, bounds: Ints, start: Floats, end: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    """The same changes, each rank's in the order of time: which value, by which operation, whether it comes or goes,
    and when. At equal times in the order of the lists: an operation that ended makes room for the next, and one without
    duration takes before it gives back."""
    values, ops, signs = np.empty(len(op), np.int64), np.empty(len(op), np.int64), np.empty(len(op), np.int64)
    seconds, time = np.empty(len(op)), np.empty(len(op))
    for k in range(len(op)):
        time[k] = start[op[k]] if phase[k] <= _TAKES else end[op[k]]
    for rank in range(len(bounds) - 1):
        first = bounds[rank]
        order = np.argsort(time[first : bounds[rank + 1]], kind="mergesort")
        for k in range(len(order)):
            source = first + order[k]
            values[first + k], ops[first + k], seconds[first + k] = value[source], op[source], time[source]
            signs[first + k] = 1 if phase[source] % 2 == _TAKES else -1
    return values, ops, signs, seconds


@njit(cache=True)
def _in_order_of_lists(
    list_start: Ints, list_items: Ints, list_owner: Ints, rank: Ints, size: Ints, maker: Ints, end: Ints, late: Bools,
    early: Bools, kind: NDArray[np.uint8], host: bool, only: int,
) -> tuple[Ints, Ints, Ints, Ints]:  # fmt: skip
    """The changes of values (of those in the memory of the `host`, or of the others): which value, by which operation,
    in which of its phases; rank after rank (or of one `only`), each in the order of its list, and where each rank's
    begin. A counting sort."""
    ops = int(list_items.max()) + 1 if len(list_items) else 0
    # The entries of every operation: one, or of a collective one for each member, in the order of ranks.
    entry_start = np.zeros(ops + 2, np.int64)
    for e in range(len(list_items)):
        entry_start[list_items[e] + 2] += 1
    entry_start = np.cumsum(entry_start)
    entries = np.empty(len(list_items), np.int64)
    for e in range(len(list_items)):
        entries[entry_start[list_items[e] + 1]] = e
        entry_start[list_items[e] + 1] += 1
    begin = np.zeros(4 * len(list_items) + 2, np.int64)  # of what a list's entry does in a phase: where it stands
    for fill in range(2):
        if fill == 1:
            begin = np.cumsum(begin)
            count = begin[-1]
            value, op, phase = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
        for v in range(len(rank)):
            if rank[v] < 0 or size[v] <= 0 or (kind[v] == _HOST) != host or (only >= 0 and rank[v] != only):
                continue
            for goes in range(2):
                by = end[v] if goes else maker[v]
                if by < 0:
                    continue
                if goes:
                    when = _GIVES_UP if early[v] else _GIVES_BACK
                else:
                    when = _LEAVES if late[v] else _TAKES
                low, high = entry_start[by], entry_start[by + 1]
                while high - low > 1:
                    middle = (low + high) // 2
                    if list_owner[entries[middle]] <= rank[v]:
                        low = middle
                    else:
                        high = middle
                spot = 4 * entries[low] + when
                if fill == 0:
                    begin[spot + 2] += 1
                else:
                    place = begin[spot + 1]
                    begin[spot + 1] += 1
                    value[place], op[place], phase[place] = v, by, when
    return value, op, phase, begin[4 * list_start]


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
    _add_initial(base, program.value_maker, program.value_rank, program.value_kind, program.value_bytes, host)
    return base


@njit(cache=True)
def _add_initial(base: Ints, maker: Ints, rank: Ints, kind: NDArray[np.uint8], size: Ints, host: bool) -> None:
    for v in range(len(maker)):
        if maker[v] < 0 and rank[v] >= 0 and (kind[v] == _HOST) == host:
            base[rank[v], kind[v]] += size[v]


def peaks(played: Played) -> list[Peak]:
    """The peak of every rank, with the operation at which it is reached."""
    program, lists = played.program, played.program.lists
    highest, parts = _highest(
        lists.start, lists.items, program.value_rank, program.value_bytes, program.value_maker, program.value_end,
        program.value_late, program.value_early, program.value_kind, played.start, played.end, len(Value),
    )  # fmt: skip
    found = []
    for rank, (op, own) in enumerate(zip(highest.tolist(), parts.tolist(), strict=True)):
        breakdown = {name: size for name, size in zip(_NAMES, own, strict=True) if size}
        found.append(Peak(rank, sum(own), program.name(op) if op >= 0 else "", breakdown))
    return found


@njit(cache=True)
def _highest(
    list_start: Ints, list_items: Ints, rank: Ints, size: Ints, maker: Ints, end: Ints, late: Bools, early: Bools,
    kind: NDArray[np.uint8], started: Floats, ended: Floats, kinds: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    """Of every rank the operation after a change of which most bytes are there (-1: none, most are there at the start),
    and how many of each kind these are.

    All that an operation does in one phase comes or goes at one moment, and in one direction: so a phase of a list's
    entry is one change, however many values it is of, and these are what is put in the order of time. (`changes` has
    them one by one.)
    """
    world, ops = len(list_start) - 1, len(started)
    # The entries of every operation: one, or of a collective one for each member, in the order of ranks.
    entry_start = np.zeros(ops + 2, np.int64)
    for e in range(len(list_items)):
        entry_start[list_items[e] + 2] += 1
    for op in range(ops):
        entry_start[op + 2] += entry_start[op + 1]
    entries = np.empty(len(list_items), np.int64)
    for e in range(len(list_items)):
        entries[entry_start[list_items[e] + 1]] = e
        entry_start[list_items[e] + 1] += 1
    change = np.zeros(4 * len(list_items), np.int64)  # of what an entry does in a phase: bytes
    comes, goes = np.full(len(rank), -1, np.int64), np.full(len(rank), -1, np.int64)  # value → where that is
    for v in range(len(rank)):
        if rank[v] < 0 or size[v] <= 0 or kind[v] == _HOST:
            continue
        if maker[v] >= 0:
            e = _entry(maker[v], list_start[rank[v] + 1], entry_start, entries)
            comes[v] = 4 * e + (_LEAVES if late[v] else _TAKES)
            change[comes[v]] += size[v]
        if end[v] >= 0:
            e = _entry(end[v], list_start[rank[v] + 1], entry_start, entries)
            goes[v] = 4 * e + (_GIVES_UP if early[v] else _GIVES_BACK)
            change[goes[v]] -= size[v]
    highest, parts = np.full(world, -1, np.int64), np.zeros((world, kinds), np.int64)
    turn = np.full(4 * len(list_items), -1, np.int64)  # which change of its rank it is, in the order of time
    most_at = np.full(world, -1, np.int64)
    spot, time = np.empty(4 * len(list_items), np.int64), np.empty(4 * len(list_items))
    for r in range(world):
        count, sorted_ = 0, True
        for e in range(list_start[r], list_start[r + 1]):
            op = list_items[e]
            for phase in range(4):
                if change[4 * e + phase] != 0:
                    spot[count], time[count] = 4 * e + phase, started[op] if phase <= _TAKES else ended[op]
                    sorted_ = sorted_ and (count == 0 or time[count - 1] <= time[count])
                    count += 1
        order = np.arange(count) if sorted_ else np.argsort(time[:count], kind="mergesort")
        level = most = np.int64(0)  # beyond what is there at the start
        for k in range(count):
            at = spot[order[k]]
            turn[at] = k
            level += change[at]
            if level > most:
                most, most_at[r], highest[r] = level, k, list_items[at // 4]
    for v in range(len(rank)):
        r = rank[v]
        if r < 0 or kind[v] == _HOST:
            continue
        there = maker[v] < 0 or (comes[v] >= 0 and turn[comes[v]] <= most_at[r])
        if there and (goes[v] < 0 or turn[goes[v]] > most_at[r]):
            parts[r, kind[v]] += size[v]
    return highest, parts


@njit(cache=True, inline="always")
def _entry(op: int, until: int, entry_start: Ints, entries: Ints) -> int:
    """The entry of an operation in the list that ends before `until`."""
    low, high = entry_start[op], entry_start[op + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if entries[middle] < until:
            low = middle
        else:
            high = middle
    return int(entries[low])


def host_peaks(played: Played) -> list[int]:
    """The most bytes that each rank has in the memory of its host."""
    if not (played.program.value_kind == _HOST).any():
        return [0] * played.program.world
    return [int(max(track.level, default=0)) for track in tracks(played, host=True)]


def in_flight(played: Played, rank: int) -> int:
    """The most forward passes of a rank whose backward has not ended, at any time: activations held at once."""
    program = played.program
    row = program.lists.row(rank)
    kind, place = program.kind[row], np.arange(len(row))
    forward, back = place[kind == Kind.F], place[(kind == Kind.B) | (kind == Kind.W)]
    columns = (program.job, program.step, program.pipeline, program.stage, program.micro_batch, program.slice)
    keys = np.stack([column[row].astype(np.int64) for column in columns])
    number = np.zeros(len(row), np.int64)  # of a micro-batch in a stage: one for all that is done with it
    for key in keys:
        number = np.unique(number * (int(key.max(initial=0)) + 2) + key + 1, return_inverse=True)[1]
    begins = forward[np.unique(number[forward], return_index=True)[1]]  # the first counts
    ends = back[::-1][np.unique(number[back[::-1]], return_index=True)[1]]  # the last does
    seconds = np.concatenate([played.start[row[begins]], played.end[row[ends]]])
    turn = np.concatenate([2 * begins, 2 * ends + 1])
    change = np.concatenate([np.ones(len(begins), np.int64), np.full(len(ends), -1)])
    return int(np.cumsum(change[np.lexsort((turn, seconds))]).max(initial=0))
