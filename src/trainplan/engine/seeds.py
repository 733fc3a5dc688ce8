"""Random numbers that every layout draws alike.

A block that draws random numbers (dropout) is seeded by what it computes, not by which process computes it: (seed,
step, replica, micro-batch, block). That is the only definition that one process, replicas and pipelines can all meet.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*numbers: int) -> int:
    """A seed made of several numbers; a different one for every tuple.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


def reseed(*numbers: int) -> None:
    """What `torch.manual_seed` does with the seed of these numbers, on the devices that are in use.

    For each that has not been touched yet, torch's keeps what to do once it is, with the stack of whoever asked: that
    takes longer than most blocks of a small model, and memory every time.

    >>> reseed(0, 1, 2); first = torch.rand(2)
    >>> _ = torch.manual_seed(seed_of(0, 1, 2)); bool((torch.rand(2) == first).all())
    True
    """
    seed = seed_of(*numbers)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
