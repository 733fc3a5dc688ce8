"""The data sets of the benchmark suite as a table, and the way to open data of any kind.

| key      | classes | image     | training | test   | batch |
|----------|---------|-----------|----------|--------|-------|
| mnist    | 10      | 1×28×28   | 60,000   | 10,000 | 128   |
| cifar10  | 10      | 3×32×32   | 50,000   | 10,000 | 64    |
| imagenet | 1,000   | 3×224×224 | 1,281,000| 50,000 | 32    |
| highres  | 1,000   | 3×512×512 | 50,000   | 10,000 | 32    |

Counts, batches and optimizers are those of Jansen (2020), *A performance-based recommender system for distributed DNN
training*, whose suite became DDLBench; ImageNet is its synthetic version with 1,281 images a class. The means and
deviations are the usual ones for the real data. This table needs no torch.

>>> dataset("CIFAR-10").shape, dataset("cifar10").training
((3, 32, 32), 50000)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainplan.errors import InputError, nearest

if TYPE_CHECKING:
    from trainplan.workload.loader import Source
    from trainplan.workload.workload import Workload


@dataclass(frozen=True)
class Dataset:
    """Images of one shape in so many classes, and how they are usually trained on."""

    key: str
    title: str
    classes: int
    shape: tuple[int, int, int]  # channels, height, width
    training: int  # images of an epoch
    test: int
    batch: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    lr: float
    momentum: float
    weight_decay: float
    augment: bool = False  # random resized crop and flip; the others are only normalised

    @property
    def small(self) -> bool:
        """Images so small that networks drop the early strides (the pytorch-cifar form of a network)."""
        return self.shape[1] <= 64


_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

DATASETS = {
    entry.key: entry
    for entry in (
        Dataset("mnist", "MNIST", 10, (1, 28, 28), 60_000, 10_000, 128, (0.1307,), (0.3081,), 0.01, 0.5, 0.0),
        Dataset("cifar10", "CIFAR-10", 10, (3, 32, 32), 50_000, 10_000, 64,
                (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 0.1, 0.9, 5e-4),
        Dataset("imagenet", "ImageNet", 1_000, (3, 224, 224), 1_281_000, 50_000, 32,
                _IMAGENET_MEAN, _IMAGENET_DEVIATION, 0.1, 0.9, 1e-4, augment=True),
        Dataset("highres", "Highres", 1_000, (3, 512, 512), 50_000, 10_000, 32,
                _IMAGENET_MEAN, _IMAGENET_DEVIATION, 0.1, 0.9, 1e-4),
    )
}  # fmt: skip


def dataset(name: str) -> Dataset:
    """The row of the table, whatever the spelling (`CIFAR-10`, `cifar_10`)."""
    found = DATASETS.get(plain(name))
    if found is None:
        raise InputError(f"data set {name!r}", "it is not in the table", nearest(name, DATASETS))
    return found


def plain(name: str) -> str:
    """A name without case, hyphens, underscores and spaces: `ResNet-50` and `resnet_50` are `resnet50`."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def open_data(text: str, workload: Workload, samples: int = 0, root: str | Path | None = None, seed: int = 0) -> Source:
    """Data for a workload, to be read by `loader.loader`.

    `text` is one of

    * `memory`: random samples of the workload's shapes, made once and kept in memory; no disk, no decoding.
    * `synthetic`: the suite's version of the workload's data set, noise images written to local disk once, under
      `root` (by default `$TRAINPLAN_DATA`, or `trainplan/data` in the user's cache folder).
    * `folder:PATH`: a folder of images, one folder a class.
    * `tokens:PATH`: a file of tokens: `.npy`, or flat binary uint16 (`tokens:PATH,dtype=uint32` for others).

    `samples` is how many; by default an epoch of the workload, or all that the folder or file holds.
    """
    kind, _, path = text.partition(":")
    if kind == "memory" and not path:
        from trainplan.workload.memory import SyntheticDataset

        return SyntheticDataset(workload, samples or workload.samples_per_epoch, seed=seed)
    if kind == "synthetic" and not path:
        from trainplan.workload.images import ImageFolder
        from trainplan.workload.noise import write_noise

        if workload.dataset not in DATASETS:
            raise InputError(
                f"synthetic data on disk for {workload.name}",
                "only the image sets of the benchmark suite are written to disk",
                "memory, folder:PATH or tokens:PATH",
            )
        return ImageFolder(write_noise(root or data_root(), workload.dataset, samples, seed=seed), workload)
    if kind == "folder" and path:
        from trainplan.workload.images import ImageFolder

        return ImageFolder(path, workload, samples)
    if kind == "tokens" and path:
        from trainplan.workload.tokens import TokenFile

        path, _, dtype = path.partition(",dtype=")
        return TokenFile(path, workload, samples, dtype or "uint16")
    raise InputError(f"data {text!r}", "it is not a kind of data", "memory, synthetic, folder:PATH or tokens:PATH")


def data_root() -> Path:
    """Where synthetic data sets are kept."""
    if "TRAINPLAN_DATA" in os.environ:
        return Path(os.environ["TRAINPLAN_DATA"])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "trainplan" / "data"
