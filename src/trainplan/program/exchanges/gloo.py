"""What gloo's own all-reduce sends, to the byte.

It is a ring in which each rank sends to the one before it. The bytes are cut into segments (of at most 1 MiB, and at
least two for each rank), and the segments into one chunk for each rank. First every chunk but one's own is sent on, to
be added up, then every chunk but the next one's, to be handed round.
"""

from __future__ import annotations

_SEGMENT = 2**20  # bytes at most


def sent(ranks: int, size: int, element: int) -> tuple[int, ...]:
    """Payload bytes that each rank sends for a sum of `size` bytes, of elements of so many bytes.

    >>> sent(3, 4000, 4), sent(4, 40, 4), sent(3, 28, 4)
    ((5336, 5328, 5336), (64, 48, 56, 72), (40, 28, 44))
    """
    if ranks == 1 or not size:
        return (0,) * ranks
    segments = _up(max(-(-size // _SEGMENT), 2 * ranks), ranks)
    segment = _up(-(-size // segments), element)
    cut = [min(size, segment * (segments // ranks) * rank) for rank in range(ranks + 1)]
    chunk = [cut[rank + 1] - cut[rank] for rank in range(ranks)]
    return tuple(2 * size - chunk[rank] - chunk[rank - 1] for rank in range(ranks))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
