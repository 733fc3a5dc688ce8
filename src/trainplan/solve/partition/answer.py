"""What a partitioner answers: where to cut, and what it was chosen by.

>>> found = Partition(cuts=(2, 5), replicas=(1, 2, 1), value=6.0)
>>> found.stages, found.bounds(6)
(3, ((0, 2), (2, 5), (5, 6)))
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

STEADY = "seconds a micro-batch"  # in the steady state: those of the slowest part
FLUSH = "seconds a flush"  # of all micro-batches between two updates, from first to last
WEIGHTS = "bytes a stage"


@dataclass(frozen=True)
class Partition:
    """A chain, cut. Only what the partitioner itself chooses is filled in."""

    cuts: tuple[int, ...]  # the first block of every stage but the first
    replicas: tuple[int, ...]  # devices that share each stage
    value: float  # what was minimised
    unit: str = STEADY  # of the value
    placement: tuple[tuple[int, ...], ...] = ()  # devices of each stage; empty: any, in order
    recompute: tuple[int, ...] = ()  # blocks to recompute
    order: str = ""  # order of work
    at_once: int = 0  # micro-batches that are in the pipeline at once
    samples: int = 0  # samples of a micro-batch
    faults: tuple[str, ...] = ()  # why this is no partition at all: what a published algorithm did wrong
    notes: tuple[str, ...] = ()  # anything a person should know

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(self.replicas)

    def bounds(self, blocks: int) -> tuple[tuple[int, int], ...]:
        """For every stage the blocks first ≤ b < last."""
        return tuple(itertools.pairwise((0, *self.cuts, blocks)))
