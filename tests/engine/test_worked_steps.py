"""Steps worked out by hand: clipping by the norm of all shares, micro-batches and replicas of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainplan.bench.pool import pool
from trainplan.engine.trainer import build
from trainplan.plan.plan import plan
from trainplan.workload.load import load


class Dot(nn.Module):
    """Samples times weights: the gradient of their mean is the mean of the samples."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weights))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum(1)


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()


def stepped(
    rank: int, world: int, samples: list[list[float]], weights: list[float], choices: dict[str, Any], clip: float = 0.0
) -> tuple[float | None, list[float]]:
    """One step of plain SGD with lr=1: the loss, and the weights after it."""
    model, x = Dot(weights), torch.tensor(samples)
    workload = load(
        model, loss=mean, inputs=(x[:1], x[:1, 0]), batch=len(x), clip_norm=clip,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )  # fmt: skip
    trainer = build(plan(blocks=1, **choices), workload, model=model)
    loss = trainer.step((x, x[:, 0])).loss
    trainer.gather()
    found = trainer.parameters["w"].tolist()
    trainer.close()
    return loss, found


@pytest.mark.parametrize("choices", [{"dp": 2}, *({"dp": 2, "zero": zero} for zero in (1, 2, 3))])
def test_gradients_are_clipped_by_the_norm_of_all_shares(choices: dict[str, Any]) -> None:
    """Shares of [3, 0] and [0, 4]: each clipped by its own norm would be [1, 0] and [0, 1]."""
    for _, weights in pool(2).run(stepped, [[3.0, 0.0, 0.0, 4.0]] * 2, [0.0] * 4, choices, 1.0):
        assert weights == pytest.approx([-0.59999988, 0.0, 0.0, -0.79999984], abs=1e-7)


def test_micro_batches_count_by_their_samples() -> None:
    """Means of [1, 2], [3, −1] and [2, 2] over 2, 1 and 1 samples: the plain mean would be [2, 1]."""
    samples = [[1.0, 2.0], [1.0, 2.0], [3.0, -1.0], [2.0, 2.0]]
    assert stepped(0, 1, samples, [0.0, 0.0], {"micro": 3})[1] == pytest.approx([-1.75, -1.25])


def test_replicas_count_by_their_samples() -> None:
    """Losses of 1, 2 and 3 here and of 10 there: the mean of the two means would be 6."""
    ranks = pool(2).run(stepped, [[1.0], [2.0], [3.0], [10.0]], [1.0], {"dp": 2, "ratio": (3, 1)})
    for loss, weights in ranks:
        assert loss == pytest.approx(4.0)
        assert weights == pytest.approx([1.0 - 4.0])
