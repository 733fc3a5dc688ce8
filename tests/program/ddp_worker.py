"""A worker that trains under torch's DDP and reports which gradients travelled together. Started by test_buckets.py."""

from __future__ import annotations

import warnings
from datetime import timedelta
from multiprocessing.connection import Connection


def train(rank: int, folder: str, sizes: list[int], caps: list[float], reports: Connection) -> None:
    """For every cap a model with one float32 parameter of each size; send what the hook saw."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    warnings.filterwarnings("ignore", category=FutureWarning)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.zeros(size // 4) for size in sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.layers:
                x = x * weight[0]
            return x

    found = {}
    for cap in caps:
        seen: list[int] = []

        def hook(_, bucket, seen=seen):
            seen.append(bucket.buffer().numel() * 4)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        model = torch.nn.parallel.DistributedDataParallel(Layers(), bucket_cap_mb=cap)
        model.register_comm_hook(None, hook)
        steps = []
        for _ in range(3):
            seen.clear()
            model(torch.ones(1)).sum().backward()
            steps.append(list(seen))
        found[cap] = steps
    reports.send(found)
    dist.destroy_process_group()
