"""ResNet (He et al. 2015, arXiv:1512.03385), depths 18 to 152.

Large images: 7×7/2 stem, 3×3/2 max-pool, four stages of residual blocks, global average pool, one linear layer.
Small images: 3×3/1 stem and no max-pool. The stride of a bottleneck is in its 3×3 convolution, as in torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainplan.workload.datasets import Dataset

#          blocks in each of the four stages, bottleneck
LAYOUTS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Residual(nn.Module):
    """x + f(x), with a 1×1 convolution on the way past where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def past(self, x: Tensor) -> Tensor:
        return x if self.downsample is None else self.downsample(x)


class Basic(Residual):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride, self.expansion)
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.past(x)
        return self.relu(out)


class Bottleneck(Residual):
    """1×1 down, 3×3, 1×1 up."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride, self.expansion)
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, width * 4, 1), nn.BatchNorm2d(width * 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.past(x)
        return self.relu(out)


def stage(block: type[Basic | Bottleneck], inputs: int, width: int, count: int, stride: int = 2) -> nn.Sequential:
    """Blocks of one width, of which the first halves the image."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(count - 1)))


class ResNet(nn.Module):
    def __init__(self, dataset: Dataset, depth: int) -> None:
        super().__init__()
        counts, bottleneck = LAYOUTS[depth]
        block = Bottleneck if bottleneck else Basic
        self.conv1 = convolution(dataset.shape[0], 64, 3) if dataset.small else convolution(dataset.shape[0], 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if dataset.small else nn.MaxPool2d(3, 2, padding=1)
        width = block.expansion
        self.layer1 = stage(block, 64, 64, counts[0], stride=1)
        self.layer2 = stage(block, 64 * width, 128, counts[1])
        self.layer3 = stage(block, 128 * width, 256, counts[2])
        self.layer4 = stage(block, 256 * width, 512, counts[3])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * width, dataset.classes)
        if not dataset.small:
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def build(dataset: Dataset, depth: int) -> ResNet:
    return ResNet(dataset, depth)
