"""What exchanges of gloo's ranks are made of: messages and additions, and the copies of GPUs to the host and back.

Ranks exchange parts of a bucket and add up what arrives; slices of a GPU copy it to the host before, and back after
(`engine/exchanges.py`). Each of these is measured while all ranks do it, as they will: copies share one way to the GPU,
and the threads that send, receive and add share cores and memory.

    stage   a GPU's tensor to pinned memory, and back
    round   from host memory to the next rank, while as much arrives from the one before
    add     one tensor of the host to another
    hub     from host memory to one rank from all others, and to all others from that one: a server's messages
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainplan.cluster.probe.team import Record, Team
from trainplan.units import KIB, MIB

PARTS = ("stage", "round", "add", "hub")
SIZES = (4 * KIB, 128 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
MOST = 256 * MIB  # that one rank receives at once
_TAG = 5


class Parts:
    """The memory that they are measured in."""

    def __init__(self, team: Team) -> None:
        self.team = team
        cuda = team.device.type == "cuda"
        self.tensor = torch.zeros(SIZES[-1] // 4, device=team.device)
        self.host, self.more = (torch.zeros(SIZES[-1] // 4, pin_memory=cuda) for _ in range(2))
        others = team.count - 1 if team.rank == 0 else 1
        largest = max(size for size in SIZES if _fits("hub", size, team.count))
        self.arriving = [torch.zeros(largest // 4, pin_memory=cuda) for _ in range(others)]

    def measure(self, count: int, group: dist.ProcessGroup, record: Record) -> None:
        """Each part at each size once, on the first so many workers: both moments, as of collectives."""
        parts = PARTS if self.team.staged else PARTS[1:]
        for part, size in ((part, size) for part in parts for size in SIZES if _fits(part, size, count)):
            call = self._call(part, size // 4, count, group)
            dist.barrier(group=group)
            self.team.sync()
            started = time.perf_counter()
            call()
            self.team.sync()
            record(f"{part}.{count}.{size}", (started, time.perf_counter()))

    def _call(self, part: str, numbers: int, count: int, group: dist.ProcessGroup) -> Callable[[], object]:
        tensor, host, more = (whole[:numbers] for whole in (self.tensor, self.host, self.more))
        rank = self.team.rank

        def stage() -> None:
            host.copy_(tensor, non_blocking=True)
            self.team.sync()
            tensor.copy_(host, non_blocking=True)

        def round_() -> None:
            works = [dist.irecv(more, (rank - 1) % count, group=group, tag=_TAG)]
            works.append(dist.isend(host, (rank + 1) % count, group=group, tag=_TAG))
            for work in works:
                if work is not None:
                    work.wait()

        def hub() -> None:
            others = range(1, count) if rank == 0 else (0,)
            receives = zip(self.arriving, others, strict=False)
            works = [dist.irecv(into[:numbers], other, group=group, tag=_TAG) for into, other in receives]
            works += [dist.isend(host, other, group=group, tag=_TAG) for other in others]
            for work in works:
                if work is not None:
                    work.wait()

        return {"stage": stage, "round": round_, "add": lambda: host.add_(more), "hub": hub}[part]


def _fits(part: str, size: int, count: int) -> bool:
    """Whether there is memory for what arrives at a hub of so many ranks; the smallest size is always measured."""
    return part != "hub" or size == SIZES[0] or size * (count - 1) <= MOST
