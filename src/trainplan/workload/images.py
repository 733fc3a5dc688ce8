"""A folder of images, one folder a class: decoded with Pillow, brought to the data set's shape, normalised.

What is random about an image (crop, flip) is drawn from a generator seeded by (seed, epoch, index), so a sample is
the same whichever process reads it, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainplan.errors import InputError
from trainplan.workload.batch import join, tensors
from trainplan.workload.datasets import DATASETS, Dataset
from trainplan.workload.loader import random_for
from trainplan.workload.workload import Batch, Workload

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


class ImageFolder:
    """The images below `root`; classes are its folders in alphabetical order (`root/train` where there is one)."""

    decodes = True

    def __init__(self, root: str | Path, workload: Workload, samples: int = 0) -> None:
        root = Path(root)
        if not root.is_dir():
            raise InputError(f"folder:{root}", "there is no such folder", "a folder with one folder a class")
        root = root / "train" if (root / "train").is_dir() else root
        folders = sorted(entry for entry in root.iterdir() if entry.is_dir())
        self.form = form_of(workload)
        if self.form.classes and len(folders) > self.form.classes:
            raise InputError(
                f"folder:{root} for {workload.name}",
                f"it has {len(folders)} classes, and the model {self.form.classes}",
                "a model with as many classes",
            )
        self.paths: list[str] = []
        labels: list[int] = []
        for label, folder in enumerate(folders):
            found = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
            self.paths += found
            labels += [label] * len(found)
        if not self.paths:
            raise InputError(f"folder:{root}", f"its {len(folders)} folders hold no images", "one folder a class")
        if samples > len(self.paths):
            raise InputError(f"{samples} samples of folder:{root}", f"it has {len(self.paths)}", "fewer samples")
        self.labels = np.array(labels, dtype=np.int64)
        if samples:
            # Evenly over the classes, which lie one after the other.
            chosen = np.arange(samples) * len(self.paths) // samples
            self.paths, self.labels = [self.paths[i] for i in chosen], self.labels[chosen]
        self.feed = workload.feed

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        return join([self._sample(index, random_for(seed, epoch, index)) for index in indices])

    def _sample(self, index: int, random: torch.Generator) -> Batch:
        try:
            with Image.open(self.paths[index]) as image:
                pixels = as_tensor(image, self.form, random)
        except (OSError, Image.DecompressionBombError) as error:
            raise InputError(f"image {self.paths[index]}", f"it cannot be decoded ({error})", "removing it") from None
        label = torch.tensor(self.labels[index])
        if self.feed is not None:
            return self.feed(pixels, label, random)
        return Batch(1, args=(pixels[None],), targets=label[None])


def form_of(workload: Workload) -> Dataset:
    """Shape and normalisation of a workload's images: of its data set, else of its first image-like input.

    Models from elsewhere get ImageNet's treatment at their own size, and no check of the number of classes.
    """
    if workload.dataset in DATASETS:
        return DATASETS[workload.dataset]
    for tensor in tensors(workload.inputs(1, 0)).values():
        if tensor.dim() == 4 and tensor.is_floating_point():
            channels, height, width = tensor.shape[1:]
            usual = DATASETS["imagenet" if channels == 3 else "mnist"]
            if channels == len(usual.mean):
                return replace(usual, key="", classes=0, shape=(channels, height, width), augment=channels == 3)
    raise InputError(f"images for {workload.name}", "it takes no images of 1 or 3 channels", "memory or tokens:PATH")


def as_tensor(image: Any, form: Dataset, random: torch.Generator) -> Tensor:
    """A Pillow image as a normalised tensor (channels, height, width)."""
    channels, height, width = form.shape
    image = image.convert("L" if channels == 1 else "RGB")
    if form.augment:
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=random_box(image.size, random))
        if torch.rand((), generator=random) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    elif image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=centre_box(image.size, (width, height)))
    pixels = np.asarray(image, dtype=np.float32).reshape(height, width, channels) / 255
    pixels = (pixels - np.array(form.mean, np.float32)) / np.array(form.deviation, np.float32)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def random_box(size: tuple[int, int], random: torch.Generator) -> tuple[int, int, int, int]:
    """A random rectangle of 8 to 100 % of the area and sides of 3:4 to 4:3, as torchvision's RandomResizedCrop."""
    width, height = size
    for _ in range(10):
        share, shape, left, top = torch.rand(4, generator=random).tolist()
        area = width * height * (0.08 + 0.92 * share)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    return centre_box(size, (min(4 * height, 3 * width), min(3 * height, 4 * width)))


def centre_box(size: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """The largest rectangle of the proportions of `shape` in the middle.

    >>> centre_box((100, 50), (32, 32))
    (25, 0, 75, 50)
    """
    scale = min(size[0] / shape[0], size[1] / shape[1])
    w, h = max(1, round(shape[0] * scale)), max(1, round(shape[1] * scale))
    x, y = (size[0] - w) // 2, (size[1] - h) // 2
    return x, y, x + w, y + h
