"""A small DenseNet (Huang et al. 2017), as a user would write it: `benchmarks/densenet.py:build`."""

from typing import Any

import torch
from torch import Tensor, nn


class Dense(nn.Module):
    """Each layer reads all that came before it."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + number * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels + number * growth, growth, 3, padding=1, bias=False),
            )
            for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


def build() -> dict[str, Any]:
    """Two dense blocks on images of 32 × 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        Dense(16, 8, 3),
        nn.BatchNorm2d(40),
        nn.ReLU(inplace=True),
        nn.Conv2d(40, 20, 1, bias=False),
        nn.AvgPool2d(2),
        Dense(20, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(44, 10),
    )
    return {"model": model, "inputs": inputs, "loss": "cross_entropy", "batch": 32}


def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 32, 32, generator=random), torch.randint(10, (samples,), generator=random)
