"""torch's caching allocator for CUDA, without memory: what is allocated, and what is reserved for it.

torch does not give memory back to the device. It asks for **segments**, cuts blocks out of them, and puts blocks that
are freed together again; a segment is given back only when the device has no more. So more is reserved than allocated:
sizes are rounded, and holes may be too small for what comes next. The rules (`c10/cuda/CUDACachingAllocator.cpp`,
2.11 to 2.13, without expandable segments):

* a size is rounded up to 512 bytes; up to 1 MiB it is small, and small blocks are never in one segment with others;
* a segment is 2 MiB for small blocks, 20 MiB for blocks below 10 MiB, and else the size rounded up to 2 MiB;
* of the free blocks that are large enough the smallest is taken, and cut if what is left is worth it: 512 bytes of a
  small one, more than 1 MiB of a large one.

>>> allocator = Allocator()
>>> first, second = allocator.allocate(3_000_000), allocator.allocate(100)
>>> allocator.allocated, allocator.reserved // 2**20
(3000832, 22)
>>> allocator.free(first)
>>> allocator.allocated, allocator.reserved // 2**20
(512, 22)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

LEAST = 512
SMALL = 2**20
SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
OWN_SEGMENT = 10 * 2**20  # from this size on a block has a segment of its own
SEGMENT_STEP = 2 * 2**20


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None  # its neighbours in the segment
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class Allocator:
    """The books of one device; `limit` is what it has for tensors (0: no limit)."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.over = False  # more was needed than there is
        self._free: dict[bool, list[tuple[tuple[int, int], Block]]] = {True: [], False: []}
        self._next = 0  # address of the next segment

    def allocate(self, size: int) -> Block:
        """Room for so many bytes."""
        wanted = max(LEAST, -(-size // LEAST) * LEAST)
        small = wanted <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (wanted, -1), key=lambda item: item[0])
        block = pool.pop(place)[1] if place < len(pool) else self._segment(wanted, small)
        block.free = False
        left = block.size - wanted
        if left >= LEAST if small else left > SMALL:
            rest = Block(block.address + wanted, left, small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, wanted
            self._put(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                block.address = min(block.address, other.address)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        block.free = True
        self._put(block)

    def _segment(self, wanted: int, small: bool) -> Block:
        size = SMALL_SEGMENT if small else LARGE_SEGMENT
        if wanted >= OWN_SEGMENT:
            size = -(-wanted // SEGMENT_STEP) * SEGMENT_STEP
        if self.limit and self.reserved + size > self.limit:
            self._give_back()
            self.over |= self.reserved + size > self.limit
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = Block(self._next, size, small)
        self._next += size
        return block

    def _give_back(self) -> None:
        """Segments that nobody uses."""
        for pool in self._free.values():
            for key, block in list(pool):
                if block.before is None and block.after is None:
                    pool.remove((key, block))
                    self.reserved -= block.size

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.key, block), key=lambda item: item[0])

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        place = bisect_left(pool, block.key, key=lambda item: item[0])
        del pool[place]
