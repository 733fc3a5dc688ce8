"""Partitions by count: what needs no measurement.

Megatron-LM cuts a transformer into equal numbers of layers, and refuses where they do not divide: every chunk of every
rank holds blocks / (devices · chunks) of them. Interleaved orders take it too, since with several chunks a rank nobody
balances by hand.

>>> from trainplan.solve.partition.instance import P1, on
>>> even(on(P1, devices=3)).cuts
(2, 4)
>>> even(on(P1, devices=3), chunks=2).cuts, even(on(P1, devices=3), chunks=2).placement
((1, 2, 3, 4, 5), ((0,), (1,), (2,), (0,), (1,), (2,)))
>>> even(on(P1, devices=4))
Traceback (most recent call last):
trainplan.errors.PlanError: partition=even on 4 devices: 6 blocks do not divide by 4 stages. Try 3 stages or 6 stages.
"""

from __future__ import annotations

import numpy as np

from trainplan.errors import PlanError
from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Instance, enough_blocks
from trainplan.units import some


def even(given: Instance, chunks: int = 1) -> Partition:
    """Equal numbers of blocks in every chunk of every device, or none at all."""
    stages = given.devices * chunks
    enough_blocks("even", given, stages)
    divides(given.blocks, given.devices, chunks)
    length = given.blocks // stages
    cuts = tuple(range(length, given.blocks, length))
    per_chunk = np.array(given.seconds).reshape(chunks, given.devices, length).sum(axis=2)
    value = float((per_chunk.sum(axis=0) / np.array(given.speeds)).max())  # of the device with most to do
    placement = tuple((stage % given.devices,) for stage in range(stages))
    return Partition(cuts, (1,) * stages, value, placement=placement)


def divides(blocks: int, devices: int, chunks: int = 1) -> None:
    """Refused where the blocks cannot be shared out evenly.

    >>> divides(6, 2, chunks=2)
    Traceback (most recent call last):
    trainplan.errors.PlanError: partition=even on 2 devices of 2 chunks: 6 blocks do not divide by 4 stages. Try pp=3.
    >>> divides(9, 2, chunks=2)
    Traceback (most recent call last):
    trainplan.errors.PlanError: partition=even on 2 devices of 2 chunks: 9 blocks do not divide by 4 stages. Try \
partition=bottleneck.
    """
    stages = devices * chunks
    if blocks % stages == 0:
        return
    # As many chunks on every device, and those only where there are several devices.
    fits = [n for n in range(chunks, blocks + 1, chunks) if blocks % n == 0 and (chunks == 1 or n > chunks)]
    near = [*[n for n in fits if n < stages][-1:], *[n for n in fits if n > stages][:1]]
    asked = f"partition=even on {some(devices, 'device')}" + (f" of {chunks} chunks" if chunks > 1 else "")
    instead = " or ".join(some(n, "stage") if chunks == 1 else f"pp={n // chunks}" for n in near)
    raise PlanError(asked, f"{blocks} blocks do not divide by {stages} stages", instead or "partition=bottleneck")


def lengths(blocks: int, stages: int) -> list[int]:
    """As equal as can be, the longer ones last.

    >>> lengths(8, 3)
    [2, 3, 3]
    """
    short, longer = divmod(blocks, stages)
    return [short] * (stages - longer) + [short + 1] * longer
