"""Saved under one plan, resumed under another: training goes on as if nothing had happened."""

from pathlib import Path

import pytest
import torch

from tests.engine import jobs
from tests.engine.test_equality import CLOSE, Case, alone
from trainplan.bench.pool import pool
from trainplan.engine import checkpoint
from trainplan.engine.trainer import Trainer
from trainplan.errors import InputError
from trainplan.plan.plan import Plan, plan

SIZES = [8, 7, 8, 8]
PLANS = {
    "single": plan(blocks=6),
    "dp": plan(dp=2, bucket=300, blocks=6),
    "pipeline": plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=6),
    "both": plan(dp=2, pp=2, micro=1, schedule="gpipe", stages=(4,), bucket=300, recompute="full", blocks=6),
}


def part_of_a_run(
    rank: int, world: int, chosen: Plan, first: int, last: int, folder: str, resume: bool, optimizer: str
):
    job, model, captured = jobs.built("tied", optimizer)
    trainer = Trainer(chosen, job, captured, lambda names: jobs.values_of(model), seed=7)
    if resume:
        checkpoint.load(trainer, folder)
        assert trainer.steps_done == first
    for number in range(first, last):
        trainer.step(job.inputs(SIZES[number], seed=number))
    if not resume:
        checkpoint.save(trainer, folder)
    weights = {n: p.detach().clone() for n, p in trainer.stage.named_parameters()}
    if world > 1:
        trainer.close()
    return weights


def run(chosen: Plan, *arguments):
    if chosen.world == 1:
        return [part_of_a_run(0, 1, chosen, *arguments)]
    return pool(chosen.world).run(part_of_a_run, chosen, *arguments)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("before", "after"), [("single", "both"), ("both", "dp"), ("dp", "pipeline"), ("pipeline", "single")]
)
def test_resumed_under_another_plan(before: str, after: str, optimizer: str, tmp_path: Path) -> None:
    """No dropout and no batch norm here, so every plan is the same training."""
    folder = str(tmp_path / "checkpoint")
    run(PLANS[before], 0, 2, folder, False, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]  # nothing half-written beside it
    want = alone(Case("single", "tied", {}, sizes=tuple(SIZES), optimizer=optimizer))
    for weights in run(PLANS[after], 2, 4, folder, True, optimizer):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, want.weights[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_checkpoint_of_another_workload_is_refused(tmp_path: Path) -> None:
    run(PLANS["single"], 0, 1, str(tmp_path / "c"), False, "sgd")
    job, model, captured = jobs.built("chain", "sgd")
    trainer = Trainer(plan(blocks=6), job, captured, lambda names: jobs.values_of(model))
    with pytest.raises(InputError, match="it is of tied, and this run trains chain"):
        checkpoint.load(trainer, tmp_path / "c")
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(trainer, tmp_path / "nowhere")
