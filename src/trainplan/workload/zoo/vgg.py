"""VGG (Simonyan and Zisserman 2014, arXiv:1409.1556), depths 11 to 19, with or without batch norm.

Large images: five stages of biased 3×3 convolutions, each followed by a 2×2 max-pool, then 25088-4096-4096-classes
with dropout. Small images: one linear layer after the last pool. MNIST's 28 pixels would vanish in the fifth pool, so
that one is left out there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainplan.workload.datasets import Dataset

WIDTHS = (64, 128, 256, 512, 512)
LAYOUTS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(nn.Module):
    def __init__(self, dataset: Dataset, depth: int, bn: bool, dropout: float) -> None:
        super().__init__()
        channels, height, _ = dataset.shape
        layers: list[nn.Module] = []
        for width, count in zip(WIDTHS, LAYOUTS[depth], strict=True):
            for _ in range(count):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if bn else []
                layers.append(nn.ReLU(inplace=True))
                channels = width
            if height > 1:
                layers.append(nn.MaxPool2d(2))
                height //= 2
        self.features = nn.Sequential(*layers)
        if dataset.small:
            self.avgpool: nn.Module = nn.Identity()
            head = nn.Linear(512 * height * height, dataset.classes)
            self.classifier: nn.Module = nn.Sequential(nn.Dropout(dropout), head) if dropout else head
        else:
            self.avgpool = nn.AdaptiveAvgPool2d(7)
            self.classifier = nn.Sequential(
                nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
                nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
                nn.Linear(4096, dataset.classes),
            )  # fmt: skip
            self._torchvision_init()

    def _torchvision_init(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # every convolution here has a bias
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def build(dataset: Dataset, depth: int, bn: bool, dropout: float) -> VGG:
    return VGG(dataset, depth, bn, dropout)
