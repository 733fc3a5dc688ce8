"""The networks that come with trainplan: one file a family, each written once with the data set as a parameter.

On large images (ImageNet, Highres) they are torchvision's networks, with its parameter names and initial values; on
small images (MNIST, CIFAR-10) they are kuangliu/pytorch-cifar's, which drop the early strides. This table needs no
torch; the families are imported when a network is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainplan.workload.datasets import Dataset
from trainplan.workload.options import Option


@dataclass(frozen=True)
class Network:
    """One size of a family: `trainplan.workload.zoo.<family>.build(dataset, **size, **options)` makes it."""

    title: str
    family: str
    size: dict[str, int] = field(default_factory=dict)


NETWORKS = {
    **{f"resnet{depth}": Network(f"ResNet-{depth}", "resnet", {"depth": depth}) for depth in (18, 34, 50, 101, 152)},
    **{f"vgg{depth}": Network(f"VGG-{depth}", "vgg", {"depth": depth}) for depth in (11, 13, 16, 19)},
    "mobilenetv2": Network("MobileNet v2", "mobilenet"),
}


def network_options(network: Network, dataset: Dataset) -> tuple[Option, ...]:
    """What may be chosen about a network, with the default for this data set."""
    if network.family == "vgg":
        # Batch norm as in pytorch-cifar and unlike torchvision's plain `vgg11`; without it the small ones barely train.
        return Option("bn", dataset.small), Option("dropout", 0.0 if dataset.small else 0.5)
    if network.family == "mobilenet":
        block = "cifar" if dataset.small else "torchvision"
        dropout = 0.0 if dataset.small else 0.2
        return Option("block", block, choices=("cifar", "torchvision")), Option("dropout", dropout)
    return ()
