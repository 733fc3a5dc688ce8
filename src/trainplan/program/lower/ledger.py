"""Values as the passes of lowering find them, whole arrays at a time, joined once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.ops import Value
from trainplan.program.program import Bools, Ints, Ragged


@dataclass(frozen=True)
class Values:
    """The value columns of a program, and who reads them."""

    kind: NDArray[np.uint8]
    bytes: Ints
    rank: Ints
    maker: Ints
    end: Ints
    late: Bools
    early: Bools
    reads: Ragged


class Ledger:
    """Values in pieces. All columns of one `add` have the shape of `maker`, or are stretched to it."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []  # of each piece
        self.kinds: list[int] = []  # of each piece, as are `lates` and `earlies`
        self.lates: list[bool] = []
        self.earlies: list[bool] = []
        self.sizes: list[Ints] = []
        self.ranks: list[Ints] = []
        self.makers: list[Ints] = []
        self.ends: list[Ints] = []
        self.readers: list[Ints] = []  # operations, and the values that they read
        self.read: list[Ints] = []

    def add(
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...] = (),
        late: bool = False, early: bool = False,
    ) -> Ints:  # fmt: skip
        """One value for each entry of `maker`, and its number. Of `late` and `early` see `Program.value_late`."""
        shape = maker.shape
        numbers: Ints = np.arange(self.count, self.count + maker.size)
        self._note(kind, late, early, maker.size)
        self.sizes.append(_stretched(size, shape))
        self.ranks.append(_stretched(rank, shape))
        self.makers.append(maker.ravel())
        self.ends.append(_stretched(end, shape))
        for reader in readers:
            self.readers.append(reader.ravel())
            self.read.append(numbers)
        return numbers.reshape(shape)

    def add_some(
        self, kind: Value, size: Ints, rank: Ints, maker: Ints, end: Ints, late: bool = False, early: bool = False
    ) -> None:
        """The same for values that are nothing but memory: where there are no bytes, or no maker, there is none."""
        shape = maker.shape
        found = _some(_stretched(size, shape), _stretched(rank, shape), maker.ravel(), _stretched(end, shape))
        self._note(kind, late, early, found.shape[1])
        self._join(found)

    def add_found(
        self, pieces: Sequence[tuple[Value, bool]], counts: Ints, columns: Ints, readers: Ints, numbers: Ints
    ) -> None:
        """Values that a compiled pass has found, one piece after the other: of each its kind, and whether they are
        late; how many they are; bytes, rank, maker and end of all; and who reads which, counted from the first."""
        self.kinds += [int(kind) for kind, _ in pieces]
        self.lates += [late for _, late in pieces]
        self.earlies += [False] * len(pieces)
        self.counts += counts.tolist()
        self._join(columns)
        self.readers.append(readers)
        self.read.append(numbers + self.count)
        self.count += columns.shape[1]

    def _note(self, kind: Value, late: bool, early: bool, count: int) -> None:
        self.kinds.append(int(kind))  # of a member of an enumeration numpy asks for five attributes in vain
        self.lates.append(late)
        self.earlies.append(early)
        self.counts.append(count)
        self.count += count

    def _join(self, columns: Ints) -> None:
        size, rank, maker, end = columns
        self.sizes.append(size)
        self.ranks.append(rank)
        self.makers.append(maker)
        self.ends.append(end)

    def reads(self, reader: Ints, numbers: Ints) -> None:
        """Operations that read values; -1: nobody does."""
        self.readers.append(reader.ravel())
        self.read.append(numbers.ravel())

    def close(self, ops: int) -> Values:
        start, items = _group(np.concatenate(self.readers), np.concatenate(self.read), ops)
        size, rank, maker, end = map(np.concatenate, (self.sizes, self.ranks, self.makers, self.ends))
        kind = np.repeat(np.array(self.kinds, dtype=np.uint8), self.counts)
        late, early = np.repeat(self.lates, self.counts), np.repeat(self.earlies, self.counts)
        return Values(kind, size, rank, maker, end, late, early, Ragged(start, items))


def _stretched(column: Ints | int, shape: tuple[int, ...]) -> Ints:
    """A column of that shape, in one row."""
    if not isinstance(column, np.ndarray) or column.shape != shape:
        stretched = np.empty(shape, dtype=np.int64)
        stretched[...] = column
        column = stretched
    return column.ravel()


@njit(cache=True)
def _some(size: Ints, rank: Ints, maker: Ints, end: Ints) -> Ints:
    """Bytes, rank, maker and end of values that are there and are more than nothing."""
    count = 0
    for k in range(len(size)):
        count += maker[k] >= 0 and size[k] > 0
    found = np.empty((4, count), np.int64)
    at = 0
    for k in range(len(size)):
        if maker[k] >= 0 and size[k] > 0:
            found[0, at], found[1, at], found[2, at], found[3, at] = size[k], rank[k], maker[k], end[k]
            at += 1
    return found


@njit(cache=True)
def _group(owner: Ints, item: Ints, owners: int) -> tuple[Ints, Ints]:
    """Items by owner, as a ragged array: a counting sort."""
    start = np.zeros(owners + 2, np.int64)
    for k in range(len(owner)):
        if owner[k] >= 0:
            start[owner[k] + 2] += 1
    for o in range(owners):
        start[o + 2] += start[o + 1]
    items = np.empty(start[owners + 1], np.int64)
    for k in range(len(owner)):
        if owner[k] >= 0:
            items[start[owner[k] + 1]] = item[k]
            start[owner[k] + 1] += 1
    return start[: owners + 1], items
