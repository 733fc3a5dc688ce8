"""Evaluation under a plan: the loss of the model in evaluation mode, and nothing changes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.trainer import Trainer, build
from trainplan.errors import ModelError
from trainplan.plan.plan import Plan, plan
from trainplan.workload.load import load


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


class Helped(nn.Module):
    """With a second head while it is trained, as GoogLeNet has: in evaluation mode it is another chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.helper, self.middle, self.last = nn.Linear(16, 3), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        out = self.last(torch.tanh(self.middle(h)))
        return (out, self.helper(h)) if self.training else out


EXAMPLE = (torch.linspace(-1, 1, 64).reshape(8, 8), torch.arange(8) % 3)


def of_both(output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return F.cross_entropy(output, targets)
    return F.cross_entropy(output[0], targets) + 0.4 * F.cross_entropy(output[1], targets)


def of_training_alone(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output[0], targets) + 0.4 * F.cross_entropy(output[1], targets)


def descent(named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def evaluate_helped(rank: int, world: int, chosen: Plan, loss=of_both):
    torch.manual_seed(0)
    model = Helped()
    job = load(model, inputs=EXAMPLE, loss=loss, optimizer=descent, batch=8)
    trainer = build(chosen, job, model=model)
    losses = []
    for _ in range(2):  # with the values of the moment
        trainer.step(EXAMPLE)
        losses.append(trainer.evaluate(EXAMPLE))
    trainer.gather()
    first = [copy.stage for copy in trainer.part.held.values() if copy.is_first_copy]
    state = {name: value.detach().clone() for stage in first for name, value in stage.state_dict().items()}
    trainer.close()
    return losses, state


@pytest.mark.parametrize(
    "chosen",
    [
        plan(blocks=4),
        plan(dp=2, zero=3, blocks=4),
        plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=4),
        plan(pp=2, pairs=1, micro=2, schedule="chimera", stages=(1,), blocks=4),
    ],
    ids=["single", "sharded", "pp2", "two directions"],
)
def test_a_model_that_is_another_chain_in_evaluation_mode(chosen: Plan) -> None:
    world = chosen.world
    results = [evaluate_helped(0, 1, chosen)] if world == 1 else pool(world).run(evaluate_helped, chosen)
    model = Helped()
    model.load_state_dict({name: value for _, part in results for name, value in part.items()})
    with torch.no_grad():
        want = F.cross_entropy(model.eval()(EXAMPLE[0]), EXAMPLE[1]).item()
    [losses] = [losses for losses, _ in results if losses[-1] is not None]
    assert losses[-1] == pytest.approx(want, rel=1e-5)
    assert losses[0] != losses[1]


def test_a_loss_that_does_not_take_what_evaluation_gives_is_said_to_be_that() -> None:
    with pytest.raises(ModelError, match=r"output in evaluation mode.*takes what the model returns in evaluation mode"):
        evaluate_helped(0, 1, plan(blocks=4), of_training_alone)
