"""Values as the passes of lowering find them, whole arrays at a time, joined once at the end."""

from __future__ import annotations

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
        self._pieces: list[tuple[int, int, bool, bool]] = []  # of each: how many, of what kind, late, early
        self._columns: list[tuple[Ints, Ints, Ints, Ints]] = []  # of each piece: bytes, ranks, makers, ends
        self._reads: list[tuple[Ints, Ints]] = []  # operations, and the values that they read

    def add(
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...] = (),
        late: bool = False, early: bool = False,
    ) -> Ints:  # fmt: skip
        """One value for each entry of `maker`, and its number. Of `late` and `early` see `Program.value_late`."""
        shape = maker.shape
        numbers: Ints = np.arange(self.count, self.count + maker.size)
        self._columns.append((_stretched(size, shape), _stretched(rank, shape), maker.ravel(), _stretched(end, shape)))
        self._note(kind, late, early, maker.size)
        self._reads += [(reader.ravel(), numbers) for reader in readers]
        return numbers.reshape(shape)

    def add_some(
        self, kind: Value, size: Ints, rank: Ints, maker: Ints, end: Ints, late: bool = False, early: bool = False
    ) -> None:
        """The same for values that are nothing but memory: where there are no bytes, or no maker, there is none."""
        shape = maker.shape
        found = _some(_stretched(size, shape), _stretched(rank, shape), maker.ravel(), _stretched(end, shape))
        self._columns.append(found)
        self._note(kind, late, early, len(found[0]))

    def _note(self, kind: Value, late: bool, early: bool, count: int) -> None:
        # As a number: of a member of an enumeration numpy asks for five attributes in vain.
        self._pieces.append((count, int(kind), late, early))
        self.count += count

    def reads(self, reader: Ints, numbers: Ints) -> None:
        """Operations that read values; -1: nobody does."""
        self._reads.append((reader.ravel(), numbers.ravel()))

    def close(self, ops: int) -> Values:
        """All of them."""
        readers, read = map(np.concatenate, zip(*self._reads, strict=True))
        size, rank, maker, end = map(np.concatenate, zip(*self._columns, strict=True))
        counts, kinds, lates, earlies = zip(*self._pieces, strict=True)
        kind = np.repeat(np.array(kinds, dtype=np.uint8), counts)
        late, early = np.repeat(lates, counts), np.repeat(earlies, counts)
        return Values(kind, size, rank, maker, end, late, early, Ragged(*_group(readers, read, ops)))


def _stretched(column: Ints | int, shape: tuple[int, ...]) -> Ints:
    """A column of that shape, in one row."""
    if not isinstance(column, np.ndarray) or column.shape != shape:
        stretched = np.empty(shape, dtype=np.int64)
        stretched[...] = column
        column = stretched
    return column.ravel()


@njit(cache=True)
def _some(size: Ints, rank: Ints, maker: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
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
    return found[0], found[1], found[2], found[3]


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
