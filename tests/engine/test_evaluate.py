"""Evaluation under a plan: the loss of the model in evaluation mode, and nothing changes."""

import pytest
import torch

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan, plan


def held(trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in {**trainer.parameters, **trainer.buffers}.items()}


def evaluate(rank: int, world: int, chosen: Plan):
    job, model, captured = jobs.built("residual", "sgd")
    shape = jobs.shape_of("residual")
    trainer = Trainer(chosen, job, captured, lambda names: jobs.values_of(model), shape=shape, seed=7)
    trainer.step(job.inputs(8, seed=0))
    before = {name: value.detach().clone() for name, value in held(trainer).items()}
    loss = trainer.evaluate(job.inputs(6, seed=9))
    after = held(trainer)
    same = all(torch.equal(before[name], after[name]) for name in before)
    first = [copy.stage for copy in trainer.part.held.values() if copy.is_first_copy]
    state = {name: value.clone() for stage in first for name, value in stage.state_dict().items()}
    if world > 1:
        trainer.close()
    return loss, same, state


@pytest.mark.parametrize(
    "chosen",
    [
        plan(blocks=BLOCKS["residual"]),
        plan(dp=2, bucket=300, blocks=BLOCKS["residual"]),
        plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=BLOCKS["residual"]),
        plan(pp=4, micro=2, schedule="gpipe", stages=(1, 2, 3), blocks=BLOCKS["residual"]),
        plan(pp=2, micro=2, schedule="interleaved", chunks=2, stages=(1, 2, 3), blocks=BLOCKS["residual"]),
        plan(pp=2, micro=2, schedule="gems", stages=(2,), blocks=BLOCKS["residual"]),
    ],
    ids=["single", "dp", "pp2", "pp4 with a skip", "two stages a rank", "two directions"],
)
def test_evaluate(chosen: Plan) -> None:
    results = [evaluate(0, 1, chosen)] if chosen.world == 1 else pool(chosen.world).run(evaluate, chosen)
    state = {name: value for _, _, part in results for name, value in part.items()}
    job, model, _ = jobs.built("residual", "sgd")
    model.load_state_dict(state)
    batch = job.inputs(6, seed=9)
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(model.eval()(*batch.args), batch.targets).item()
    losses = [loss for loss, _, _ in results if loss is not None]
    assert losses == pytest.approx([want], rel=1e-9)
    assert all(same for _, same, _ in results)
