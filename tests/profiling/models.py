"""Small workloads for profiles, made where they are needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainplan.workload.load import load
from trainplan.workload.workload import Workload

GPT = "gpt:layers=2,hidden=64,heads=4,seq=64,vocab=500"


class Skip(nn.Module):
    """Layers with a connection from the first over all others, and a weight that two of them share."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.layers[-1][0].weight = self.first.weight
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.relu(self.first(x))
        x = start
        for layer in self.layers:
            x = layer(x)
        return self.last(x + start)


def of(model: nn.Module, shape: tuple[int, ...], classes: int = 4, **options: object) -> Workload:
    """A classifier on random inputs of a shape."""

    def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(samples, *shape, generator=generator), torch.zeros(samples, dtype=torch.long)

    return load(model, **{"inputs": inputs, "loss": "cross_entropy", "batch": 8, "optimizer": "sgd", **options})


def skip() -> Workload:
    return of(Skip(), (32,))
