"""Random numbers of the user's code: the same in every process, and the caller's own are left alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Within, torch (on the CPU), NumPy and Python draw the numbers of a seed; afterwards they go on where they were.

    >>> drawn = []
    >>> for _ in range(2):
    ...     with random_numbers(3):
    ...         drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    >>> drawn[0] == drawn[1]
    True
    """
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):  # what is made is made on the CPU: the devices' generators are left alone
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
