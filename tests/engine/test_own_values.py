"""Of a user's own loop: models that differ from rank to rank, autocast around it, weights that are read in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainplan.bench.pool import pool
from trainplan.engine.trainer import Trainer, build
from trainplan.errors import ModelError, RunError
from trainplan.plan.plan import plan
from trainplan.workload.load import load


def model(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4))


def trainer(choices: dict[str, Any], seed: int = 0, width: int = 6) -> Trainer:
    torch.manual_seed(seed)
    own, example = model(width), (torch.ones(2, 4), torch.ones(2, 4))
    workload = load(own, loss="mse", optimizer="sgd", inputs=example, batch=8)
    return build(plan(blocks=2, **choices), workload, model=own)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def train(rank: int, world: int, choices: dict[str, Any], seeds: tuple[int, ...]) -> dict[str, Tensor]:
    made = trainer(choices, seeds[rank])
    for _ in range(2):
        made.step(batch())
    made.gather()
    found = {name: value.detach().clone() for name, value in {**made.parameters, **made.buffers}.items()}
    made.close()
    return found


def other_widths(rank: int, world: int) -> str:
    with pytest.raises(ModelError) as refused:
        trainer({"dp": 2}, width=6 + rank)
    return str(refused.value)


def read(rank: int, world: int, choices: dict[str, Any]) -> None:
    made = trainer(choices)
    made.step(batch())
    with pytest.raises(RunError, match=r"weights under zero=\d: .*Try trainer.gather\(\) before, on all ranks"):
        _ = made.parameters
    made.gather()
    assert all(torch.isfinite(p).all() for p in made.parameters.values())
    made.step(batch())
    with pytest.raises(RunError, match="gather"):
        _ = made.parameters
    made.evaluate(batch())
    assert all(torch.isfinite(p).all() for p in made.parameters.values())
    made.close()


@pytest.mark.parametrize(
    "choices",
    [{"dp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "exchange": "ring"},
     {"pp": 2, "stages": (1,), "schedule": "1f1b", "micro": 2}],
)  # fmt: skip
def test_models_that_nobody_seeded_train_as_that_of_rank_0(choices: dict[str, Any]) -> None:
    alike, unseeded = (pool(2).run(train, choices, seeds) for seeds in ((3, 3), (3, 4)))
    for expected, found in zip(alike, unseeded, strict=True):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_other_models_on_other_ranks_are_refused() -> None:
    for said in pool(2).run(other_widths):
        assert "the model on every rank: 0.bias is (6,) torch.float32 on rank 0, and (7,)" in said


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_that_are_shared_out_are_read_once_they_are_whole(zero: int) -> None:
    pool(2).run(read, {"dp": 2, "zero": zero})


def test_a_step_under_autocast_is_refused() -> None:
    made = trainer({})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RunError, match=r"a step under autocast: .*Try with torch.autocast"):
            made.step(batch())
        with pytest.raises(RunError, match="autocast"):
            made.evaluate(batch())
    assert made.step(batch()).loss is not None
