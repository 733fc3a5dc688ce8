"""Which parts of a model are in training mode while it is trained: those that the user put there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainplan
from tests.engine.test_own_model import held
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import plan
from trainplan.workload.load import load

BATCHES = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]


def frozen() -> nn.Sequential:
    """A backbone in evaluation mode, which nobody trains, and a head."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.Linear(6, 3))


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def descent(named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def in_own_loop(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for x, y in BATCHES:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def built(model: nn.Module) -> Trainer:
    return trainplan.build("single", model, "cross_entropy", descent, inputs=BATCHES[0], batch=8)


def test_a_part_in_evaluation_mode_is_trained_so_and_left_so(recwarn: pytest.WarningsRecorder) -> None:
    model, own = frozen(), frozen()
    trainer = built(model)
    assert [trainer.step(batch).loss for batch in BATCHES] == pytest.approx(in_own_loop(own), rel=1e-5)
    assert all(torch.equal(trainer.buffers[name], value) for name, value in own.named_buffers())
    with torch.no_grad():
        want = F.cross_entropy(own.eval()(BATCHES[0][0]), BATCHES[0][1]).item()
    assert trainer.evaluate(BATCHES[0]) == pytest.approx(want, rel=1e-5)
    assert [trainer.step(BATCHES[0]).loss] == pytest.approx([F.cross_entropy(own(BATCHES[0][0]), BATCHES[0][1]).item()])
    assert [part.training for part in model] == [False, True]
    assert not [w for w in recwarn if "evaluation mode" in str(w.message)]  # frozen as it is, it is meant so


def test_compare_trains_both_sides_in_the_modes_of_the_model() -> None:
    """With a captured backbone in training mode its dropout would have kept the two from being trained side by side."""
    job = load(frozen().double(), inputs=lambda n, seed: _double(BATCHES[seed], n), loss="cross_entropy", batch=8)
    found = held(job, plan(dp=2, blocks=2), samples=8)
    assert found.same
    assert "not trained" not in found.where


def _double(batch: tuple[torch.Tensor, torch.Tensor], samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0][:samples].double(), batch[1][:samples]


def test_a_model_that_is_wholly_in_evaluation_mode_is_put_into_training_mode() -> None:
    """As `from_pretrained` gives it."""
    trainer = built(whole().eval())
    own = whole().train()
    assert [trainer.step(batch).loss for batch in BATCHES] == pytest.approx(in_own_loop(own), rel=1e-5)
    assert int(trainer.buffers["1.num_batches_tracked"]) == len(BATCHES)


def test_a_part_that_learns_in_evaluation_mode_is_told() -> None:
    with pytest.warns(UserWarning, match=r"'0': trained in evaluation mode, as the model was given"):
        built(frozen().requires_grad_(True))
