"""Blocks are layers, under the names of their modules; crossings, constants, parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.workload.load import load
from trainplan.workload.workload import Batch

from .cases import CASES, NAMES, built, captured
from .models import ResNet, UNet, Wrapped

BLOCKS = {
    "resnet": ["conv1", *(f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)), "fc"],
    "mobilenet": ["features.0", "features.1", "features.2", "features.3", "features.4", "classifier.1"],
    "vgg": [f"features.{i}" for i in (0, 4, 8, 11, 15, 18, 22, 25)] + [f"classifier.{i}" for i in (0, 3, 5)],
    "unet": [
        "down1.conv1", "down1.conv2", "down2.conv1", "down2.conv2", "middle.conv1", "middle.conv2",
        "up2", "dec2.conv1", "dec2.conv2", "up1", "dec1.conv1", "dec1.conv2", "head",
    ],
    "gpt": ["tokens", "layers.0", "layers.1", "layers.2", "head"],
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"],
    "bert": [
        "bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1",
        "cls.predictions.transform", "cls.predictions.decoder",
    ],
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"],
    "t5": [
        "encoder.embed_tokens", "encoder.block.0", "encoder.block.1",
        "decoder.embed_tokens", "decoder.block.0", "decoder.block.1", "lm_head",
    ],
}  # fmt: skip


def test_hugging_face_models_are_among_the_cases():
    pytest.importorskip("transformers")
    assert {"gpt2", "llama", "bert", "vit", "t5"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name in NAMES])
def test_blocks_are_layers_by_their_names(name):
    assert [block.name for block in captured(name).blocks] == BLOCKS[name]


def test_a_wrapped_model_has_the_same_blocks():
    batch = CASES["unet"].batch(4, 0)
    blocks = [block.name for block in capture(Wrapped(Wrapped(UNet())), batch).blocks]
    assert blocks == [f"inner.inner.{name}" for name in BLOCKS["unet"]]


def test_a_deep_model_has_a_block_for_each_layer():
    chain = capture(ResNet((3, 8, 36, 3), width=2), CASES["resnet"].batch(2, 0))
    assert len(chain.blocks) == 52


ZOO = {
    "resnet18:cifar10": 10,
    "vgg11:imagenet": 11,
    "mobilenet_v2:cifar10": 20,
    "gpt:layers=24,hidden=64,heads=4,seq=32,vocab=99": 26,
}


@pytest.mark.parametrize("name", list(ZOO))
def test_models_of_the_zoo_have_as_many_blocks_as_layers(name):
    workload = load(name)
    chain = capture(Skeleton(workload.build).model, workload.inputs(2, 0), workload.loss)
    assert len(chain.blocks) == ZOO[name]
    assert len(chain.crossings) == len(chain.blocks) - 1


@pytest.mark.parametrize("name", NAMES)
def test_blocks_hold_exactly_what_the_model_holds(name):
    chain, model = captured(name), built(name)
    held = {n for block in chain.blocks for n in block.holds}
    assert {n for n in held if n in dict(model.named_parameters())} == {n for n, _ in model.named_parameters()}
    assert {n for n, _ in model.named_buffers()} <= held
    for use in chain.parameters:
        assert use.blocks == tuple(i for i, block in enumerate(chain.blocks) if use.name in block.holds)
    state = {}
    for index in range(len(chain.blocks)):
        state |= chain.stage(index, index + 1).state_dict()
    aliases = {alias for use in (*chain.parameters, *chain.buffers) for alias in use.held.aliases}
    assert set(state) == set(model.state_dict()) - aliases


@pytest.mark.parametrize("name", NAMES)
def test_crossings_join_the_blocks_and_tell_their_size(name):
    chain = captured(name)
    last = len(chain.blocks) - 1
    for crossing in chain.crossings:
        assert crossing.producer < crossing.consumers[0] <= crossing.consumers[-1] <= last
        assert crossing.name in chain.blocks[crossing.producer].makes
        assert all(crossing.name in chain.blocks[b].reads for b in crossing.consumers)
    model = built(name)
    for samples in (3, 5):
        stage = chain.stage(0, last).bind(values_of(model))
        made, _ = stage({}, CASES[name].batch(samples, 1))
        sizes = {c.name: c for c in chain.crossings}
        for crossing, tensor in made.items():
            known = sizes[crossing]
            assert known.shape.at(samples) == tuple(tensor.shape)
            assert known.bytes_per_sample * samples + known.fixed_bytes == tensor.nbytes
            assert (known.shape.dtype, known.needs_grad) == (tensor.dtype, tensor.requires_grad)


def test_a_long_skip_goes_straight_to_its_reader():
    chain = captured("unet")
    names = [block.name for block in chain.blocks]
    skips = {(names[c.producer], tuple(names[b] for b in c.consumers)) for c in chain.crossings}
    assert ("down1.conv2", ("down2.conv1", "up1")) in skips
    assert ("down2.conv2", ("middle.conv1", "up2")) in skips


def test_an_output_made_early_is_read_by_the_last_block():
    chain = captured("dict")
    early = next(c for c in chain.crossings if c.producer == 1)
    assert early.consumers == (len(chain.blocks) - 1,)


def test_masks_and_positions_do_not_cross():
    for name in [name for name in ("gpt", "gpt2", "llama", "bert") if name in NAMES]:
        chain = captured(name)
        assert all(c.needs_grad and c.shape.dtype.is_floating_point for c in chain.crossings), name
        assert len(chain.crossings) == len(chain.blocks) - 1
    assert captured("gpt").blocks[2].inputs == ()


def test_tied_unused_and_frozen_parameters_are_known():
    chain = captured("gpt")
    assert [(use.name, use.blocks, use.held.aliases) for use in chain.tied] == [
        ("tokens.weight", (0, 4), ("head.weight",))
    ]
    assert chain.unused == ("layers.0.unused.weight", "layers.0.unused.bias")
    assert "layers.0.unused.weight" in chain.blocks[1].holds  # kept by the first block of its module
    frozen = {use.name for use in chain.parameters if not use.held.trainable}
    assert frozen == {"layers.1.up.weight", "layers.1.up.bias"}


def test_parts_of_the_output_that_the_loss_does_not_read_stay_where_they_are():
    pytest.importorskip("transformers")
    assert captured("t5").dropped_outputs  # the encoder's hidden states
    assert not captured("gpt2").dropped_outputs  # logits: the last block has them anyway
    assert captured("llama").blocks[2].inputs == ("attention_mask",)


class Pair(nn.Module):
    """A batch norm that is called twice: its running statistics tie its two places together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


