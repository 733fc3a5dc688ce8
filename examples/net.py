"""A model of one's own, as trainplan takes it: one function that gives the model, its inputs and its loss.

trainplan recommend examples/net.py:build
"""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A small convolutional network with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for layer in self.body:
            features = features + layer(features)
        return self.head(features.mean((2, 3)))


def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images and labels with the shapes and values of real ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, 3, 24, 24, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weight decay for weights, none for norms and biases. `named` is the whole model, whatever the plan."""
    decayed = [parameter for name, parameter in named if parameter.dim() > 1]
    others = [parameter for name, parameter in named if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Stepped after every optimizer step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)


def build() -> dict[str, object]:
    return {
        "model": Net(),
        "inputs": inputs,
        "loss": "cross_entropy",
        "optimizer": optimizer,  # or a word: "optimizer": "sgd", "lr": 0.05
        "schedule": schedule,
        "batch": 16,
        "samples_per_epoch": 50_000,
    }
