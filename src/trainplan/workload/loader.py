"""Global batches in a fixed order, read in worker processes ahead of need.

Every rank makes a loader with the same seed and asks for its part of each global batch. The order of an epoch is a
permutation seeded by (seed, epoch); batch k of it holds samples k·B to (k+1)·B of that order, and the last one what is
left. So the position (epoch, step) says all that a resume needs to know, whatever the number of ranks:

>>> from trainplan.workload.load import load
>>> from trainplan.workload.datasets import open_data
>>> gpt = load("gpt:layers=1,hidden=8,heads=1,seq=4,vocab=11,batch=4")
>>> data = open_data("memory", gpt, samples=10)
>>> whole = loader(gpt, data, epochs=1)
>>> [batch.samples for batch in whole], whole.position
([4, 4, 2], Position(epoch=1, step=0))
>>> second_half = loader(gpt, data, start=(0, 2), part=lambda samples: (samples // 2, samples))
>>> next(second_half).samples, second_half.position
(1, Position(epoch=1, step=0))
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from trainplan.errors import InputError, TrainplanError
from trainplan.workload.batch import each_tensor
from trainplan.workload.workload import Batch, Workload

Part = Callable[[int], tuple[int, int]]  # samples of a global batch → the first of ours, and the one after our last


class Source(Protocol):
    """Where samples come from: `SyntheticDataset`, `ImageFolder`, `TokenFile`, or a user's own."""

    decodes: bool  # worth worker processes

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """These samples as a batch; what is random about them depends on (seed, epoch, index) alone."""


class Position(NamedTuple):
    """Where training is in the data: the next batch is number `step` of epoch `epoch`, both from 0."""

    epoch: int = 0
    step: int = 0


