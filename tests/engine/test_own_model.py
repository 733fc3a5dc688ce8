"""The captured model, trained alone, against the user's own: `compare` sees a wrong capture, and no plan hides it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.models import OPTIMIZERS, workload
from trainplan.engine.compare import (
    AGAINST_OWN,
    TOLERANCE,
    Difference,
    _against_own,
    _own_model,
    allowed_under,
    compare,
)
from trainplan.engine.oracle import train_alone
from trainplan.errors import ModelError
from trainplan.plan.plan import Plan, plan
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.workload.workload import Batch, Loss, Workload


class Norms(nn.Module):
    """Batch norm, whose running statistics are those of the first copy of each stage; a buffer forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x[:, :2]


class RoundsInside(nn.Module):
    """Computes its norm in float32, whatever it is given, as some language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(F.layer_norm(h.float(), (5,)).to(h.dtype) + h)


def _vectors(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, size, generator=generator, dtype=torch.float64) for size in (5, 2))
    return Batch(samples, (x,), {}, y)


def of(model: type[nn.Module], optimizer: str = "adamw") -> Workload:
    loss = Loss(F.mse_loss, lambda batch: batch.samples)
    return Workload(model.__name__, lambda: model().double(), _vectors, loss, OPTIMIZERS[optimizer], 8, 80)


def held(job: Workload, chosen: Plan | None = None, tamper=lambda captured: None, samples: int = 9) -> Difference:
    """The row of `compare` for a workload; `tamper` may spoil its capture first."""
    skeleton = Skeleton(job.build)
    captured = capture(skeleton.model.train(), job.inputs(2, 0), job.loss, device="cpu")
    tamper(captured)
    chosen = chosen or plan(dp=2, micro=2, blocks=len(captured.blocks))
    batches = [job.inputs(samples, step) for step in range(3)]
    alone = train_alone(chosen, job, captured, skeleton.materialise(None, 5), batches, 7)
    return _against_own(chosen, job, captured, _own_model(job, skeleton, 5), alone, batches)


@pytest.mark.parametrize(
    "job",
    [workload("chain", "adamw"), workload("tied", "grouped_sgd", schedule="cosine", clip_norm=0.1), workload("idle")]
    + [of(Norms), of(RoundsInside)],
    ids=lambda job: job.name,
)
def test_a_right_capture_trains_as_the_users_model_does(job):
    found = held(job)
    assert found.what == AGAINST_OWN
    assert found.same
    assert found.allowed == (1e-4 if job.name == "RoundsInside" else 1e-9)


def test_batch_norm_in_two_directions_keeps_the_statistics_of_the_first_copies():
    job = of(Norms, "sgd")
    assert held(job, plan(pp=2, pairs=1, micro=2, schedule="chimera", stages=(1,), blocks=3)).same


def test_pieces_that_the_users_model_does_not_take_are_an_error_that_says_so():
    with pytest.raises(ModelError, match=r"more than 1 value per channel.*fewer micro-batches"):
        held(of(Norms), samples=5)  # dp=2 micro=2: a piece of one sample, which batch norm does not take


def sigmoid_for_tanh(captured: Captured) -> None:
    """One operator of one block is another one now."""
    node = next(n for block in captured.blocks[1:] for n in block.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = torch.ops.aten.sigmoid.default


@pytest.mark.parametrize("job", [workload("chain"), workload("tied", "adamw"), of(Norms)], ids=lambda job: job.name)
def test_a_capture_that_was_tampered_with_is_noticed(job):
    found = held(job, tamper=sigmoid_for_tanh)
    assert not found.same
    assert found.largest > 1e-3


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layers(x), 0.3, self.training)


def test_where_random_numbers_are_drawn_one_batch_is_held_against_it_and_that_is_said():
    found = held(of(Draws))
    assert found.same
    assert "one batch" in found.where
    assert "random" in found.where
    with pytest.raises(ModelError, match="captured model against eager"):
        held(of(Draws), tamper=sigmoid_for_tanh)


FILE = """
import torch
from torch import nn

class Odd(nn.Module):
    n = 0
    def forward(self, x):
        ODD

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.odd = Odd()
    def forward(self, x):
        for layer in self.layers:
            x = self.odd(torch.tanh(layer(x)))
        return x

def inputs(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 8, generator=generator), torch.randn(samples, 8, generator=generator)

def build():
    return {"model": Net(), "inputs": inputs, "loss": "mse", "batch": 8, "optimizer": "sgd", "lr": 0.1}
"""


@pytest.mark.usefixtures("quick_start")
def test_compare_says_that_the_plan_is_right_and_the_capture_wrong(tmp_path: Path):
    # It traces as one thing and runs as another: every process of the plan trains the wrong model, in perfect accord.
    path = tmp_path / "cheat.py"
    path.write_text(FILE.replace("ODD", "return x if torch.compiler.is_exporting() else x * 1.01"))
    found = compare(f"{path}:build", plan(pp=2, micro=2, schedule="gpipe", stages=(2,), blocks=4), steps=2, batch=8)
    rows = {row.what: row for row in found.differences}
    assert not rows.pop(AGAINST_OWN).same
    assert all(row.same for row in rows.values())
    assert not found.same


def test_compare_refuses_a_model_that_counts_its_calls(tmp_path: Path):
    path = tmp_path / "counts.py"
    path.write_text(FILE.replace("ODD", "self.n += 1; return x / 2 if self.n >= 3 else x"))
    with pytest.raises(ModelError, match="'n' in module 'odd'"):
        compare(f"{path}:build", plan(dp=1, blocks=4), steps=4, batch=8)


def test_slices_may_round_where_the_model_itself_does() -> None:
    """Their sums inside a model come in another order; in float64 that is nothing, in float32 it is seen."""

    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).float().double()

    job = workload("chain")
    exact, rounding = (capture(m.double(), job.inputs(2, 0), job.loss) for m in (job.build(), Rounding()))
    sliced = plan(pp=2, schedule="terapipe", slices=(2, 2), stages=(1,), blocks=2)
    assert allowed_under(sliced, exact) == allowed_under(plan(), rounding) == TOLERANCE
    assert 1e-7 < allowed_under(sliced, rounding) < 1e-3
