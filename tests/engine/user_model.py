"""A user's file, for runs in processes of their own. What it does wrong is said by an environment variable."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from trainplan.workload.workload import Batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


calls = 0


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    trouble = os.environ.get("TROUBLE", "") if output.device.type != "meta" else ""
    if trouble.startswith("twice:"):
        fail_twice(Path(trouble.removeprefix("twice:")))
    if trouble.endswith(" on rank 1"):
        trouble = trouble.removesuffix(" on rank 1") if os.environ["RANK"] == "1" else ""
    if trouble in ("raise", "kill") and "MOMENT" in os.environ:
        Path(os.environ["MOMENT"]).write_text(str(time.time()))
    if trouble == "raise":
        raise ValueError("the user's loss went wrong")
    if trouble == "kill":
        os.kill(os.getpid(), 9)
    if trouble == "slow":
        time.sleep(0.3)
    return nn.functional.mse_loss(output, targets)


def fail_twice(folder: Path) -> None:
    """Raise in the first step, the next time in the third (of two micro-batches each), and never again."""
    global calls
    calls += 1
    for attempt, call in (("first", 1), ("second", 5)):
        if calls == call and not (folder / attempt).exists():
            (folder / attempt).touch()
            raise ValueError(f"the {attempt} attempt went wrong")


def inputs(samples: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 8, generator=generator), torch.randn(samples, 8, generator=generator)


def build() -> dict:
    if os.environ.get("TROUBLE") == "build on rank 1" and os.environ.get("RANK") == "1":
        Path(os.environ["MOMENT"]).write_text(str(time.time()))
        raise ValueError("the user's function went wrong")
    return {"model": Net(), "inputs": inputs, "loss": loss, "batch": 8, "optimizer": "sgd", "lr": 0.1}


def frozen() -> dict:
    """The first two of its four layers are frozen: a stage of these waits for no gradient."""
    model = Net()
    model.layers[:2].requires_grad_(False)
    return {"model": model, "inputs": inputs, "loss": "mse", "batch": 8, "optimizer": "sgd", "lr": 0.1}


def curved(layers: int = 2) -> dict:
    """Layers with something in them for a compiler to fuse."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)))
    return {"model": model, "inputs": inputs, "loss": "mse", "batch": 8, "optimizer": "sgd", "lr": 0.1}


def picture(samples: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, 3, 6, 6, generator=generator)
    return images, torch.randint(0, 2, (samples,), generator=generator)


def only_in_workers(pixels: torch.Tensor, label: torch.Tensor, random: torch.Generator) -> Batch:
    """An image and its label as they are, if they were read where they should be: in a loader's process."""
    if torch.utils.data.get_worker_info() is None:
        raise RuntimeError("an image was decoded in the process that trains")
    return Batch(1, args=(pixels[None],), targets=label[None])


def seeing() -> dict:
    """Takes images of 6 by 6 pixels, in two classes."""
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))
    return {
        "model": model, "inputs": picture, "loss": "cross_entropy", "batch": 8, "optimizer": "sgd", "lr": 0.1,
        "feed": only_in_workers,
    }  # fmt: skip
