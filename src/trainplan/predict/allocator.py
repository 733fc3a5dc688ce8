"""torch's caching allocator for CUDA, without memory: what is allocated, and what is reserved for it.

torch does not give memory back to the device. It asks for **segments**, cuts blocks out of them, and puts blocks that
are freed together again; a segment is given back only when the device has no more. So more is reserved than allocated:
sizes are rounded, and holes may be too small for what comes next. The rules (`c10/cuda/CUDACachingAllocator.cpp`,
2.11 to 2.13, without expandable segments):

* a size is rounded up to 512 bytes; up to 1 MiB it is small, and small blocks are never in one segment with others;
* a segment is 2 MiB for small blocks, 20 MiB for blocks below 10 MiB, and else the size rounded up to 2 MiB;
* of the free blocks that are large enough the smallest is taken, and cut if what is left is worth it: 512 bytes of a
  small one, more than 1 MiB of a large one.

The books are arrays, and the rules are compiled: a step of a large model is half a million tensors, and a search plays
every plan that it shows.

>>> allocator = Allocator()
>>> first, second = allocator.allocate(3_000_000), allocator.allocate(100)
>>> allocator.allocated, allocator.reserved // 2**20
(3000832, 22)
>>> allocator.free(first)
>>> allocator.allocated, allocator.reserved // 2**20
(512, 22)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from trainplan.program.program import Ints

LEAST = 512
SMALL = 2**20
SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
OWN_SEGMENT = 10 * 2**20  # from this size on a block has a segment of its own
SEGMENT_STEP = 2 * 2**20
_NOBODY = -1
# Places among the totals.
ALLOCATED, RESERVED, PEAK_ALLOCATED, PEAK_RESERVED, LIMIT, OVER, _NEXT, _BLOCKS, _SPARE = range(9)


class Books(NamedTuple):
    """Blocks by number, and those that are free in the order of their sizes (and of addresses, where these are equal),
    small ones apart from large ones."""

    address: Ints
    size: Ints
    before: Ints  # neighbours in the segment
    after: Ints
    small: Ints  # 1: it is
    free: Ints
    pool: Ints  # small or not, place: the free blocks
    many: Ints  # how many
    spare: Ints  # numbers of blocks that have become part of another
    totals: Ints


@njit(cache=True)
def books(limit: int) -> Books:
    """Empty ones; `limit` is what a device has for tensors (0: no limit)."""
    totals = np.zeros(9, np.int64)
    totals[LIMIT] = limit
    return _of(64, totals)


@njit(cache=True)
def _of(most: int, totals: Ints) -> Books:
    """With room for so many blocks."""
    return Books(
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64),
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros((2, most), np.int64), np.zeros(2, np.int64),
        np.zeros(most, np.int64), totals,
    )  # fmt: skip


@njit(cache=True)
def roomy(of: Books, tensors: int) -> Books:
    """The same books, with room for so many more tensors: each has a block, and leaves at most one beside it."""
    had, need = len(of.size), of.totals[_BLOCKS] + 2 * tensors
    if need <= had:
        return of
    more = _of(max(2 * had, need), of.totals)
    more.address[:had], more.size[:had], more.before[:had], more.after[:had] = of.address, of.size, of.before, of.after
    more.small[:had], more.free[:had], more.spare[:had] = of.small, of.free, of.spare
    more.pool[:, :had], more.many[:] = of.pool, of.many
    return more


@njit(cache=True, inline="always")
def allocate(of: Books, size: int) -> int:
    """Room for so many bytes, in books that are `roomy`: the number of its block."""
    totals = of.totals
    wanted = max(LEAST, -(-size // LEAST) * LEAST)
    small = 1 if wanted <= SMALL else 0
    place = _place(of, small, wanted, -1)
    if place < of.many[small]:
        block = of.pool[small, place]
        _remove(of, small, place)
    else:
        block = _segment(of, wanted, small)
    of.free[block] = 0
    left = of.size[block] - wanted
    if (small == 1 and left >= LEAST) or (small == 0 and left > SMALL):
        after = of.after[block]
        rest = _block(of, of.address[block] + wanted, left, small)
        of.before[rest], of.after[rest] = block, after
        if after != _NOBODY:
            of.before[after] = rest
        of.after[block], of.size[block] = rest, wanted
        _put(of, rest)
    totals[ALLOCATED] += of.size[block]
    totals[PEAK_ALLOCATED] = max(totals[PEAK_ALLOCATED], totals[ALLOCATED])
    return block


@njit(cache=True, inline="always")
def release(of: Books, block: int) -> None:
    """Give a block back: it becomes one with its neighbours, where these are free."""
    of.totals[ALLOCATED] -= of.size[block]
    other = of.before[block]
    if other != _NOBODY and of.free[other] == 1:
        _take(of, other)
        of.address[block] = of.address[other]
        of.size[block] += of.size[other]
        of.before[block] = of.before[other]
        if of.before[block] != _NOBODY:
            of.after[of.before[block]] = block
        _forget(of, other)
    other = of.after[block]
    if other != _NOBODY and of.free[other] == 1:
        _take(of, other)
        of.size[block] += of.size[other]
        of.after[block] = of.after[other]
        if of.after[block] != _NOBODY:
            of.before[of.after[block]] = block
        _forget(of, other)
    _put(of, block)


@njit(cache=True, inline="always")
def _segment(of: Books, wanted: int, small: int) -> int:
    """A new segment: one block that is all of it."""
    totals = of.totals
    size = SMALL_SEGMENT if small == 1 else LARGE_SEGMENT
    if wanted >= OWN_SEGMENT:
        size = -(-wanted // SEGMENT_STEP) * SEGMENT_STEP
    if totals[LIMIT] > 0 and totals[RESERVED] + size > totals[LIMIT]:
        _give_back(of)
        if totals[RESERVED] + size > totals[LIMIT]:
            totals[OVER] = 1
    totals[RESERVED] += size
    totals[PEAK_RESERVED] = max(totals[PEAK_RESERVED], totals[RESERVED])
    block = _block(of, totals[_NEXT], size, small)
    of.before[block] = of.after[block] = _NOBODY
    totals[_NEXT] += size
    return block


@njit(cache=True)
def _give_back(of: Books) -> None:
    """Segments that nobody uses."""
    for small in range(2):
        kept = 0
        for place in range(of.many[small]):
            block = of.pool[small, place]
            if of.before[block] == _NOBODY and of.after[block] == _NOBODY:
                of.totals[RESERVED] -= of.size[block]
                _forget(of, block)
            else:
                of.pool[small, kept] = block
                kept += 1
        of.many[small] = kept


@njit(cache=True, inline="always")
def _block(of: Books, address: int, size: int, small: int) -> int:
    totals = of.totals
    if totals[_SPARE] > 0:
        totals[_SPARE] -= 1
        number = of.spare[totals[_SPARE]]
    else:
        number = totals[_BLOCKS]
        totals[_BLOCKS] += 1
    of.address[number], of.size[number], of.small[number] = address, size, small
    return number


@njit(cache=True, inline="always")
def _forget(of: Books, block: int) -> None:
    of.spare[of.totals[_SPARE]] = block
    of.totals[_SPARE] += 1


@njit(cache=True, inline="always")
def _place(of: Books, small: int, size: int, address: int) -> int:
    """Where a block of this size and address is among those that are free, or would be."""
    low, high = 0, of.many[small]
    while low < high:
        middle = (low + high) // 2
        block = of.pool[small, middle]
        if of.size[block] < size or (of.size[block] == size and of.address[block] < address):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, inline="always")
def _put(of: Books, block: int) -> None:
    small = of.small[block]
    place = _place(of, small, of.size[block], of.address[block])
    for k in range(of.many[small], place, -1):
        of.pool[small, k] = of.pool[small, k - 1]
    of.pool[small, place] = block
    of.many[small] += 1
    of.free[block] = 1


@njit(cache=True, inline="always")
def _take(of: Books, block: int) -> None:
    small = of.small[block]
    _remove(of, small, _place(of, small, of.size[block], of.address[block]))


@njit(cache=True, inline="always")
def _remove(of: Books, small: int, place: int) -> None:
    of.many[small] -= 1
    for k in range(place, of.many[small]):
        of.pool[small, k] = of.pool[small, k + 1]


class Allocator:
    """One device, tensor by tensor; `limit` is what it has for them (0: no limit)."""

    def __init__(self, limit: int = 0) -> None:
        self._books = books(limit)

    def allocate(self, size: int) -> int:
        """Room for so many bytes: the number of its block."""
        self._books = roomy(self._books, 1)
        return int(allocate(self._books, size))

    def free(self, block: int) -> None:
        """Give a block back."""
        release(self._books, block)

    @property
    def allocated(self) -> int:
        return int(self._books.totals[ALLOCATED])

    @property
    def reserved(self) -> int:
        return int(self._books.totals[RESERVED])

    @property
    def peak_allocated(self) -> int:
        return int(self._books.totals[PEAK_ALLOCATED])

    @property
    def peak_reserved(self) -> int:
        return int(self._books.totals[PEAK_RESERVED])

    @property
    def over(self) -> bool:
        """Whether more was needed than there is."""
        return bool(self._books.totals[OVER])

    @property
    def unused(self) -> list[int]:
        """Sizes of the free blocks."""
        own = self._books
        return [int(own.size[block]) for small in (0, 1) for block in own.pool[small, : own.many[small]]]
