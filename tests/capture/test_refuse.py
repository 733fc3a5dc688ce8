"""What cannot be captured is refused, with the reason and the module's name; nothing is left behind."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.verify import verify
from trainplan.profile.structure import structure
from trainplan.workload.load import load
from trainplan.workload.workload import Batch, Loss

from .verified import captured_and_verified

BATCH = Batch(4, (torch.randn(4, 6),), {}, torch.randint(0, 6, (4,)))
LOSS = Loss(nn.functional.cross_entropy, lambda batch: batch.samples)


class Net(nn.Module):
    """Two layers and something odd between them, in a module called `middle.odd`."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = nn.Module()
        self.middle.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle.odd(self.first(x)))


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if x.mean().item() > 0.5 else 2)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Straight.apply(x)


class PythonDice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class NumpyDice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class Hook(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return x


class Remembers(nn.Module):
    state = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = x if self.state is None else self.state + x
        return x


class GrowingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return x


REFUSED = [
    (Branch, "middle.odd", "depends on the values"),
    (Item, "middle.odd", "depends on the values"),
    (Custom, "middle.odd", "_Straight.*drops its backward"),
    (PythonDice, "middle.odd", "Python's random"),
    (NumpyDice, "middle.odd", "numpy.random"),
    (Hook, "middle.odd", "tensor hook"),
    (Remembers, "middle.odd", "'state'.*keeps a tensor"),
    (GrowingBuffer, "middle.odd", "'seen'.*replaces it"),
]


@pytest.mark.parametrize(("odd", "module", "why"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_refused_with_reason_and_module(odd, module, why):
    model = Net(odd())
    before = {name: value.clone() for name, value in values_of(model).items()}
    with pytest.raises(ModelError, match=why) as refusal:
        capture(model, BATCH)
    assert module in str(refusal.value)
    assert refusal.value.instead
    assert torch.is_grad_enabled()
    after = values_of(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(value.is_meta for value in after.values())


class Embeds(nn.Module):
    def __init__(self, kind: type[nn.Embedding | nn.EmbeddingBag], trained: bool = True) -> None:
        super().__init__()
        self.table = kind(6, 6, sparse=True).requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.zeros_like(x[:, :1], dtype=torch.long)).flatten(1)


UNTRAINABLE = [
    (lambda: nn.BatchNorm1d(6, momentum=None), r"middle\.odd' \(BatchNorm1d\).*how many batches.*Try momentum=0\.1"),
    (lambda: nn.SyncBatchNorm(6), r"middle\.odd' \(SyncBatchNorm\).*own micro-batches.*Try nn\.BatchNorm1d"),
    (lambda: Embeds(nn.Embedding), r"middle\.odd\.table' \(Embedding\).*gradient is sparse.*Try sparse=False"),
    (lambda: Embeds(nn.EmbeddingBag), r"middle\.odd\.table' \(EmbeddingBag\).*Try sparse=False"),
    (lambda: nn.LazyLinear(6), r"middle\.odd' \(LazyLinear\): it is lazy.*Try running one batch"),
]


@pytest.mark.parametrize(("odd", "message"), UNTRAINABLE)
def test_a_module_that_no_plan_trains_is_refused_by_name(odd, message):
    with pytest.raises(ModelError, match=message):
        capture(Net(odd()), BATCH)
    with pytest.raises(ModelError, match=message):  # before anybody asks for shapes
        Skeleton(lambda: Net(odd()))


@pytest.mark.parametrize(
    "odd",
    [
        lambda: nn.BatchNorm1d(6, momentum=None).eval(),
        lambda: nn.BatchNorm1d(6, momentum=None, track_running_stats=False),
        lambda: nn.SyncBatchNorm(6).eval(),
        lambda: Embeds(nn.Embedding, trained=False),
    ],
)
def test_it_is_not_where_it_does_nothing_of_that(odd):
    assert captured_and_verified(Net(odd()), BATCH, LOSS)[1] < 1e-6


def test_a_module_backward_hook_is_refused():
    model = Net(nn.Tanh())
    model.middle.odd.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(ModelError, match=r"middle\.odd"):
        capture(model, BATCH)


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 6) + torch.zeros(4, 1)


def test_a_batch_size_in_the_code_is_refused():
    with pytest.raises(ModelError, match="batch size"):
        capture(Net(FixedBatch()), BATCH)


def test_a_batch_of_one_sample_cannot_be_the_example():
    with pytest.raises(ModelError, match="2 samples or more"):
        capture(Net(nn.Tanh()), Batch(1, (torch.randn(1, 6),)))


def test_a_batch_without_samples_first_is_refused():
    with pytest.raises(ModelError, match="first dimension"):
        capture(Net(nn.Tanh()), Batch(4, (torch.randn(3, 6),)))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(7, 7)


def test_an_error_of_the_model_names_the_module():
    with pytest.raises(ModelError, match=r"middle\.odd") as refusal:
        capture(Net(Broken()), BATCH)
    assert "shapes" in refusal.value.instead  # and not "dp": it goes through the same capture
    assert "do not cut" not in str(refusal.value)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ModelError, match="depends on a parameter"):
        capture(NoParameters(), BATCH)


class Checkpointed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sequential":
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)
        if self.way == "saved on the CPU":
            with torch.autograd.graph.save_on_cpu():
                return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.way == "re-entrant")