def test_no_cut_separates_two_uses_of_a_buffer_that_is_written():
    chain = capture(Pair(), Batch(3, (torch.randn(3, 4),)))
    assert [block.name for block in chain.blocks] == ["a", "b", "c"]
    assert [block.writes for block in chain.blocks if block.writes] == [
        ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    ]


class WriteIntoBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x[:, 0] = 0
        return self.b(torch.relu(self.a(x)) + x)


def test_forward_may_write_into_the_batch_and_the_batch_stays():
    model, x = WriteIntoBatch(), torch.randn(3, 4)
    chain = capture(model, Batch(3, (x.clone(),)))
    stage = chain.stage(0, len(chain.blocks)).bind(values_of(model))
    batch = Batch(3, (x.clone(),))
    _, output = stage({}, batch)
    assert torch.equal(batch.args[0], x)
    assert torch.equal(output, model(x.clone()))


class SharedPart(nn.Module):
    """One module under two names, with a plain tensor attribute; channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.one.scale = torch.tensor(0.5)
        self.two = self.one

    def forward(self, x):
        return (self.two(torch.relu(self.one(x))) * self.one.scale).flatten(1).sum(1)


def test_a_module_with_two_names_and_another_memory_format():
    model, x = SharedPart(), torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)
    chain = capture(model, Batch(3, (x,)))
    assert {use.name: use.held.aliases for use in chain.parameters} == {
        "one.weight": ("two.weight",),
        "one.bias": ("two.bias",),
    }
    assert isinstance(model.one.__dict__["scale"], torch.Tensor)  # as it was
    assert "scale" not in dict(model.named_buffers())
    stages = [chain.stage(b, b + 1).bind(values_of(model)) for b in range(len(chain.blocks))]
    crossings: dict[str, torch.Tensor] = {}
    for stage in stages:
        made, output = stage({name: crossings[name] for name in stage.reads}, Batch(3, (x,)))
        crossings |= made
    assert torch.equal(output, model(x))
