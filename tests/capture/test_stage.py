"""Stages: their values, batches that they refuse, running blocks twice, devices, compilation, evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.verify import verify
from trainplan.workload.workload import Batch

from .cases import CASES, NAMES, built, captured


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_values_is_captured_as_the_real_one_is(name):
    """On a skeleton: same digest, and a stage with materialised values gives bitwise what the model gives."""
    case = CASES[name]
    skeleton = Skeleton(case.build)
    chain = capture(skeleton.model, case.batch(4, 0), case.loss)
    assert chain.digest == captured(name).digest
    middle = len(chain.blocks) // 2
    torch.manual_seed(5)
    model = case.build()
    batch = case.batch(3, 1)
    torch.manual_seed(6)
    expected = case.loss.function(model(*batch.args, **batch.kwargs), batch.targets)
    torch.manual_seed(6)
    crossings: dict[str, torch.Tensor] = {}
    for first, last in ((0, middle), (middle, len(chain.blocks))):
        stage = chain.stage(first, last)
        values = skeleton.materialise(set(stage.holds), 5)
        assert set(values) == set(stage.holds)
        made, output = stage.bind(values)({name: crossings[name] for name in stage.reads}, batch)
        crossings |= made
    assert torch.equal(case.loss.function(output, batch.targets), expected)


def test_a_model_built_on_the_meta_device_is_captured_too():
    case = CASES["gpt"]
    with torch.device("meta"):
        model = case.build()
    chain = capture(model, case.batch(4, 0), case.loss)
    assert chain.digest == captured("gpt").digest


def test_parameters_have_the_names_of_the_model_and_are_shared():
    model, chain = built("gpt"), captured("gpt")
    stage = chain.stage(3, 5).bind(values_of(model))
    own = dict(stage.named_parameters())
    assert own["tokens.weight"] is model.head.weight  # tied: under its first name
    assert own["layers.2.qkv.weight"] is model.layers[2].qkv.weight
    assert set(own) == {n for n, _ in model.named_parameters() if n.startswith(("layers.2.", "norm.", "tokens."))}


def test_a_model_may_have_parts_with_the_names_of_our_own():
    stage = captured("dict").stage(0, 2)
    assert {"first.weight", "side.bias", "mean"} <= set(stage.state_dict())
    assert stage.first == 0


def test_a_missing_or_misshapen_value_is_refused():
    stage = captured("gpt").stage(0, 1)
    with pytest.raises(ModelError, match=r"tokens\.weight"):
        stage.bind({})
    with pytest.raises(ModelError, match=r"\(2,\)"):
        stage.bind({name: torch.zeros(2) for name in stage.holds})
    doubles = {name: value.double() for name, value in values_of(built("gpt")).items()}
    with pytest.raises(ModelError, match="float64"):
        stage.bind(doubles)


def _gated(**changes):
    batch = CASES["dict"].batch(4, 0)
    for key, value in changes.items():
        if key == "args":
            batch.args = value
        elif value is None:
            del batch.kwargs[key]
        else:
            batch.kwargs[key] = value
    return batch


WRONG = {
    "another constant": (_gated(temperature=3.0), "temperature"),
    "another width": (_gated(args=(torch.randn(4, 7),)), "arg0"),
    "another type": (_gated(gate=torch.rand(4, dtype=torch.float64)), "gate"),
    "another number of samples": (_gated(gate=torch.rand(5)), "gate"),
    "an argument less": (_gated(gate=None), "gate"),
    "an argument more": (_gated(mask=torch.ones(4)), "mask"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_batch_that_the_graph_is_not_right_for_is_refused(what):
    batch, named = WRONG[what]
    chain, model = captured("dict"), built("dict")
    stage = chain.stage(0, len(chain.blocks)).bind(values_of(model))
    with pytest.raises(ModelError, match=named):
        stage({}, batch)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("another width", "Try giving 'arg0' the same size in every batch: sequences padded to one length"),
        ("another type", "Try a tensor of torch.float32 for 'gate'"),
        ("another constant", "Try the value that it has in the example"),
        ("an argument more", r"Try an example \(inputs=\) that has it, too, or leaving it out"),
    ],
)
def test_what_to_do_about_such_a_batch_is_in_the_users_hands(what, instead):
    chain = captured("dict")
    with pytest.raises(ModelError, match=instead):
        chain.stage(0, len(chain.blocks)).check(WRONG[what][0])


def test_the_same_tensor_twice_in_the_example_is_two_inputs():
    """labels=input_ids in the example must not make a graph that takes one for the other."""
    pytest.importorskip("transformers")
    case = CASES["gpt2"]
    batch = case.batch(4, 0)
    batch.kwargs["labels"] = batch.kwargs["input_ids"]
    model = built("gpt2").eval()
    chain = capture(model, batch, case.loss)
    stage = chain.stage(0, len(chain.blocks)).bind(values_of(model))
    other = case.batch(3, 1)
    assert torch.equal(stage({}, other)[1].loss, model(**other.kwargs).loss)


def test_a_block_can_be_run_again_without_moving_the_running_statistics():
    model, chain = built("resnet"), captured("resnet")
    stage = chain.stage(0, 2).bind(values_of(model))
    batch = CASES["resnet"].batch(4, 0)
    env: dict[str, torch.Tensor] = {}
    stage.run_block(0, env, batch)
    after = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with stage.buffers_kept():
        again: dict[str, torch.Tensor] = {}
        stage.run_block(0, again, batch)
    assert all(torch.equal(buffer, after[name]) for name, buffer in stage.named_buffers())
    assert all(torch.equal(env[name], again[name]) for name in chain.blocks[0].makes)


def test_what_is_no_longer_read_is_dropped():
    model, chain = built("resnet"), captured("resnet")
    last = len(chain.blocks)
    made, output = chain.stage(0, last).bind(values_of(model))({}, CASES["resnet"].batch(4, 0))
    assert made == {}
    assert output.shape == (4, 10)


def test_a_stage_moves_to_another_device_with_its_code():
    """The meta device stands for any other: constants that forward makes (masks, positions) must follow."""
    for name in [name for name in ("gpt", "oddities", "llama") if name in NAMES]:
        case, chain = CASES[name], captured(name)
        stage = chain.stage(0, len(chain.blocks)).bind(values_of(built(name)))
        stage.to_device("meta")
        batch = case.batch(4, 0)
        batch.args = tuple(value.to("meta") for value in batch.args)
        batch.kwargs = {key: value.to("meta") for key, value in batch.kwargs.items()}
        _, output = stage({}, batch)
        assert {leaf.device.type for leaf in torch.utils._pytree.tree_leaves(output) if leaf is not None} == {"meta"}


def test_evaluation_has_the_same_blocks_and_no_randomness():
    for name in [name for name in ("resnet", "gpt", "bert") if name in NAMES]:
        case, training = CASES[name], captured(name)
        model = built(name).eval()
        chain = capture(model, case.batch(4, 0), case.loss)
        assert [b.name for b in chain.blocks] == [b.name for b in training.blocks]
        assert not any(block.random or block.writes for block in chain.blocks)
        assert verify(chain, model, case.batch(3, 1), case.loss) < 1e-5


def test_a_stage_cannot_be_switched_to_the_mode_that_was_not_captured():
    stage = captured("resnet").stage(0, 2)
    assert stage.train() is stage
    with pytest.raises(ModelError, match=r"model\.eval\(\)"):
        stage.eval()


def test_stages_outside_the_chain_are_refused():
    with pytest.raises(ModelError, match="10 blocks"):
        captured("resnet").stage(3, 11)


def test_an_illegal_cut_is_refused_with_the_nearest_legal_one():
    chain = captured("resnet")
    illegal = next(p for p in range(1, chain.operators) if p not in chain.legal_cuts)
    with pytest.raises(ModelError, match="nearest legal cut"):
        chain.recut(cuts=[illegal])


class Quadratic(nn.Module):
    """A tensor that grows with the square of the batch (contrastive losses)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(torch.softmax(x @ x.T, 1) @ x)


def test_a_tensor_may_grow_faster_than_the_batch():
    model, x = Quadratic(), torch.randn(5, 4)
    chain = capture(model, Batch(3, (torch.randn(3, 4),))).recut("operator")
    stages = [chain.stage(b, b + 1).bind(values_of(model)) for b in range(len(chain.blocks))]
    crossings: dict[str, torch.Tensor] = {}
    for stage in stages:
        made, output = stage({name: crossings[name] for name in stage.reads}, Batch(5, (x,)))
        crossings |= made
    torch.testing.assert_close(output, model(x))
    square = next(c for c in chain.crossings if c.shape.at(5) == (5, 5))
    assert square.shape.bytes(5) == 100
