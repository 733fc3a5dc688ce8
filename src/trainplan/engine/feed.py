"""The batches of a run, from where training stands: for each step the part that this rank is to be given.

Made-up batches are seeded by the step. Batches of a data set follow each other in the loader's order; where the next
one begins is kept in `Trainer.place`, and so in checkpoints: a run that is resumed goes on there, under any plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trainplan.engine.job import Job
from trainplan.engine.trainer import Trainer
from trainplan.workload.batch import each_tensor
from trainplan.workload.batch import split as split_batch
from trainplan.workload.loader import Position, steps_per_epoch
from trainplan.workload.workload import Batch


def batches(trainer: Trainer, job: Job, steps: int) -> Iterator[tuple[Batch, int]]:
    """So many batches, each with the size of the whole of which it is a part."""
    return _from_data(trainer, job, steps) if job.data else _made_up(trainer, job, steps)


def data_seed(seed: int, step: int) -> int:
    """The seed of a step's made-up batch: the same under every plan."""
    return seed * 1_000_003 + step


def _made_up(trainer: Trainer, job: Job, steps: int) -> Iterator[tuple[Batch, int]]:
    pins = job.device != "cpu" and trainer.inputs.loads
    for step in range(trainer.steps_done, trainer.steps_done + steps):
        part = part_of(trainer, trainer.workload.inputs(job.batch, data_seed(trainer.seed, step)))
        yield each_tensor(part, Tensor.pin_memory) if pins else part, job.batch


def part_of(trainer: Trainer, whole: Batch) -> Batch:
    """What this rank is to be given of a batch; a server is given none."""
    return Batch(0) if trainer.is_server else _between(whole, *trainer.inputs.part(whole.samples))


def _between(whole: Batch, first: int, last: int) -> Batch:
    """The samples first ≤ s < last of a batch."""
    if first == last:
        return Batch(0)
    sizes = [size for size in (first, last - first, whole.samples - last) if size]
    return split_batch(whole, sizes)[int(first > 0)] if len(sizes) > 1 else whole


def _from_data(trainer: Trainer, job: Job, steps: int) -> Iterator[tuple[Batch, int]]:
    from trainplan.workload.datasets import open_data
    from trainplan.workload.loader import loader

    data = open_data(job.data, trainer.workload, samples=job.samples, seed=trainer.seed)
    # Whole batches only, so that every step of every epoch has the same size, whatever the plan.
    first = start(trainer.place, trainer.steps_done, job.data, len(data), job.batch)
    if trainer.rank == 0 and trainer.place and not _same(trainer.place, job.data, len(data)):
        print(f"data {job.data}, {len(data):,} samples, is not that of the checkpoint: from its beginning", flush=True)
    with loader(
        trainer.workload, data, job.batch, start=first, seed=trainer.seed, part=trainer.inputs.part, drop_last=True,
        pin=job.device != "cpu",
    ) as source:  # fmt: skip
        for _, batch in zip(range(steps), source, strict=False):
            epoch, step = source.position  # of the next one
            trainer.place = {"data": job.data, "samples": len(data), "epoch": epoch, "sample": step * job.batch}
            yield batch, job.batch


def start(place: dict[str, Any], steps_done: int, data: str, samples: int, batch: int) -> Position:
    """Where to go on in a data set, from the place that a checkpoint kept.

    With batches of another size, at the first whole one of this epoch in which nothing comes a second time; in other
    data, at its beginning.

    >>> place = {"data": "memory", "samples": 100, "epoch": 2, "sample": 30}
    >>> start(place, 23, "memory", 100, 10), start(place, 23, "memory", 100, 20)
    (Position(epoch=2, step=3), Position(epoch=2, step=2))
    >>> start(place, 23, "memory", 100, 90), start(place, 23, "folder:x", 100, 10), start({}, 23, "memory", 100, 10)
    (Position(epoch=3, step=0), Position(epoch=0, step=0), Position(epoch=2, step=3))
    """
    whole = max(1, steps_per_epoch(samples, batch, drop_last=True))
    if not place:  # nothing else fed it, so every step was a batch of this data
        return Position(*divmod(steps_done, whole))
    if not _same(place, data, samples):
        return Position()
    step = -(-place["sample"] // batch)
    return Position(place["epoch"], step) if step < whole else Position(place["epoch"] + 1, 0)


def _same(place: dict[str, Any], data: str, samples: int) -> bool:
    return (place.get("data"), place.get("samples")) == (data, samples)
