"""A worker that trains under torch's DDP and reports which gradients travelled together. Started by test_buckets.py."""

from __future__ import annotations

import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

# What travels in which order of limits, by what DDP is told: a cap in MiB, nothing, or to look for unused parameters.
Told = float | str
DEFAULT, UNUSED, UNUSED_CAP_4 = "default", "find unused", "find unused, cap 4"


def arguments(told: Told) -> dict:
    """What DDP is given."""
    if isinstance(told, float):
        return {"bucket_cap_mb": told}
    return {
        DEFAULT: {}, UNUSED: {"find_unused_parameters": True},
        UNUSED_CAP_4: {"find_unused_parameters": True, "bucket_cap_mb": 4},
    }[told]  # fmt: skip


def train(rank: int, folder: str, sizes: list[int], told: list[Told], whole: list[int], reports: Connection) -> None:
    """For whatever DDP is told, a model with one float32 parameter of each size (of `whole`, where that is no cap);
    send what the hook saw."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    warnings.filterwarnings("ignore", category=FutureWarning)

    class Layers(torch.nn.Module):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.zeros(size // 4) for size in sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.layers:
                x = x * weight[0]
            return x

    found = {}
    for one in told:
        seen: list[int] = []

        def hook(_, bucket, seen=seen):
            seen.append(bucket.buffer().numel() * 4)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        model = torch.nn.parallel.DistributedDataParallel(
            Layers(sizes if isinstance(one, float) else whole), **arguments(one)
        )
        model.register_comm_hook(None, hook)
        steps = []
        for _ in range(3):
            seen.clear()
            model(torch.ones(1)).sum().backward()
            steps.append(list(seen))
        found[one] = steps
    reports.send(found)
    dist.destroy_process_group()