def random_for(*place: int) -> torch.Generator:
    """A generator seeded by a place such as (seed, epoch, index); neighbouring places have unrelated numbers."""
    digest = blake2b(repr(place).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def steps_per_epoch(samples: int, batch: int, drop_last: bool = False) -> int:
    """Batches of an epoch.

    >>> steps_per_epoch(10, 4), steps_per_epoch(10, 4, drop_last=True)
    (3, 2)
    """
    return samples // batch if drop_last else -(-samples // batch)


def loader(
    workload: Workload,
    data: Source,
    batch: int = 0,
    *,
    start: tuple[int, int] | int = (0, 0),
    seed: int = 0,
    part: Part | tuple[int, int] | None = None,
    epochs: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int | None = None,
    prefetch: int = 2,
    pin: bool = False,
) -> Loader:
    """An iterator over the batches of `data` from a position on.

    `batch` is the global batch (by default the workload's); `start` a position (epoch, step) or a number of steps from
    the beginning; `part` which samples of each global batch to read: a pair (lo, hi), cut off where a last batch is
    shorter, or a function of the batch's length, by default all. A part without samples is a `Batch` of 0 samples.
    `epochs` is the number of the epoch to stop before (0: never). `workers` processes read ahead (by default 0 where
    nothing is decoded, else up to 4), each `prefetch` batches; `pin` puts batches into page-locked memory.
    """
    size = batch or workload.batch
    steps = steps_per_epoch(len(data), size, drop_last) if size > 0 else 0
    if steps < 1:
        raise InputError(
            f"batches of {size} from {len(data)} samples",
            "not one batch is full" if size > 0 else "a batch needs at least one sample",
            f"a batch of {len(data)} or less",
        )
    first = Position(*(divmod(start, steps) if isinstance(start, int) else start))
    if first.epoch < 0 or not 0 <= first.step <= steps:
        asked = f"starting at step {first.step} of epoch {first.epoch}"
        near = Position(max(first.epoch, 0), min(max(first.step, 0), steps))
        raise InputError(asked, f"an epoch has {steps} steps", f"step {near.step} of epoch {near.epoch}")
    if first.step == steps:
        first = Position(first.epoch + 1, 0)
    order = Order(len(data), size, steps, first, seed, part, epochs, shuffle)
    if workers is None:
        workers = min(4, os.cpu_count() or 1) if data.decodes else 0
    return Loader(order, data, workers, prefetch, pin)


@dataclass(frozen=True)
class Order:
    """Which samples each batch holds: a pure function of the position."""

    length: int
    batch: int
    steps: int
    first: Position
    seed: int
    part: Part | tuple[int, int] | None
    epochs: int
    shuffle: bool

    def samples(self, position: Position) -> int:
        """Samples of the global batch at a position."""
        return min(self.batch, self.length - position.step * self.batch)

    def after(self, position: Position) -> Position:
        epoch, step = position
        return Position(epoch, step + 1) if step + 1 < self.steps else Position(epoch + 1, 0)

    def ours(self, position: Position) -> tuple[int, int]:
        """The part of the global batch at a position that is to be read."""
        samples = self.samples(position)
        if self.part is None:
            return 0, samples
        lo, hi = self.part(samples) if callable(self.part) else (min(side, samples) for side in self.part)
        if not 0 <= lo <= hi <= samples:
            raise InputError(f"samples {lo} to {hi} of a batch", f"it has {samples}", "0 ≤ lo ≤ hi ≤ samples")
        return lo, hi

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """For each batch the (epoch, index) of our samples."""
        position, shuffled_for, permutation = self.first, -1, torch.arange(self.length)
        while not self.epochs or position.epoch < self.epochs:
            epoch, step = position
            if self.shuffle and shuffled_for != epoch:
                shuffled_for = epoch
                permutation = torch.randperm(self.length, generator=random_for(self.seed, epoch))
            lo, hi = self.ours(position)
            begin = step * self.batch
            yield [(epoch, index) for index in permutation[begin + lo : begin + hi].tolist()]
            position = self.after(position)


class Loader:
    """Iterates over batches; `position` is that of the next one, however far the workers have read ahead.

    Its worker processes end at the end of a `with` statement, on `close()`, after an error, and with the process.
    """

    def __init__(self, order: Order, data: Source, workers: int, prefetch: int, pin: bool) -> None:
        self.order, self.position = order, order.first
        self._fetched: Iterator[_Fetched] = iter(
            DataLoader(
                _Fetch(data, order.seed),
                batch_sampler=order,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                collate_fn=_itself,
                worker_init_fn=_leave_interrupts_to_the_parent,
                pin_memory=pin and torch.cuda.is_available(),
            )
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        outcome: Batch | TrainplanError = next(self._fetched).outcome
        if isinstance(outcome, TrainplanError):
            self.close()
            try:
                raise outcome
            finally:
                # Else error, traceback, this frame and the error again are a cycle that keeps the loader alive.
                del outcome
        self.position = self.order.after(self.position)
        return outcome

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps

    def close(self) -> None:
        """End the worker processes."""
        self._fetched = iter(())  # torch's iterator ends its workers when nothing refers to it


@dataclass
class _Fetched:
    """A batch, or the error that came instead: `DataLoader` would bury our message in a traceback."""

    outcome: Batch | TrainplanError

    def pin_memory(self) -> _Fetched:
        if isinstance(self.outcome, Batch):
            self.outcome = each_tensor(self.outcome, torch.Tensor.pin_memory)
        return self


@dataclass
class _Fetch(Dataset[_Fetched]):
    """A `Source` as `DataLoader` wants it: asked for a list of keys, it gives a batch."""

    data: Source
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> _Fetched:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[tuple[int, int]]) -> _Fetched:
        if not keys:
            return _Fetched(Batch(0))
        try:
            return _Fetched(self.data.fetch([index for _, index in keys], keys[0][0], self.seed))
        except TrainplanError as error:
            return _Fetched(error)


def _itself(fetched: Any) -> Any:
    return fetched


def _leave_interrupts_to_the_parent(worker: int) -> None:
    # Ctrl-C reaches the whole process group; the parent ends its workers, which should not print tracebacks too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
