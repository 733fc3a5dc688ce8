"""A model that does something else than its capture is not trained, whoever asks for it and however it was profiled."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainplan
from trainplan import api
from trainplan.cluster.catalogue import device
from trainplan.engine import verified
from trainplan.engine.job import Job
from trainplan.engine.trainer import Trainer
from trainplan.errors import InputError, ModelError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.verify import verify
from trainplan.profile.estimate import estimate
from trainplan.profile.measure import measure
from trainplan.workload.batch import as_batch
from trainplan.workload.load import load
from trainplan.workload.workload import Loss

EXAMPLE = (torch.randn(2, 4), torch.randn(2, 4))


class Cheat(nn.Module):
    """Traces as one thing and runs as another."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_exporting() else x * 1.5


def built(model: nn.Module, **fields) -> Trainer:
    def descent(parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    return trainplan.build("single", model, nn.functional.mse_loss, descent, inputs=EXAMPLE, batch=4, **fields)


def test_what_traces_as_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="eager"):
        built(nn.Sequential(nn.Linear(4, 4), Cheat()))


class Clamps(nn.Module):
    """Writes into a parameter at every call; where `hidden`, so that neither tracing nor the output shows it."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(4, 4), hidden

    def forward(self, x: Tensor) -> Tensor:
        if not (self.hidden and torch.compiler.is_exporting()):
            with torch.no_grad():
                self.inner.bias.add_(-0.1 * self.inner.bias.sign()).clamp_(-0.1, 0.1)
        return self.inner(x) - (self.inner.bias.detach() if self.hidden else 0)


class Within(nn.Module):
    """Writes into a parameter through another tensor in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.view = self.inner.weight.data

    def forward(self, x: Tensor) -> Tensor:
        self.view.mul_(0.9)
        return self.inner(x)


def own_loop(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(EXAMPLE[0]), EXAMPLE[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clamping() -> nn.Module:
    """Of what the first call settles nothing moves in the next: in place, and into a parameter."""
    return nn.Sequential(nn.Linear(4, 4), Clamps(hidden=False))


def spectral() -> nn.Module:
    """The old one, whose `weight` lies in the memory of the parameter `weight_orig`, and is put anew by forward."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize("make", [clamping, spectral])
def test_parameters_that_forward_touches_are_trained_as_eager_trains_them(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    own = make()
    trainer = built(model)
    assert [trainer.step(EXAMPLE).loss for _ in range(3)] == pytest.approx(own_loop(own, 3), rel=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(trainer.parameters[name], parameter)


def test_a_parameter_that_forward_writes_on_one_side_only_is_noticed_and_left_as_it_was() -> None:
    model = Clamps(hidden=True)
    loss = Loss(nn.functional.mse_loss, lambda batch: batch.samples)
    captured = capture(model, as_batch(EXAMPLE), loss)
    before = model.inner.bias.detach().clone()
    with pytest.raises(ModelError, match=r"the parameter inner.bias after forward"):
        verify(captured, model, as_batch(EXAMPLE), loss)
    assert torch.equal(model.inner.bias, before)


def test_a_parameter_that_is_written_through_another_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"value of 'view'.*memory of a parameter"):
        built(Within())


def test_a_model_is_left_as_it_was_and_trains() -> None:
    """Looking at it draws no random number, and runs its batch norm on a copy."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    trainer = built(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.step((torch.randn(4, 4), torch.randn(4, 4))).loss is not None


def test_a_model_that_the_host_has_no_room_for_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified.machine, "free_bytes", lambda device: 100)
    with pytest.warns(UserWarning, match=r"not held against eager: that needs .* are free"):
        built(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("measured", [False, True])
def test_a_run_is_checked_unless_its_profile_was(tmp_path: Path, measured: bool) -> None:
    """An estimated profile holds nothing against anything; a measured one does."""
    workload = load("gpt:layers=1,hidden=8,heads=1,seq=4,vocab=16,batch=2")
    profile = measure(workload, samples=[1], seconds=0.1) if measured else estimate(workload, device("cpu"))
    assert profile.provenance.verified == measured
    profile.save(tmp_path / "profile.json")
    api.run(
        workload.name, "single", "1xcpu", profile=str(tmp_path / "profile.json"), steps=1, out=str(tmp_path / "run")
    )
    assert Job.load(tmp_path / "run" / "job.json").verified == measured


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo-staged", "cpu"), ("gloo", "cuda")])
def test_a_backend_that_cannot_carry_the_tensors_is_refused(backend: str, device: str) -> None:
    with pytest.raises(InputError, match="backend="):
        built(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend, device=device)
