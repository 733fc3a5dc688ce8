"""Values as the passes of lowering find them, whole arrays at a time, joined once at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class Ledger:
    """Values in pieces. All arrays of one `add` have the shape of `maker`, or are stretched to it."""

    count: int = 0
    counts: list[int] = field(default_factory=list)  # of each piece
    kinds: list[int] = field(default_factory=list)  # of each piece, as are `lates` and `earlies`
    sizes: list[Ints] = field(default_factory=list)
    ranks: list[Ints] = field(default_factory=list)
    makers: list[Ints] = field(default_factory=list)
    ends: list[Ints] = field(default_factory=list)
    lates: list[bool] = field(default_factory=list)
    earlies: list[bool] = field(default_factory=list)
    readers: list[Ints] = field(default_factory=list)
    read: list[Ints] = field(default_factory=list)

    def add(
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...] = (),
        late: bool = False, early: bool = False,
    ) -> Ints:  # fmt: skip
        """One value for each entry of `maker`, and its number. Of `late` and `early` see `Program.value_late`."""
        numbers = np.arange(self.count, self.count + maker.size).reshape(maker.shape)
        self.count += maker.size
        self.counts.append(maker.size)
        self.kinds.append(kind)
        self.sizes.append(_stretched(size, maker).ravel())
        self.ranks.append(_stretched(rank, maker).ravel())
        self.makers.append(maker.ravel())
        self.ends.append(end.ravel())
        self.lates.append(late)
        self.earlies.append(early)
        for reader in readers:
            self.reads(reader, numbers)
        return numbers

    def add_some(
        self, kind: Value, size: Ints, rank: Ints, maker: Ints, end: Ints, late: bool = False, early: bool = False
    ) -> None:
        """The same for values that are nothing but memory: where there are no bytes, or no maker, there is none."""
        size, rank, end = (_stretched(column, maker) for column in (size, rank, end))
        some = (maker >= 0) & (size > 0)
        self.add(kind, size[some], rank[some], maker[some], end[some], late=late, early=early)

    def reads(self, reader: Ints, numbers: Ints) -> None:
        """Operations that read values; -1: nobody does."""
        self.readers.append(reader.ravel())
        self.read.append(numbers.ravel())

    def close(self, ops: int) -> Values:
        start, items = _group(np.concatenate(self.readers), np.concatenate(self.read), ops)
        return Values(
            np.repeat(np.array(self.kinds, dtype=np.uint8), self.counts), np.concatenate(self.sizes),
            np.concatenate(self.ranks), np.concatenate(self.makers), np.concatenate(self.ends),
            np.repeat(self.lates, self.counts), np.repeat(self.earlies, self.counts), Ragged(start, items),
        )  # fmt: skip


def _stretched(column: Ints | int, like: Ints) -> Ints:
    """A column with the shape of another."""
    if isinstance(column, np.ndarray) and column.shape == like.shape:
        return column
    found = np.empty(like.shape, dtype=np.int64)
    found[...] = column
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
