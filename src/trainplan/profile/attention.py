"""Which kernel attention is on a GPU: the rule by which torch chooses, and what it does around that kernel.

`scaled_dot_product_attention` is one of four things: cudnn's kernel, the flash kernel, the memory-efficient kernel, or
("math") the products and the softmax one by one. torch takes the first that can do it (`select_sdp_backend` in
`ATen/native/transformers/cuda/sdp_utils.cpp`), in an order that depends on the device: cudnn's is the first on Hopper
and on data-centre Blackwell (compute capability 9.x and 10.x), and nowhere else. That is so from torch 2.11 on, whose
wheels have the cudnn (over 9.15) that the rule asks for. So attention in bf16 is cudnn's on an H200, and flash on an
A100; in fp32 it is memory-efficient on both.

A mask whose last dimension is not dense, such as one that was expanded from a single number, none of the kernels reads:
then it is math, though nothing says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kernel = Literal["cudnn", "flash", "efficient", "math"]
aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256  # of a head, at most
_TILE = 8  # numbers: flash pads heads to whole ones, and rows of masks are padded to them for the efficient kernel


def version_of(torch_version: str) -> tuple[int, int]:
    """What matters of a version.

    >>> version_of("2.11.0+cu130")
    (2, 11)
    """
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)


HERE = version_of(torch.__version__)


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as its operators depend on it."""

    capability: tuple[int, int] = (9, 0)  # CUDA's compute capability: of an H200 (9, 0), of an A100 (8, 0)
    torch: tuple[int, int] = HERE  # the version
    any_width: bool = False  # of heads: which widths kernels read depends on the type, and a trace is for all types


