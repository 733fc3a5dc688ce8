"""What is written down of an operator: its shape, its layout, its FLOPs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainplan.profile.attention import Asked, Gpu, attention
from trainplan.profile.device.families import convolution_flops
from trainplan.profile.on_gpu import OnGpu
from trainplan.profile.operators import Recorder


def recorded(work):
    with Recorder(gpu=True) as recorder:
        work()
    return {op.name: op for op in recorder.ops}


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_convolution_and_its_backward_pass(groups):
    layer = nn.Conv2d(16, 32, (3, 1), stride=2, groups=groups)
    ops = recorded(lambda: layer(torch.zeros(4, 16, 9, 9, requires_grad=True)).sum().backward())
    shape = (4, 16, 32, 4 * 5, 3, 2, groups)
    forward = 2.0 * 4 * 20 * 3 * (16 // groups) * 32
    assert (ops["convolution"].shape, ops["convolution"].flops) == (shape, forward)
    assert (ops["convolution_backward"].shape, ops["convolution_backward"].flops) == (shape, 2 * forward)
    assert convolution_flops(shape) == forward


def test_a_transposed_convolution_has_the_shape_of_the_one_that_it_turns_round():
    ops = recorded(lambda: nn.ConvTranspose2d(8, 16, 2, stride=2)(torch.zeros(4, 8, 5, 5)))
    assert ops["convolution"].shape == (4, 16, 8, 25, 4, 2, 1)
    assert ops["convolution"].flops == convolution_flops(ops["convolution"].shape)


def test_the_three_products_of_a_linear_layer_have_three_layouts():
    layer, given = nn.Linear(8, 6, bias=False, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)
    given.requires_grad_()
    with Recorder(gpu=True) as recorder:
        layer(given).backward(torch.zeros(4, 6, dtype=torch.bfloat16))
    products = [op for op in recorder.ops if op.name == "mm"]
    assert {(op.layout, op.shape) for op in products} == {("nt", (4, 8, 6)), ("nn", (4, 6, 8)), ("tn", (6, 4, 8))}
    assert {op.precision for op in products} == {"bf16"}
    assert {op.elements for op in products} == {48}


def test_attention_norms_and_pooling():
    q = torch.zeros(2, 3, 16, 8, requires_grad=True)
    ops = recorded(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    assert ops["attention"].shape == ops["attention_backward"].shape == (6, 16, 16, 8)
    assert ops["attention_backward"].flops == 2.5 * ops["attention"].flops == 2.5 * 4 * 6 * 16 * 16 * 8
    normed = recorded(lambda: nn.BatchNorm2d(4)(torch.zeros(2, 4, 8, 8, requires_grad=True)).sum().backward())
    assert {op.shape for name, op in normed.items() if "batch_norm" in name} == {(2 * 64, 4, 64)}
    pooled = recorded(lambda: F.max_pool2d(torch.zeros(1, 1, 8, 8), 3, stride=1))
    assert pooled["max_pool2d_with_indices"].shape == (9,)


def test_an_rms_norm_is_one_kernel_on_a_gpu():
    norm, given = nn.RMSNorm(8), torch.zeros(4, 8, requires_grad=True)
    with OnGpu(), Recorder(gpu=True) as recorder:
        norm(given).sum().backward()
    assert [op.name for op in recorder.ops if "norm" in op.name] == ["native_layer_norm", "native_layer_norm_backward"]
    assert not {"pow", "rsqrt", "mul"} & {op.name for op in recorder.ops}
    assert {op.shape for op in recorder.ops if "norm" in op.name} == {(8,)}


@pytest.mark.parametrize(("version", "kept"), [((2, 11), torch.bfloat16), ((2, 12), torch.float32)])
def test_autocast_runs_an_rms_norm_in_fp32_since_2_12(version, kept):
    norm, given = nn.RMSNorm(8).bfloat16(), torch.zeros(4, 8, dtype=torch.bfloat16)
    with OnGpu(torch.bfloat16, Gpu(torch=version)):
        assert norm(given).dtype is kept


def test_what_the_memory_efficient_kernel_writes_lies_token_by_token():
    query = torch.zeros(5, 2, 3, 4).permute(1, 2, 0, 3)  # in memory: tokens, samples, heads, width
    out = attention(Asked(query, query, query), Gpu(any_width=True))
    assert out.shape == query.shape
    assert out.transpose(1, 2).is_contiguous()
