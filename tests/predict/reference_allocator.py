"""torch's caching allocator, written as its rules read: one object a block. What is compiled is held against it; it was
held against torch itself on a GPU."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from trainplan.predict.allocator import (
    LARGE_SEGMENT,
    LEAST,
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL,
    SMALL_SEGMENT,
)


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


class Reference:
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
