"""Random samples kept in memory: data without a disk, for timing and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from trainplan.errors import InputError
from trainplan.units import MIB
from trainplan.workload.batch import take, tensors
from trainplan.workload.workload import Batch, Workload

POOL_BYTES, POOL_SAMPLES = 64 * MIB, 4096


class SyntheticDataset:
    """So many samples of the workload's shapes, of which a pool of different ones is made once and repeated.

    The pool is a function of the workload and the seed alone, so every process has the same.
    """

    decodes = False  # nothing to do in worker processes

    def __init__(self, workload: Workload, samples: int, seed: int = 0) -> None:
        if samples < 1:
            raise InputError(f"{samples} synthetic samples", "at least one is needed", "samples=1")
        one = workload.inputs(1, seed)
        size = max(1, sum(tensor.numel() * tensor.element_size() for tensor in tensors(one).values()))
        self.samples = samples
        self.pool = workload.inputs(max(1, min(samples, POOL_SAMPLES, POOL_BYTES // size)), seed)

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        return take(self.pool, [index % self.pool.samples for index in indices])
