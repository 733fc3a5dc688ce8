"""The work at a place, ready to be called: tensors of that shape on a device, and the call that torch would make.

What is in a cache when an operator starts is as in training. A forward pass reads what the operator before has just
written, so it is called on the same tensors again and again. A backward pass reads what was saved long ago, and a
product its weights, after those of all other layers: there several sets of tensors take turns, so that caches have
forgotten each when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainplan.profile.device.families import ITEM_BYTES, Place

Work = Callable[[], object]
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_COPIES = 16  # sets of tensors that take turns

aten: Any = torch.ops.aten


@contextmanager
def arithmetic(device: torch.device) -> Iterator[Callable[[str], None]]:
    """A function that tells torch to multiply numbers of 32 bits as fp32 or tf32; afterwards all is as it was."""
    backends: Any = torch.backends
    settings = [backends.cuda.matmul, backends.cudnn.conv] if device.type == "cuda" else []
    before = [setting.fp32_precision for setting in settings]

    def choose(precision: str) -> None:
        for setting in settings:
            setting.fp32_precision = "tf32" if precision == "tf32" else "ieee"

    try:
        yield choose
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def work(at: Place, device: torch.device, cache_bytes: int) -> Work:
    """What to call for a place; it has been called once."""
    make = _Maker(DTYPES[at.precision], ITEM_BYTES[at.precision], device, cache_bytes)
    remembered = at.variant in ("weight", "foreach", "fused") or "backward" in at.variant
    sets = [_MAKERS[at.family](at, make) for _ in range(make.copies(at.bytes) if remembered else 1)]
    for one in sets:
        one()  # the first call loads the kernel, and makes an optimizer's states
    turns = cycle(sets)
    return lambda: next(turns)()


class _Maker:
    """Makes tensors; their values are of order one, and random on a GPU, whose clocks depend on them."""

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device, cache_bytes: int) -> None:
        self.dtype, self.size, self.device, self.cache_bytes = dtype, size, device, cache_bytes

    def copies(self, size: float) -> int:
        """How many sets of so many bytes no cache holds; where it would hold them all, two that take turns."""
        if MOST_COPIES * size < self.cache_bytes / 2:
            return 2
        return max(1, min(MOST_COPIES, int(2 * self.cache_bytes / size)))

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self.device.type == "cpu":
            return torch.full(shape, 0.5, dtype=dtype)
        return torch.randn(shape, device=self.device, dtype=dtype)

    def leaf(self, *shape: int) -> Tensor:
        return self.tensor(*shape).requires_grad_()


def _backward(out: Tensor, leaves: list[Tensor]) -> Work:
    """The backward pass of something, again and again."""
    given = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, given, retain_graph=True)


def _product(at: Place, make: _Maker) -> Work:
    batch, rows, inner, columns = at.shape
    layout = at.variant[:2]
    lead = (batch,) if batch > 1 else ()

    def factor(high: int, wide: int, turned: bool) -> Tensor:
        return make.tensor(*lead, wide, high).mT if turned else make.tensor(*lead, high, wide)

    first = factor(rows, inner, layout[0] == "t")
    copies = make.copies(make.size * batch * inner * columns)
    seconds = cycle([factor(inner, columns, layout[1] == "t") for _ in range(copies)])
    call = torch.bmm if batch > 1 else torch.mm
    return lambda: call(first, next(seconds))


def _convolution(at: Place, make: _Maker) -> Work:
    samples, ins, outs, places, kernel, stride, groups = at.shape
    side, reach = round(places**0.5), round(kernel**0.5)
    given = make.tensor(samples, ins, side * stride, side * stride)
    weight = make.tensor(outs, ins // groups, reach, reach)
    padding = (reach - 1) // 2
    rest = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    if at.variant == "forward":
        return lambda: aten.convolution(given, weight, None, *rest)
    out = aten.convolution(given, weight, None, *rest)
    mask = [at.variant == "input", at.variant == "weight", False]
    return lambda: aten.convolution_backward(out, given, weight, None, *rest, mask)


def _attention(at: Place, make: _Maker) -> Work:
    heads, queries, keys, width = at.shape
    each = min(heads, 16)
    q, k, v = (make.leaf(heads // each, each, length, width) for length in (queries, keys, keys))
    causal = at.variant.endswith("causal")
    if at.variant.startswith("forward"):
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return _backward(F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v])


def _elementwise(at: Place, make: _Maker) -> Work:
    if at.variant == "dropout":  # one byte of mask for each number
        x = make.tensor(max(1, at.shape[0] // (2 * make.size + 1)))
        return lambda: aten.native_dropout(x, 0.1, True)
    tensors = 3 if at.variant == "add" else 2
    x = make.tensor(max(1, at.shape[0] // (tensors * make.size)))
    if at.variant == "add":
        y = x.clone()
        return lambda: torch.add(x, y)
    call = F.relu if at.variant == "relu" else F.gelu
    return lambda: call(x)


def _reduction(at: Place, make: _Maker) -> Work:
    moved, width = at.shape
    tensors = {"sum": 1, "columns": 1, "softmax": 2, "softmax_backward": 3}[at.variant]
    if at.variant == "columns":
        turned = make.tensor(width, max(1, moved // (make.size * width)))
        return lambda: aten.sum.dim_IntList(turned, [0])
    x = make.leaf(max(1, moved // (tensors * make.size * width)), width)
    if at.variant == "sum":
        return lambda: aten.sum.dim_IntList(x, [1])
    if at.variant == "softmax":
        return lambda: aten._softmax(x, -1, False)
    return _backward(torch.softmax(x, -1), [x])


def _normalisation(at: Place, make: _Maker) -> Work:
    moved, width, places = at.shape
    rows = max(2, moved // ((3 if at.variant.endswith("backward") else 2) * make.size * width))
    scale, shift = make.leaf(width), make.leaf(width)
    if at.variant.startswith("layer_norm"):
        x = make.leaf(rows, width)
        call: Callable[[], Tensor] = lambda: F.layer_norm(x, (width,), scale, shift)  # noqa: E731
    else:
        x = make.leaf(max(1, round(rows / places)), width, places, 1)
        call = lambda: F.batch_norm(x, None, None, scale, shift, training=True)  # noqa: E731
    return _backward(call(), [x, scale, shift]) if at.variant.endswith("backward") else call


def _pooling(at: Place, make: _Maker) -> Work:
    # Of every four numbers one is written, and, of a maximum, where it was: eight bytes.
    each = {
        "max": make.size + (make.size + 8) / 4,
        "max_backward": 2 * make.size + (make.size + 8) / 4,
        "average": make.size * 1.25,
        "average_backward": make.size * 2.25,
    }[at.variant]
    x = make.leaf(max(1, round(at.shape[0] / each / 4096)), 16, 16, 16)
    if at.variant == "average":
        return lambda: F.avg_pool2d(x, 2)
    if at.variant == "max":
        return lambda: F.max_pool2d(x, 3, 2, 1)
    pooled = F.avg_pool2d(x, 2) if at.variant == "average_backward" else F.max_pool2d(x, 3, 2, 1)
    return _backward(pooled, [x])


def _gather(at: Place, make: _Maker) -> Work:
    moved, width = at.shape
    rows = max(2, moved // (2 * make.size * width))
    table = make.leaf(rows, width)
    ids = torch.randperm(rows, device=make.device)
    if at.variant == "embedding":
        return lambda: F.embedding(ids, table)
    return _backward(F.embedding(ids, table), [table])


def _optimizer(at: Place, make: _Maker) -> Work:
    moved, tensors = at.shape
    if at.variant == "foreach":
        long = max(1, moved // (3 * make.size * tensors))
        first, second = ([make.tensor(long) for _ in range(tensors)] for _ in range(2))
        return lambda: torch._foreach_add_(first, second)
    long = max(1, moved // (7 * make.size * tensors))  # four are read and three written
    parameters = [make.leaf(long) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = make.tensor(long)
    return torch.optim.AdamW(parameters, lr=1e-6, fused=True).step


def _copy(at: Place, make: _Maker) -> Work:
    moved = at.shape[0]
    if at.variant in ("in", "out"):
        here = make.tensor(max(1, moved // 4), dtype=torch.float32)
        there = torch.zeros(here.shape, pin_memory=make.device.type == "cuda")
        target, source = (here, there) if at.variant == "in" else (there, here)
        return lambda: target.copy_(source, non_blocking=True)
    if at.variant.startswith("cast"):
        wide = make.tensor(max(1, moved // 6), dtype=torch.float32)
        narrow = wide.to(torch.bfloat16)
        target, source = (wide, narrow) if at.variant == "cast-up" else (narrow, wide)
        return lambda: target.copy_(source)
    if at.variant == "strided":  # heads beside tokens become tokens beside heads, 64 numbers at a time
        rows = max(1, round((moved / 8 / 64) ** 0.5))
        heads = make.tensor(rows, rows, 64, dtype=torch.float32)
        tokens = torch.empty_like(heads)
        return lambda: tokens.copy_(heads.transpose(0, 1))
    side = max(1, round((moved / 8) ** 0.5))
    source = make.tensor(side, side, dtype=torch.float32)
    into = torch.empty_like(source)
    source = source.t() if at.variant == "transposed" else source
    return lambda: into.copy_(source)


_MAKERS: dict[str, Callable[[Place, _Maker], Work]] = {
    "product": _product,
    "convolution": _convolution,
    "attention": _attention,
    "elementwise": _elementwise,
    "reduction": _reduction,
    "normalisation": _normalisation,
    "pooling": _pooling,
    "gather": _gather,
    "optimizer": _optimizer,
    "copy": _copy,
}
