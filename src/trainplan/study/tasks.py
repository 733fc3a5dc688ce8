"""Small tasks that are trained to a target in seconds, so that they can be trained hundreds of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainplan.errors import InputError

HELD_OUT = 0.2  # share of the samples that accuracy is measured on


@dataclass(frozen=True)
class Task:
    """Samples to learn, samples to be judged by, and what learns them."""

    name: str
    inputs: Tensor
    targets: Tensor
    judged_inputs: Tensor
    judged_targets: Tensor
    build: Callable[[], nn.Module]  # weights by torch's seed
    rate: float  # of plain SGD, with batches of `batch`
    batch: int
    target: float  # the accuracy to be reached

    def accuracy(self, model: nn.Module) -> float:
        """The share of the samples held out that a model tells right."""
        with torch.no_grad():
            return float((model(self.judged_inputs).argmax(1) == self.judged_targets).double().mean())


def digits() -> Task:
    """scikit-learn's 1,797 handwritten digits of 8 × 8 dots, which come with it: nothing is downloaded."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        why = "the digits are scikit-learn's, which is not installed"
        raise InputError("task digits", why, "pip install 'trainplan[study]', or --tasks images") from None
    found = load_digits()
    inputs = torch.tensor(found.data / 16, dtype=torch.float32)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))

    return _task("digits", inputs, torch.tensor(found.target), build, rate=0.1, batch=16, target=0.94)


def images(samples: int = 3000, size: int = 12, classes: int = 10) -> Task:
    """Coloured images of ten kinds, each a pattern of its own that is moved about and drowned in noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(classes, 3, size // 3, size // 3, generator=generator)
    patterns = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    targets = torch.randint(classes, (samples,), generator=generator)
    moves = torch.randint(-1, 2, (samples, 2), generator=generator).tolist()
    moved = [patterns[t].roll((x, y), (1, 2)) for t, (x, y) in zip(targets.tolist(), moves, strict=True)]
    inputs = torch.stack(moved) + 1.5 * torch.randn(samples, 3, size, size, generator=generator)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, classes),
        )  # fmt: skip

    return _task("images", inputs, targets, build, rate=0.02, batch=16, target=0.85)


def _task(
    name: str, inputs: Tensor, targets: Tensor, build: Callable[[], nn.Module], rate: float, batch: int, target: float
) -> Task:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    judged, learned = order[: int(HELD_OUT * len(order))], order[int(HELD_OUT * len(order)) :]
    return Task(name, inputs[learned], targets[learned], inputs[judged], targets[judged], build, rate, batch, target)


TASKS = {"digits": digits, "images": images}
