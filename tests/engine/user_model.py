"""A user's file, for runs in processes of their own. What it does wrong is said by an environment variable."""

import os
import time
from pathlib import Path

import torch
from torch import nn


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
    return {"model": Net(), "inputs": inputs, "loss": loss, "batch": 8, "optimizer": "sgd", "lr": 0.1}
