"""Losses that hold tensors of their own or look at values: planned on shapes, as any other; what cannot be is said."""

import io
from contextlib import redirect_stdout

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.errors import ModelError
from trainplan.profile.attention import Gpu
from trainplan.profile.capture import loss as on_values
from trainplan.profile.capture.captured import capture
from trainplan.profile.listing import listed
from trainplan.profile.structure import structure
from trainplan.profile.trace import trace
from trainplan.workload.load import load
from trainplan.workload.losses import in_type
from trainplan.workload.workload import Batch, Workload

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


class Net(nn.Module):
    """Its second output is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), h


def labels(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6), torch.arange(samples) % 3


def several(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6), torch.ones(samples, 3)


def job(loss, inputs=labels, model: nn.Module | None = None) -> Workload:
    return load(model or Net(), inputs=inputs, loss=loss, batch=8)


class First(nn.Module):
    """A loss of the first output, as a module, so that what it holds is its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return self.inner(output[0], targets)


def closed(output, targets):
    return F.cross_entropy(output[0], targets, weight=WEIGHTS)


def logs(output, targets):
    loss = F.cross_entropy(output[0], targets)
    print(f"loss {loss.item():.3f}")
    return loss


def branches(output, targets):
    mask = targets > 0
    if not mask.any():
        return output[0].sum() * 0.0
    return (F.cross_entropy(output[0], targets, reduction="none") * mask).sum() / mask.sum()


def picks(output, targets):
    mask = targets >= 0
    return F.cross_entropy(output[0][mask], targets[mask])


def counts(output, targets):
    return F.cross_entropy(output[0], targets) * len(targets.tolist()) / len(targets)


def probabilities(output, targets):
    assert bool(((output[0] >= 0) & (output[0] <= 1)).all())
    return (output[0] - targets).square().mean()


LOSSES = {
    "weighted module": (First(nn.CrossEntropyLoss(weight=WEIGHTS)), labels, "meta"),
    "pos_weight": (First(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)), several, "meta"),
    "weighted function": (closed, labels, "fake"),
    "logs": (logs, labels, "real"),
    "branches": (branches, labels, "real"),
    "picks": (picks, labels, "real"),
    "counts": (counts, labels, "real"),
    "probabilities": (probabilities, several, "real"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_planned_on_the_cheapest_tensors_that_it_runs_on(name: str) -> None:
    loss, inputs, kind = LOSSES[name]
    workload = job(loss, inputs)
    before, printed = torch.get_rng_state(), io.StringIO()
    batch = workload.inputs(2, 0)
    captured = capture(workload.build(), batch, workload.loss)
    assert len(captured.unread) == 1  # what it does not read is known
    with redirect_stdout(printed):
        found = structure(captured, workload, batch)
        traced = {gpu: trace(captured, workload, 4, gpu) for gpu in (None, Gpu())}
        operators = listed(workload, 4, Gpu())
    assert printed.getvalue() == ""  # nobody wants to read the loss of made-up outputs
    assert torch.equal(torch.get_rng_state(), before)
    output = [torch.empty(2, 3, device="meta"), torch.empty(2, 6, device="meta")]
    assert on_values.tried(output, batch.targets, workload.loss.function)[0] == kind
    assert [p.name for p in found.parameters] == ["last.bias", "last.weight", "first.bias", "first.weight"]
    assert all(p.trainable for p in found.parameters)
    for one in traced.values():
        assert set().union(*(block.arrivals for block in one.blocks)) == {p.name for p in found.parameters}
    assert operators["backward"]


def test_class_weights_cost_what_they_do_without_values() -> None:
    """The same operators, whether the weights are a module's or a function has closed over them."""
    traces = []
    for loss in (First(nn.CrossEntropyLoss(weight=WEIGHTS)), closed):
        workload = job(loss)
        traces.append(trace(capture(workload.build(), workload.inputs(2, 0), workload.loss), workload, 4))
    assert [b.forward for b in traces[0].blocks] == [b.forward for b in traces[1].blocks]
    assert [b.backward for b in traces[0].blocks] == [b.backward for b in traces[1].blocks]


def test_a_loss_that_needs_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = job(logs)
    captured = capture(workload.build(), workload.inputs(2, 0), workload.loss)
    monkeypatch.setattr(on_values.machine, "free_bytes", lambda device: 100)
    with pytest.raises(ModelError, match=r"looks at values, which need .* may be used.*does not look at values"):
        structure(captured, workload, workload.inputs(2, 0))


def none_reduced(output, targets):
    return F.cross_entropy(output[0], targets, reduction="none")


def cut_off(output, targets):
    return F.cross_entropy(output[0].detach(), targets)


def number(output, targets):
    return F.cross_entropy(output[0], targets).item()


def broken(output, targets):
    return F.cross_entropy(output[0], targets[:1])


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (none_reduced, r"shape \(2,\).*Try its mean"),
        (cut_off, "no gradient leads from it to a parameter"),
        (number, "a float.*a tensor of one number"),
        (broken, r"it raises ValueError: Expected input batch_size \(2\)"),
    ],
)
def test_a_loss_that_nothing_can_be_trained_by_says_why(loss, why) -> None:
    workload = job(loss)
    captured = capture(workload.build(), workload.inputs(2, 0), workload.loss)
    with pytest.raises(ModelError, match=why):
        structure(captured, workload, workload.inputs(2, 0))


def test_a_model_of_which_nothing_is_trained_says_so() -> None:
    workload = job(closed, model=Net().requires_grad_(False))
    captured = capture(workload.build(), workload.inputs(2, 0), workload.loss)
    with pytest.raises(ModelError, match=r"no parameter of it is trained.*requires_grad_\(\)"):
        structure(captured, workload, workload.inputs(2, 0))


def test_the_tensors_of_a_loss_go_where_its_output_is() -> None:
    loss = load(nn.Linear(6, 3), inputs=labels, loss=nn.CrossEntropyLoss(weight=WEIGHTS)).loss
    batch = Batch(2, (torch.zeros(2, 3),), {}, torch.tensor([0, 1]))
    assert loss.function(batch.args[0].to("meta"), batch.targets.to("meta")).is_meta
    assert loss.function(batch.args[0], batch.targets) == pytest.approx(1.0986, rel=1e-4)  # its values are still there
    double = in_type(loss, torch.float64)
    assert double.function(batch.args[0].double(), batch.targets).dtype == torch.float64
    assert loss.function(batch.args[0], batch.targets).dtype == torch.float32


@pytest.mark.gpu
def test_class_weights_go_to_the_gpu() -> None:
    loss = load(nn.Linear(6, 3), inputs=labels, loss=nn.CrossEntropyLoss(weight=WEIGHTS)).loss
    assert loss.function(torch.zeros(2, 3, device="cuda"), torch.tensor([0, 1], device="cuda")).is_cuda
