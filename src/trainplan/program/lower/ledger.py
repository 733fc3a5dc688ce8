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
        self.columns: list[tuple[Ints | int, Ints | int, Ints, Ints]] = []  # bytes, rank, maker, end
        self.readers: list[tuple[Ints, Ints]] = []  # operations, and the values that they read

    def add(
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...] = (),
        late: bool = False, early: bool = False,
    ) -> Ints:  # fmt: skip
        """One value for each entry of `maker`, and its number. Of `late` and `early` see `Program.value_late`."""
        count = maker.size
        numbers: Ints = np.arange(self.count, self.count + count)
        if maker.ndim > 1:
            numbers = numbers.reshape(maker.shape)
        self.count += count
        self.counts.append(count)
        self.kinds.append(int(kind))  # of a member of an enumeration numpy asks for five attributes in vain
        self.lates.append(late)
        self.earlies.append(early)
        self.columns.append((size, rank, maker, end))
        for reader in readers:
            self.readers.append((reader, numbers))
        return numbers

    def add_some(
        self, kind: Value, size: Ints, rank: Ints, maker: Ints, end: Ints, late: bool = False, early: bool = False
    ) -> None:
        """The same for values that are nothing but memory: where there are no bytes, or no maker, there is none."""
        size, rank, end = _stretched(size, maker), _stretched(rank, maker), _stretched(end, maker)
        some = (maker >= 0) & (size > 0)
        self.add(kind, size[some], rank[some], maker[some], end[some], late=late, early=early)

    def add_found(
        self, pieces: Sequence[tuple[Value, bool]], counts: Ints, columns: Ints, readers: Ints, numbers: Ints
    ) -> None:
        """Values that a compiled pass has found, one piece after the other: of each its kind, and whether they are
        late; how many they are; bytes, rank, maker and end of all; and who reads which, counted from the first."""
        self.kinds += [int(kind) for kind, _ in pieces]
        self.lates += [late for _, late in pieces]
        self.earlies += [False] * len(pieces)
        self.counts += counts.tolist()
        size, rank, maker, end = columns
        self.columns.append((size, rank, maker, end))
        self.readers.append((readers, numbers + self.count))
        self.count += maker.size

    def reads(self, reader: Ints, numbers: Ints) -> None:
        """Operations that read values; -1: nobody does."""
        self.readers.append((reader, numbers))

    def close(self, ops: int) -> Values:
        columns = np.empty((4, self.count), dtype=np.int64)
        begin = 0
        for own in self.columns:
            maker = own[2]
            end = begin + maker.size
            for column, part in zip(columns, own, strict=True):
                if maker.ndim == 1:
                    column[begin:end] = part
                else:
                    column[begin:end].reshape(maker.shape)[...] = part
            begin = end
        readers = np.concatenate([reader.ravel() for reader, _ in self.readers])
        start, items = _group(readers, np.concatenate([numbers.ravel() for _, numbers in self.readers]), ops)
        size, rank, maker, end_ = columns
        return Values(
            np.repeat(np.array(self.kinds, dtype=np.uint8), self.counts), size, rank, maker, end_,
            np.repeat(self.lates, self.counts), np.repeat(self.earlies, self.counts), Ragged(start, items),
        )  # fmt: skip


def _stretched(column: Ints, like: Ints) -> Ints:
    """A column with the shape of another."""
    if column.shape == like.shape:
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
