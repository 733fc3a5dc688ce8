"""Saved bytes against the allocator, closed forms, and storages that several tensors share."""

import pytest
import torch
from torch import nn

from trainplan.profile.attention import Gpu
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.memory import Saved, watch
from trainplan.profile.subject import Subject
from trainplan.profile.trace import trace
from trainplan.workload.load import load

from . import models

CPU = torch.device("cpu")


def saved_by(forward, *apart):
    saved = Saved(apart)
    made = {}
    with saved.block(0, lambda: made):
        made.update(forward())
    return saved


def test_a_storage_counts_once_however_many_tensors_share_it():
    x = torch.ones(100, requires_grad=True)

    def forward():
        y = x * 2  # saves nothing but a constant
        return {"z": (y * y).view(10, 10).sin()}  # y twice, and y*y through a view

    saved = saved_by(forward, x)
    assert saved.inside == {0: 400 + 400}
    assert saved.by == {"z": set()}


def test_what_the_model_and_the_batch_own_does_not_count():
    weight, x = torch.ones(10, 10, requires_grad=True), torch.ones(5, 10)
    assert saved_by(lambda: {"y": x @ weight}, weight, x).inside == {0: 0}
    assert saved_by(lambda: {"y": x @ weight}, weight).inside == {0: 200}


def test_a_crossing_that_its_maker_saves_is_noted_and_not_counted():
    x = torch.ones(100, requires_grad=True)
    saved = saved_by(lambda: {"y": x.exp()}, x)
    assert saved.inside == {0: 0}
    assert saved.by == {"y": {0}}


def test_the_rest_of_a_storage_that_a_crossing_keeps_alive_counts():
    x = torch.ones(100, requires_grad=True)
    saved = saved_by(lambda: {"y": x.exp()[:25]}, x)
    assert saved.inside == {0: 300}
    assert saved.by == {"y": {0}}


def test_the_watch_sees_a_moment_inside_an_operator():
    with watch(CPU) as seen:
        with seen.part("a"):
            kept = torch.ones(1000)
            torch.ones(5000)
        with seen.part("b"):
            more = torch.ones(2000)
    assert (seen.levels["a"].start, seen.levels["a"].peak, seen.levels["a"].end) == (0, 24_000, 4_000)
    assert (seen.levels["b"].start, seen.levels["b"].end) == (4_000, 12_000)
    assert kept.numel() + more.numel() == 3000


@pytest.mark.parametrize("name", ["resnet18:cifar10", "vgg11:mnist", "mobilenetv2:cifar10", models.GPT])
def test_saved_bytes_are_what_the_allocator_has_after_forward(name):
    """On real tensors and on fake ones alike."""
    workload = load(name)
    torch.manual_seed(0)
    model = workload.build()
    captured = capture(model, workload.inputs(2, 0), workload.loss)
    subject = Subject(captured, workload, CPU)
    stage = subject.stage(0, len(captured.blocks), values_of(model))
    batch, walk = subject.batch(2), subject.walk(2)
    saved = Saved(subject.apart(stage, 2))
    for index in subject.blocks:
        with saved.block(index, lambda i=index: walk.graphs[i].made):
            walk.forward(stage, index)
        walk.leave(index)
    with watch(CPU) as seen, seen.part("forward"):
        _, output = stage({}, batch)
        loss = workload.loss.function(output, batch.targets)
        del output
    assert loss.requires_grad  # what backward needs is alive
    inside = sum(saved.inside.values())
    crossing = sum(c.shape.bytes(2) for c in captured.crossings if saved.by.get(c.name))
    assert inside + crossing == pytest.approx(seen.levels["forward"].end, rel=0.001)

    traced = trace(captured, workload, 2)
    assert [block.saved_bytes for block in traced.blocks] == [saved.inside[index] for index in subject.blocks]
    assert traced.saved_by == {name: tuple(sorted(blocks)) for name, blocks in saved.by.items()}


def test_closed_forms_of_a_linear_layer():
    """2·m·n FLOP a sample forward and twice that backward; its input is saved, its output is not."""
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    workload = models.of(model, (20,))
    captured = capture(workload.build(), workload.inputs(2, 0), workload.loss)
    traced = trace(captured, workload, 6)
    assert sum(block.flops for block in traced.blocks) == 6 * 2 * (20 * 30 + 30 * 4)
    backward = sum(op.flops for block in traced.blocks for op in block.backward)
    # No gradient for the model's input.
    assert backward == 6 * 2 * (20 * 30 + 2 * 30 * 4)
    # The output of relu, and the loss's log-probabilities and the sum of its weights.
    kept = sum(block.saved_bytes for block in traced.blocks)
    kept += sum(c.shape.bytes(6) for c in captured.crossings if traced.saved_by[c.name])
    assert kept == 4 * 6 * 30 + 4 * 6 * 4 + 4


def test_attention_is_counted_and_dropout_on_a_gpu_keeps_one_byte():
    workload = load(f"{models.GPT},dropout=0.1")
    captured = capture(workload.build(), workload.inputs(2, 0), workload.loss)
    on_cpu, on_gpu = trace(captured, workload, 2), trace(captured, workload, 2, gpu=Gpu())
    length, hidden, layers, vocabulary = 64, 64, 2, 500
    products = layers * 24 * length * hidden**2 + 2 * length * hidden * vocabulary
    attention = layers * 4 * length**2 * hidden
    assert sum(block.flops for block in on_gpu.blocks) == 2 * (products + attention)
    assert sum(block.flops for block in on_cpu.blocks) == 2 * (products + attention)
    elements = 2 * length * hidden
    # Two masks a layer; and on a CPU attention with dropout keeps its scores, which a GPU's kernel does not.
    layer = 1
    assert on_cpu.blocks[layer].saved_bytes - on_gpu.blocks[layer].saved_bytes >= 2 * 3 * elements
    assert not any(op.name == "bernoulli_" for block in on_gpu.blocks for op in block.forward)
