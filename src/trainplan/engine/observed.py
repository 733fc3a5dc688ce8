"""Pure data parallelism: torch's DistributedDataParallel does it, and we watch.

DDP calls a communication hook for each gradient bucket when it is ready, in order. Ours notes that moment (it ends a
piece of the backward pass), starts the sum, and notes when that is over: the same operations that the program has.
The sum is not divided, because the losses are weighted already.

DDP puts everything into one bucket in its first step and makes its buckets, in the order of arrival, before the second.
The program describes the steps from then on.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook as objects.

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainplan.engine.clocks import now

# Steps in which DDP's buckets are not yet those of the program.
WARM_UP_STEPS = 1


class Observed(nn.Module):
    """A module inside DDP, with its gradient buckets watched."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # 2.13 renames broadcast_buffers to a word that 2.11 does not know.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.ddp = DistributedDataParallel(
                module,
                process_group=group,
                bucket_cap_mb=bucket_bytes / 2**20,  # DDP multiplies, and takes fractions
                broadcast_buffers=False,  # running statistics are those of replica 0
                gradient_as_bucket_view=True,
                init_sync=False,  # every replica has built the same values
            )
        self.group = group
        self._ready: Callable[[int], None] | None = None
        self._note: Callable[[int, float, float, int], None] | None = None
        self.ddp.register_comm_hook(self, _sum)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def watch(self, ready: Callable[[int], None], note: Callable[[int, float, float, int], None]) -> None:
        """For the next backward pass: `ready(bucket)` when one is complete, `note(bucket, start, end, bytes)` of it."""
        self._ready, self._note = ready, note


def _sum(state: Observed, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    number, note = bucket.index(), state._note
    if state._ready is not None:
        state._ready(number)
    start, size = now(), bucket.buffer().nbytes
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    assert work is not None

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if note is not None:
            note(number, start, now(), size)
        return future.value()[0]

    return work.get_future().then(finish)
