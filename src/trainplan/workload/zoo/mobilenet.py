"""MobileNet v2 (Sandler et al. 2018, arXiv:1801.04381): inverted residuals with depthwise convolutions.

Two forms of the block are in use, and each can be had on any data set by `block=`:

* `torchvision` (default on large images): ReLU6, no expansion where the factor is 1, and a shortcut only where input
  and output have the same shape.
* `cifar` (default on small images, as in pytorch-cifar): ReLU, an expansion convolution also where the factor is 1,
  and a 1×1 convolution in every shortcut of stride 1 whose channels change.

On small images the stem and the second stage do not stride.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainplan.workload.datasets import Dataset

#         expansion, channels, blocks, stride of the first
LAYOUT = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def unit(
    inputs: int, outputs: int, size: int, activation: type[nn.Module], stride: int = 1, groups: int = 1
) -> nn.Module:
    """Convolution, batch norm, activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        activation(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expand by 1×1, filter each channel by 3×3, project by 1×1 without activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, cifar: bool) -> None:
        super().__init__()
        activation = nn.ReLU if cifar else nn.ReLU6
        hidden = inputs * expansion
        layers = [unit(inputs, hidden, 1, activation)] if expansion > 1 or cifar else []
        layers.append(unit(hidden, hidden, 3, activation, stride, groups=hidden))
        self.conv = nn.Sequential(*layers, nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module | None = None
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif stride == 1 and cifar:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if self.shortcut is None else self.shortcut(x) + self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, dataset: Dataset, block: str, dropout: float) -> None:
        super().__init__()
        cifar = block == "cifar"
        activation = nn.ReLU if cifar else nn.ReLU6
        layers = [unit(dataset.shape[0], 32, 3, activation, stride=1 if dataset.small else 2)]
        inputs = 32
        for stage, (expansion, outputs, count, stride) in enumerate(LAYOUT):
            for place in range(count):
                strides = stride if place == 0 and not (stage == 1 and dataset.small) else 1
                layers.append(InvertedResidual(inputs, outputs, strides, expansion, cifar))
                inputs = outputs
        layers.append(unit(inputs, 1280, 1, activation))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, dataset.classes))
        if not dataset.small:
            self._torchvision_init()

    def _torchvision_init(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def build(dataset: Dataset, block: str, dropout: float) -> MobileNetV2:
    return MobileNetV2(dataset, block, dropout)
