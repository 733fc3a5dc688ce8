"""Have all ranks been given the same batch? Held at the first step of a loop of one's own.

A step takes the whole batch on every rank. A loop that feeds each rank its own, as with torch's DistributedSampler,
would train without a word on part of the data, and in a pipeline on inputs with the targets of others.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from trainplan.errors import RunError
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief
from trainplan.workload.batch import tensors
from trainplan.workload.workload import Batch

ELEMENTS = 1024  # of each tensor: enough to tell batches apart, and nothing beside a step


def check_same(batch: Batch, plan: Plan, replica: int) -> None:
    """Refused on all ranks alike, which all call this, where their whole batches differ. (Servers read none, and a rank
    may be given only the size of what it does not read.)"""
    gathered: list[Any] = [None] * plan.world
    dist.all_gather_object(gathered, (batch.samples, _digest(batch), replica))
    workers = gathered[: plan.workers]
    first = workers[0]
    for rank, found in enumerate(workers):
        sizes_differ, read = found[0] != first[0], [one[1] for one in (first, found) if one[1]]
        if not sizes_differ and len(set(read)) < 2:
            continue
        asked = f"the first step under plan {brief(plan)!r}"
        what = f"{found[0]} samples, and rank 0 {first[0]}" if sizes_differ else "other samples than rank 0"
        why = f"rank {rank} was given {what}, and a step takes the whole batch, the same on every rank"
        instead = "a loader that is seeded alike on all ranks, without a DistributedSampler"
        if plan.dp > 1:
            whole = sum({found[2]: found[0] for found in workers}.values())
            instead += f"; or trainer.step(part, whole={whole}), if what each replica was given is its part of a batch"
        raise RunError(asked, why, instead)


def _digest(batch: Batch) -> int:
    """Of the beginning of every tensor; 0: there is none."""
    found = 0
    for place, tensor in tensors(batch).items():
        if not tensor.is_meta:
            begin = tensor.detach().reshape(-1)[:ELEMENTS].cpu().contiguous().view(torch.uint8)
            found = crc32(begin.numpy().tobytes(), crc32(f"{place} {tuple(tensor.shape)}".encode(), found)) or 1
    return found