@pytest.mark.parametrize("way", ["plain", "re-entrant", "sequential", "saved on the CPU"])
def test_checkpointed_regions_are_captured_and_told(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured, difference = captured_and_verified(Net(Checkpointed(way)), BATCH, LOSS)
    assert difference < 1e-6
    assert captured.verified
    (note,) = captured.notes  # though torch puts the wrappers of several regions around it
    own = "way to save tensors for backward" if way == "saved on the CPU" else "checkpointing"
    assert note.startswith(f"its own {own} is not kept (first in module 'middle.odd'): all is saved")
    assert "unless the plan says recompute=full" in note
    assert capture(Net(nn.Dropout(0.3)), BATCH, LOSS).notes == ()


class Cheat(nn.Module):
    """Traces as one thing and runs as another: only a comparison finds it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_exporting() else x * 1.5


def test_verify_finds_what_tracing_does_not_see():
    model = Net(Cheat())
    with pytest.raises(ModelError, match=r"eager: .*(loss|output|gradient)"):
        captured_and_verified(model, BATCH, LOSS)


class WrongGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_exporting() else x * 2 - x.detach()


def test_verify_finds_a_wrong_gradient_and_names_the_parameter():
    with pytest.raises(ModelError, match=r"gradient of first\.weight"):
        captured_and_verified(Net(WrongGradient()), BATCH, LOSS)


class WrongBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.count += 1
        return x


def test_verify_finds_a_buffer_that_is_not_updated():
    with pytest.raises(ModelError, match=r"buffer middle\.odd\.count"):
        captured_and_verified(Net(WrongBuffer()), BATCH, LOSS)


def test_verify_leaves_model_and_random_state_as_they_were():
    model = Net(nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)))
    model.first.weight.grad = torch.ones(6, 6)
    before = {name: value.clone() for name, value in values_of(model).items()}
    state = torch.get_rng_state()
    captured = capture(model, BATCH, LOSS)
    assert verify(captured, model, BATCH, LOSS) < 1e-6
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    assert torch.equal(model.first.weight.grad, torch.ones(6, 6))
    assert model.last.weight.grad is None


def test_capture_works_and_restores_without_gradients():
    with torch.no_grad():
        captured = capture(Net(nn.Tanh()), BATCH)
        assert not torch.is_grad_enabled()
    assert all(crossing.needs_grad for crossing in captured.crossings)


class LayerDrop(nn.Module):
    """As in many transformers models: a draw that decides whether a layer runs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(6, 6), rate

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.rate:
            return x
        return torch.dropout(self.inner(x), 0.5, self.training)


def test_layer_drop_that_never_drops_is_captured_and_one_that_may_is_refused():
    captured, difference = captured_and_verified(Net(LayerDrop(0.0)), BATCH, LOSS)  # the draw stays: dropout follows it
    assert difference < 1e-6
    assert sum(block.random for block in captured.blocks) >= 1
    with pytest.raises(ModelError, match=r"middle\.odd.*depends on the values"):
        capture(Net(LayerDrop(0.1)), BATCH)


@torch.library.custom_op("trainplan_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 3)  # not the derivative, so that nothing else can be right


class CustomOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(x)


def test_a_custom_operator_keeps_its_backward():
    assert captured_and_verified(Net(CustomOperator()), BATCH, LOSS)[1] < 1e-6


@torch.library.custom_op("trainplan_tests::looking_back", mutates_args=())
def looking_back(x: Tensor, by: Tensor) -> Tensor:
    return x * 2


@looking_back.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x)


looking_back.register_autograd(
    lambda ctx, gradient: (gradient * ctx.by.tolist()[0], None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


class LooksBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return looking_back(x, x.detach()[:, 0])


def test_a_backward_pass_that_looks_at_values_is_refused():
    workload = load(Net(LooksBack()), inputs=(BATCH.args, BATCH.targets), loss="cross_entropy")
    captured = capture(workload.build(), BATCH, workload.loss)
    with pytest.raises(ModelError, match=r"operator trainplan_tests\.looking_back.*going back it needs values"):
        structure(captured, workload, BATCH)


class ShapeByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x.sum(1).abs().nonzero().squeeze(1)
        return torch.zeros_like(x).index_add(0, kept, x[kept])


def test_no_cut_sends_a_tensor_whose_shape_depends_on_values():
    captured, difference = captured_and_verified(Net(ShapeByValue()), BATCH, LOSS, granularity="operator")
    assert difference < 1e-6
    assert all(crossing.shape.at(4)[0] == 4 for crossing in captured.crossings)
    assert len(captured.blocks) < captured.operators


def test_batches_that_are_padded_each_to_its_own_longest_sample_are_refused_before_anything_is_timed():
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum(1)

    def padded(samples: int, seed: int) -> Batch:
        return Batch(samples, (torch.zeros(samples, 4 + seed % 3, 6),), {}, torch.zeros(samples, dtype=torch.long))

    model = Summed()
    captured = capture(model, padded(2, 0), LOSS)
    with pytest.raises(ModelError, match=r"'arg0' is \(2, 5, 6\).* captured for \(2, 4, 6\).*padded to one length"):
        verify(captured, model, padded(2, 0), LOSS, inputs=padded)
