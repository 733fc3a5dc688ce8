"""The chain is the model: same loss, output, gradients and buffers, wherever it is cut and for any batch size."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.verify import named_leaves, run_split

from .cases import CASES, NAMES, built, captured, in_type

DOUBLE = torch.float64
# Where a model computes in float32 or bfloat16 inside, whatever its own type is.
LOOSE = {"llama": 1e-5, "t5": 1e-5, "oddities": 1e-5}


def eager(model: nn.Module, batch, loss, seed: int):
    torch.manual_seed(seed)
    output = model(*batch.args, **batch.kwargs)
    value = loss.function(output, batch.targets)
    value.backward()
    return value, output


def stages_of(chain, model: nn.Module) -> list[Stage]:
    """Every block a stage of its own, on copies of the model's values; a tied weight is one parameter in all."""
    values = {
        name: nn.Parameter(v.detach().clone(), v.requires_grad) if isinstance(v, nn.Parameter) else v.detach().clone()
        for name, v in values_of(model).items()
    }
    return [chain.stage(b, b + 1).bind(values) for b in range(len(chain.blocks))]


def assert_same(stages: list[Stage], model: nn.Module, found, expected, tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0].detach(), rtol=tolerance, atol=0)
    assert type(found[1]) is type(expected[1])
    ours, theirs = dict(named_leaves(found[1])), dict(named_leaves(expected[1]))
    assert len(theirs) == len(ours) + len(stages[0].captured.dropped_outputs)
    for place, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[place], rtol=tolerance, atol=tolerance)
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        want, have = parameter.grad, gradients.pop(name)
        if want is None or have is None:
            assert want is have or (want if have is None else have).abs().max() == 0, name
        else:
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance * largest, msg=name)
    assert not gradients
    buffers = {name: b for stage in stages for name, b in stage.named_buffers()}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_alone_and_random_legal_cuts_give_the_models_step(name):
    case, chain = CASES[name], captured(name, DOUBLE)
    model = built(name, DOUBLE)
    dice = random.Random(name)
    for trial, samples in enumerate((4, 7, 3)):  # other batch sizes than the one it was captured with
        cut = chain if trial == 0 else chain.recut(cuts=dice.sample(chain.legal_cuts, dice.randint(1, 6)))
        whole, batch = copy.deepcopy(model), in_type(case.batch(samples, trial), DOUBLE)
        stages = stages_of(cut, whole)
        torch.manual_seed(trial)
        found = run_split(stages, batch, case.loss)
        expected = eager(whole, batch, case.loss, trial)
        assert_same(stages, whole, found, expected, LOOSE.get(name, 1e-9))


@pytest.mark.parametrize("name", [n for n in ("resnet", "unet", "gpt", "oddities", "t5") if n in NAMES])
def test_a_cut_at_every_legal_place_at_once(name):
    case, chain = CASES[name], captured(name, DOUBLE).recut("operator")
    whole, batch = built(name, DOUBLE), in_type(case.batch(5, 9), DOUBLE)
    stages = stages_of(chain, whole)
    torch.manual_seed(2)
    found = run_split(stages, batch, case.loss)
    assert_same(stages, whole, found, eager(whole, batch, case.loss, 2), LOOSE.get(name, 1e-9))


def test_a_batch_of_one_sample():
    for name in [name for name in ("gpt", "dict", "bert") if name in NAMES]:
        case, whole = CASES[name], built(name, DOUBLE)
        batch = in_type(case.batch(1, 3), DOUBLE)
        stages = stages_of(captured(name, DOUBLE), whole)
        torch.manual_seed(2)
        found = run_split(stages, batch, case.loss)
        assert_same(stages, whole, found, eager(whole, batch, case.loss, 2), 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_legal_cuts_are_most_and_not_all(name):
    chain = captured(name, DOUBLE)
    share = len(chain.legal_cuts) / (chain.operators - 1)
    assert 0.5 < share <= 1, share
    if name in ("resnet", "mobilenet", "vgg", "unet"):  # in-place activations and running statistics
        assert share < 0.95


def test_a_stage_is_seeded_before_each_block_that_draws():
    case, chain, model = CASES["gpt"], captured("gpt"), built("gpt")
    drawing = [index for index, block in enumerate(chain.blocks) if block.random]
    assert drawing == [0, 1, 2, 3]
    batch = case.batch(4, 0)
    order: list[int] = []

    def seed(block: int) -> None:
        order.append(block)
        torch.manual_seed(100 + block)

    def loss_of(stages) -> Tensor:
        return run_split(stages, batch, case.loss, seed)[0]

    whole = [chain.stage(0, 5).bind(values_of(model))]
    parts = [chain.stage(a, b).bind(values_of(model)) for a, b in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(loss_of(whole), loss_of(parts), rtol=0, atol=0)
    assert order == drawing * 2
