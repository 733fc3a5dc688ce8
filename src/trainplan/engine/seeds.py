"""Random numbers that every layout draws alike.

A block that draws random numbers (dropout) is seeded by what it computes, not by which process computes it: (seed,
step, replica, micro-batch, block). That is the only definition that one process, replicas and pipelines can all meet.
"""

from __future__ import annotations

import hashlib


def seed_of(*numbers: int) -> int:
    """A seed made of several numbers; a different one for every tuple.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
