"""The captured model, trained alone, against the user's own: `compare` sees a wrong capture, and no plan hides it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.models import OPTIMIZERS, workload
from trainplan.engine.compare import (
    AGAINST_OWN,
    Difference,
    OneProcess,
    _against_own,
    _own_model,
    compare,
)
from trainplan.engine.exactness import ROUNDING, TOLERANCE, allowed_under, in_double, in_float64
from trainplan.engine.launch import run
from trainplan.engine.oracle import train_alone
from trainplan.errors import ModelError
from trainplan.plan.plan import Plan, plan
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.report.answers import Compared
from trainplan.workload.load import load
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
    captured = capture(skeleton.model, job.inputs(2, 0), job.loss, device="cpu")
    tamper(captured)
    chosen = chosen or plan(dp=2, micro=2, blocks=len(captured.blocks))
    batches = [job.inputs(samples, step) for step in range(3)]
    alone = train_alone(chosen, job, captured, skeleton.materialise(None, 5), batches, 7)
    one = OneProcess(job, skeleton, captured, _own_model(job, skeleton, 5), batches, alone)
    return _against_own(chosen, one, in_float64(chosen, captured))


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


CASTS = f"{Path(__file__).parent / 'cast_models.py'}:build"


def of_file(**options: str) -> tuple[str, Workload, int]:
    """A workload of that file by its name, itself, and how many blocks it has."""
    name = ",".join([CASTS, *(f"{key}={value}" for key, value in options.items())])
    job = load(name)
    return name, job, len(capture(Skeleton(job.build).model, job.inputs(2, 0), job.loss).blocks)


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    ("model", "types", "limit"),
    [
        ("norm", ("float32",), 1e-4),
        ("recurrent", ("float32",), 1e-4),
        ("one_hot", ("float32",), 1e-4),
        ("images", ("float32",), 1e-4),
        ("autocast", ("float32", "bfloat16"), 5e-2),
        ("mixed", ("float32", "bfloat16"), 5e-2),
    ],
)
def test_what_does_not_run_in_float64_is_compared_in_its_own_types(model: str, types: tuple[str, ...], limit: float):
    name, _, blocks = of_file(model=model)
    found = compare(name, plan(dp=2, micro=2, blocks=blocks), steps=2, batch=8)
    assert found.same
    assert {row.what for row in found.differences} >= {"loss", "gradients", "weights", "optimizer", AGAINST_OWN}
    assert found.exactness.types == types
    assert "Double" in found.exactness.why or "double" in found.exactness.why or "Float" in found.exactness.why
    allowed = {row.what: row.allowed for row in found.differences}
    assert allowed == {what: ROUNDING if limit == 1e-4 and what in ("loss", "weights") else limit for what in allowed}
    answer = Compared(found, SimpleNamespace(to_json=dict))
    assert f"both in {' and '.join(types)}, stepped by SGD\nnot in float64: {found.exactness.why}" in str(answer)
    assert answer.to_json()["compared_in"]["types"] == list(types)
    assert answer.to_json()["differences"][0]["allowed"] == found.differences[0].allowed


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    "choices", [{"dp": 2, "bucket": 256}, {"dp": 2, "zero": 1}, {"pp": 2, "micro": 2, "stages": (1,)}], ids=str
)
def test_weights_of_several_types_are_in_no_bucket_together(choices: dict):
    """In 16 bits and in 32: gradients are summed in a tensor of each."""
    name, _, blocks = of_file(model="mixed")
    made = plan(**choices, blocks=blocks)
    found = compare(name, made, steps=2, batch=8)
    assert found.same
    assert found.exactness.types == ("float32", "bfloat16")


@pytest.mark.usefixtures("quick_start")
def test_in_its_own_types_a_wrong_plan_is_still_noticed(monkeypatch: pytest.MonkeyPatch):
    def same_twice(one: Plan, job: Workload, captured: Captured, values, batches, seed: int):
        return train_alone(one, job, captured, values, batches[:1] * 2, seed)

    name, _, blocks = of_file(model="norm")
    monkeypatch.setattr("trainplan.engine.compare.train_alone", same_twice)
    found = compare(name, plan(pp=2, micro=2, stages=(1,), blocks=blocks), steps=2, batch=8)
    assert found.exactness.types == ("float32",)
    assert not found.same


def test_what_runs_in_no_type_is_refused_in_words(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text(FILE.replace("ODD", "return x.float() @ torch.zeros(3, 3)"))
    with pytest.raises(ModelError, match="must have same reduction dim"):
        compare(f"{path}:build", plan(dp=1, blocks=4), steps=1, batch=8)
    # It runs on the samples that plans are made from, and not on as many as are in a batch.
    path.write_text(FILE.replace("ODD", "return x").replace('"mse"', "lambda o, t: (o - t).mean() * [1, 1, 1][len(o)]"))
    with pytest.raises(ModelError, match=r"on the pieces of single.*IndexError"):
        compare(f"{path}:build", plan(dp=1, blocks=4), steps=1, batch=8)


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("loss", ["class_weights", "pos_weight", "closed", "logged"])
@pytest.mark.parametrize("kind", ["dp", "pp"])
def test_losses_with_tensors_and_values_are_the_oracles(loss: str, kind: str):
    name, _, blocks = of_file(loss=loss)
    replicas, pipeline = plan(dp=2, blocks=blocks), plan(pp=2, micro=2, stages=(1,), blocks=blocks)
    found = compare(name, replicas if kind == "dp" else pipeline, steps=2, batch=8)
    assert found.same
    # A module's tensors are in float64, too; those that a function has closed over are the user's.
    assert found.exactness.double == (loss != "closed")


def test_class_weights_weigh_the_parts_of_a_batch():
    """A batch in parts has the gradient of the whole: torch's mean is over the weights of the labels."""
    _, job, blocks = of_file(loss="class_weights")
    job = in_double(job)
    skeleton = Skeleton(job.build)
    captured = capture(skeleton.model, job.inputs(2, 0), job.loss, device="cpu")
    batches = [job.inputs(8, step) for step in range(2)]
    whole, parts = (
        train_alone(chosen, job, captured, skeleton.materialise(None, 5), batches, 7)
        for chosen in (plan(blocks=blocks), plan(dp=2, micro=4, blocks=blocks))
    )
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    torch.testing.assert_close(parts.gradients, whole.gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("quick_start")
def test_a_loss_that_looks_at_values_sees_those_of_every_micro_batch(tmp_path: Path):
    name, _, blocks = of_file(loss="logged")
    result = run(name, plan(micro=2, blocks=blocks), steps=3, batch=8, out=tmp_path, show=False, verified=True)
    seen = re.findall(r"the loss saw ([\d.]+)", (tmp_path / "rank-0.log").read_text())
    assert len(seen) == 6
    assert len(set(seen)) > 3  # real ones
    assert result.losses[0] == pytest.approx(sum(map(float, seen[:2])) / 2, rel=1e-2)
