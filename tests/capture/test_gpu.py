"""On a CUDA device: capture there, or capture without a device and run there; compiled blocks; randomness."""

from __future__ import annotations

import copy

import pytest
import torch

from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.verify import verify

from .cases import CASES, NAMES

pytestmark = pytest.mark.gpu


def _on_gpu(batch):
    move = torch.utils._pytree.tree_map_only
    batch.args, batch.kwargs, batch.targets = move(
        torch.Tensor, lambda tensor: tensor.cuda(), (batch.args, batch.kwargs, batch.targets)
    )
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_the_gpu_is_captured_and_verified(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().cuda()
    chain = capture(model, _on_gpu(case.batch(4, 0)), case.loss)
    assert chain.exported.device.type == "cuda"
    assert verify(chain, model, _on_gpu(case.batch(5, 1)), case.loss) < 1e-4


# "oddities" says autocast("cpu") in so many words; captured on the CPU that means "here", on a GPU it means nothing.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "oddities"])
def test_what_was_captured_without_a_device_runs_on_the_gpu(name):
    case = CASES[name]
    skeleton = Skeleton(case.build)
    chain = capture(skeleton.model, case.batch(4, 0), case.loss)
    torch.manual_seed(3)
    model = case.build().cuda()
    batch = _on_gpu(case.batch(3, 1))
    stage = chain.stage(0, len(chain.blocks))
    stage.bind(skeleton.materialise(set(stage.holds), 3, "cuda"), "cuda")
    values = values_of(model)
    own = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    assert all(torch.equal(own[key].cpu(), values[key].detach().cpu()) for key in own)
    torch.manual_seed(4)
    _, output = stage({}, batch)
    torch.manual_seed(4)
    expected = case.loss.function(copy.deepcopy(model)(*batch.args, **batch.kwargs), batch.targets)
    torch.testing.assert_close(case.loss.function(output, batch.targets), expected, rtol=1e-4, atol=1e-5)


def test_compiled_blocks_give_the_same():
    case = CASES["resnet"]
    torch.manual_seed(0)
    model = case.build().cuda()
    batch = _on_gpu(case.batch(8, 0))
    chain = capture(model, batch, case.loss)
    plain = chain.stage(0, 3).bind(values_of(model))
    compiled = chain.stage(0, 3).bind(values_of(model)).compiled()
    with plain.buffers_kept():
        expected, _ = plain({}, batch)
    found, _ = compiled({}, batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