@dataclass(frozen=True)
class Asked:
    """What attention is asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False  # several heads of queries may share one of keys

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Asked:  # fmt: skip
        """From the arguments of `scaled_dot_product_attention`."""
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def kernel_of(asked: Asked, gpu: Gpu) -> Kernel:
    """The kernel that torch takes.

    >>> query = torch.empty(2, 4, 32, 64, dtype=torch.bfloat16)
    >>> asked = Asked(query, query, query)
    >>> [kernel_of(asked, Gpu(capability)) for capability in [(9, 0), (8, 0), (7, 5)]]
    ['cudnn', 'flash', 'math']
    """
    if not _is_dense(asked):
        return "math"
    if _cudnn(asked, gpu):
        return "cudnn"
    if _flash(asked, gpu):
        return "flash"
    return "efficient" if _efficient(asked, gpu) else "math"


def _is_dense(asked: Asked) -> bool:
    """What all kernels ask for: four dimensions, as many samples and (unless grouped) heads, the last one dense."""
    given = (asked.query, asked.key, asked.value)
    if any(t.dim() != 4 or not t.shape[-2] or t.shape[0] != asked.query.shape[0] for t in given):
        return False
    heads = [t.shape[1] for t in given]
    if len(set(heads)) > 1 and not (asked.grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0):
        return False
    if len({t.dtype for t in given}) > 1:
        return False
    last = [*given, asked.mask] if asked.mask is not None else given
    return all(t.stride(-1) == 1 for t in last)


def _cudnn(asked: Asked, gpu: Gpu) -> bool:
    if gpu.capability[0] not in (9, 10) or asked.query.dtype not in _HALF:
        return False
    if asked.mask is not None and (asked.mask.requires_grad or asked.mask.dim() not in (2, 4)):
        return False
    if gpu.torch >= (2, 12) and asked.dropout * 16 % 1:  # cudnn rounds it to sixteenths, which earlier torch let pass
        return False
    widths = (asked.query.shape[-1], asked.value.shape[-1])
    widest = 256 if gpu.capability == (9, 0) else 192 if widths == (192, 128) else 128
    alone = asked.key.shape[-2] == 1 or (asked.query.shape[-2] == 1 and asked.dropout > 0)
    return max(widths) <= widest and not any(width % 8 for width in widths) and not alone


def _flash(asked: Asked, gpu: Gpu) -> bool:
    width = asked.query.shape[-1]
    wide = width > 192 and not (width > 224 and not asked.dropout)  # too wide for the shared memory of some
    return (
        gpu.capability >= (8, 0)
        and asked.query.dtype in _HALF
        and asked.mask is None
        and width == asked.key.shape[-1] == asked.value.shape[-1] <= _FLASH_WIDTH
        and not (wide and ((8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)))
        and not (asked.causal and asked.query.shape[-2] != asked.key.shape[-2])
    )


def _efficient(asked: Asked, gpu: Gpu) -> bool:
    half = asked.query.dtype in _HALF
    if asked.query.dtype is not torch.float32 and not half:
        return False
    if asked.query.dtype is torch.bfloat16 and gpu.capability < (8, 0):
        return False
    if asked.query.shape[1] != asked.key.shape[1]:  # heads that share keys
        return False
    words = 8 if half and gpu.capability >= (7, 0) else 4 if gpu.capability >= (8, 0) else 1
    words = 1 if gpu.any_width else words
    return asked.query.shape[-1] == asked.key.shape[-1] and not any(
        t.shape[-1] % words for t in (asked.query, asked.value)
    )


# -- what runs --------------------------------------------------------------------------------------------------------


def attention(asked: Asked, gpu: Gpu) -> Tensor:
    """Attention on CPU tensors that have no values, by the operators that a GPU would run.

    The kernel is that of a CPU, which stands for all three of a GPU: it reads, writes and keeps for backward what they
    do. (`on_gpu` gives it its name.) Only where a mask is trained is it the memory-efficient one itself, since a
    CPU's has no gradient for masks.
    """
    kernel = kernel_of(asked, gpu)
    query, key, value, mask = asked.query, asked.key, asked.value, asked.mask
    if mask is not None and mask.dtype is torch.bool:
        mask = _added(mask, query.dtype)
    if kernel == "math":
        return _one_by_one(asked, mask)
    if mask is not None and kernel == "efficient":
        mask = _expanded(mask, query, key)
        if mask.requires_grad:
            wanted = torch.is_grad_enabled()
            options: dict[str, Any] = {"scale": asked.scale}
            found = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, wanted, asked.dropout, asked.causal, **options
            )
            return _first(found)
    width, scale = query.shape[-1], asked.scale
    padding = -width % _TILE if kernel == "flash" else 0
    if padding:
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        scale = scale if scale is not None else 1 / sqrt(width)
    found = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, asked.dropout, asked.causal, attn_mask=mask, scale=scale
    )
    out = _first(found)[..., :width] if padding else _first(found)
    elsewhere = kernel == "efficient" and not out.transpose(1, 2).is_contiguous()
    return _Written.apply(out) if elsewhere else out


class _Written(torch.autograd.Function):
    """What the memory-efficient kernel writes lies token by token, whatever its queries are like.

    Other kernels write as their queries lie. Where these lie otherwise, whoever joins the heads has to copy.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        _, heads, length, width = out.shape
        return out.as_strided(out.shape, (length * heads * width, width, heads * width, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, from what may be seen."""
    nothing, never = (aten.scalar_tensor(number, dtype=dtype) for number in (0.0, float("-inf")))
    mask: Tensor = torch.where(seen, nothing, never)
    return mask


def _first(found: tuple[Tensor, ...]) -> Tensor:
    return found[0]


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """As the memory-efficient kernel reads a mask: in rows of whole tiles, and with all samples and heads."""
    length = mask.shape[-1]
    if any(stride % _TILE for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, _TILE - length % _TILE))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _one_by_one(asked: Asked, mask: Tensor | None) -> Tensor:
    """Without a kernel of its own (`_scaled_dot_product_attention_math`): numbers of 16 bits become fp32 meanwhile."""
    kept = asked.query.dtype
    query, key, value = (t.float() if kept in _HALF else t for t in (asked.query, asked.key, asked.value))
    factor = sqrt(asked.scale if asked.scale is not None else 1 / sqrt(query.shape[-1]))
    query = query * factor
    if asked.causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = _added(seen, query.dtype)
    if asked.grouped:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    if asked.dropout > 0:
        scores = F.dropout(scores, asked.dropout)
    scores.to(kept)  # torch returns the scores, too; nobody reads them
    return torch.matmul(scores, value).to(kept)
