"""Which shapes are measured: a grid that knows no model, the most telling points first. Imports no torch.

Points come in *rounds*. The first spans every family coarsely in one precision, so that a measurement that is cut short
still has something of everything; then come checks, shapes between the points of the grid, to judge the model by; then
the other precisions, and the points between. Within a round the families take turns, in proportion, each in an order
that was shuffled once, so that a slow machine leaves out the same share everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from trainplan.profile.device.families import ARITHMETIC, ITEM_BYTES, Place, place

# The most bytes that one point may touch: beyond it nothing changes but the time that it takes.
MOST_BYTES = {"cpu": 2**28, "cuda": 2**31}
LAYOUTS = ("nt", "nn", "tn")  # of a linear layer: forward, for its input, for its weights
Row = tuple[str, str, tuple[int, ...]]  # family, variant, shape


@dataclass(frozen=True)
class Case:
    """One shape to be measured."""

    at: Place
    check: bool = False  # held back from the curves

    @property
    def curve(self) -> str:
        return f"{self.at.family}.{self.at.variant}.{self.at.precision}"


def cases(kind: str, precisions: tuple[str, ...], quick: bool = False) -> list[Case]:
    """The shapes for a device of this kind (cpu, cuda), in the order in which they are worth measuring.

    `precisions` are those that it has units for, the most telling first. `quick` is a handful of each family.

    >>> every = cases("cuda", ("bf16", "tf32", "fp32", "fp16"))
    >>> len(every) > 3000, sorted({case.at.family for case in every[:30]})[:3]
    (True, ['attention', 'convolution', 'copy'])
    """
    if quick:
        few = [case for case in _in_turns(list(_coarse(kind)), precisions[:1], kind) if case.at.bytes < 2**23]
        kept: dict[str, int] = {}
        found = []
        for case in few:
            kept[case.curve] = kept.get(case.curve, 0) + 1
            found += [case] if kept[case.curve] <= 3 else []
        return found + _in_turns(list(_checks()), precisions[:1], kind, check=True)[:4]
    first, others = precisions[:1], precisions[1:]
    found = (
        _in_turns(list(_coarse(kind)), first, kind)
        + _in_turns(list(_checks()), first, kind, check=True)
        + _in_turns(list(_coarse(kind)), others, kind)
        + _in_turns(list(_fine(kind)), precisions[:3], kind)
        + _in_turns(list(_checks()), others[:1], kind, check=True)
    )
    return list(dict.fromkeys(found))  # copies, for one, are the same in every precision


def _in_turns(rows: list[Row], precisions: tuple[str, ...], kind: str, check: bool = False) -> list[Case]:
    """The rows in every precision that tells something new, families in proportion."""
    shuffle = random.Random(0).shuffle
    by_family: dict[str, list[Case]] = {}
    for family, variant, shape in rows:
        for precision in _worth(family, variant, precisions):
            at = place(family, variant, precision, shape)
            if at.bytes <= MOST_BYTES[kind]:
                by_family.setdefault(family, []).append(Case(at, check))
    placed = []
    for number, alike in enumerate(by_family.values()):
        shuffle(alike)
        placed += [(turn / len(alike), number, case) for turn, case in enumerate(alike)]
    return [case for _, _, case in sorted(placed, key=lambda item: item[:2])]


def _worth(family: str, variant: str, precisions: tuple[str, ...]) -> list[str]:
    if family in ("optimizer", "copy"):  # states are of 32 bits, and a copy of bytes is a copy of bytes
        return ["fp32"]
    if variant.endswith("odd"):
        return [p for p in precisions if p != "fp32"]
    if family in ARITHMETIC:  # attention's products follow the numbers' own width, except in tf32
        return [p for p in precisions if family != "attention" or p != "tf32"]
    # What moves bytes knows two widths of numbers.
    widths = {ITEM_BYTES[p]: p for p in reversed(precisions) if p != "tf32"}
    return [widths[size] for size in sorted(widths, reverse=True)]


def _coarse(kind: str) -> Iterator[Row]:
    for rows, inner, columns in product((1, 16, 256, 4096), (64, 512, 4096), (64, 512, 4096)):
        for layout in LAYOUTS:
            yield "product", layout, _product(layout, rows, inner, columns)
    for side, samples, kernel in product((7, 28, 112), (8, 64), (1, 9)):
        yield from _convolutions(
            ((16, 16), (64, 64), (64, 256), (256, 64), (256, 256), (512, 512)), side, samples, kernel
        )
    for variant, heads, length in product(("forward-causal", "backward-causal"), (16, 128), (128, 1024)):
        yield "attention", variant, (heads, length, length, 64)
    for size in _sizes(kind, 16):
        for variant in ("relu", "add", "gelu", "dropout"):
            yield "elementwise", variant, (size,)
        for variant in ("max", "max_backward", "average"):
            yield "pooling", variant, (size,)
        for variant in ("contiguous", "transposed", "cast", *(("in", "out") if kind == "cuda" else ())):
            yield "copy", variant, (size,)
        for variant in ("sum", "softmax", "softmax_backward"):
            yield "reduction", variant, (size, 1024)
        for variant in ("layer_norm", "layer_norm_backward"):
            yield "normalisation", variant, (size, 1024)
        for variant in ("batch_norm", "batch_norm_backward"):
            yield "normalisation", variant, (size, 64)
        for variant in ("embedding", "embedding_backward"):
            yield "gather", variant, (size, 512)
        for variant in ("foreach", "fused"):
            yield "optimizer", variant, (size, 16)


def _fine(kind: str) -> Iterator[Row]:
    widths = (64, 256, 1024, 2048, 8192)
    for rows, inner, columns in product((1, 4, 16, 64, 256, 1024, 4096, 16384), widths, widths):
        for layout in LAYOUTS:
            yield "product", layout, _product(layout, rows, inner, columns)
    for rows, inner, columns in product((256, 1024, 8192), (512, 2048), (1001, 8193, 50257)):
        for layout in LAYOUTS:
            yield "product", f"{layout}-odd", _product(layout, rows, inner, columns)
    for batch, length, width in product((16, 128, 1024), (64, 256, 1024), (64, 128)):  # attention that is not fused
        for layout in LAYOUTS:
            yield "product", layout, (batch, length, width, length)
            yield "product", layout, (batch, length, length, width)
    pairs = ((16, 64), (64, 16), (32, 32), (128, 128), (128, 512), (512, 128), (256, 1024), (1024, 256), (1024, 1024))
    for side, samples, kernel in product((4, 14, 28, 56), (2, 32, 256), (1, 9)):
        yield from _convolutions(pairs, side, samples, kernel)
    for side, samples, kernel in product((7, 14, 28, 56, 112), (8, 64), (1, 9)):
        yield from _convolutions(((64, 128), (128, 128), (256, 512), (1024, 2048)), side, samples, kernel, stride=2)
    for side, samples in product((16, 112), (8, 64)):  # at the top of a network: few channels, large kernels
        yield from _convolutions(((3, 64), (1, 64), (3, 32)), side, samples, 49, stride=2)
        yield from _convolutions(((3, 64), (1, 64), (3, 32)), side, samples, 9)
        yield from _convolutions(((16, 16), (64, 64), (64, 192)), side, samples, 25)
    for side, samples, stride in product((7, 14, 28, 56, 112), (8, 64), (1, 2)):
        for channels in (32, 128, 512):
            for kernel in (9, 25, 49):
                yield from _convolutions(((channels, channels),), side, samples, kernel, stride, groups=channels)
        for channels in (128, 512):
            yield from _convolutions(((channels, channels),), side, samples, 9, stride, groups=32)
    for variant in ("forward", "backward", "forward-causal", "backward-causal"):
        for heads, length, width in product((16, 64, 256, 1024), (64, 256, 512, 2048, 8192), (64, 128)):
            if heads * length**2 <= 2**31:
                yield "attention", variant, (heads, length, length, width)
    for size in _sizes(kind, 4):
        yield "elementwise", "add", (size,)
        yield "elementwise", "relu", (size,)
        for width in (64, 256, 4096, 32768):
            for variant in ("sum", "softmax", "softmax_backward"):
                yield "reduction", variant, (size, width)
        for width in (256, 4096):
            for variant in ("layer_norm", "layer_norm_backward"):
                yield "normalisation", variant, (size, width)
        for width in (16, 256, 1024):
            for variant in ("batch_norm", "batch_norm_backward"):
                yield "normalisation", variant, (size, width)
        for tensors in (1, 128):
            for variant in ("foreach", "fused"):
                yield "optimizer", variant, (size, tensors)
        for width in (64, 2048):
            for variant in ("embedding", "embedding_backward"):
                yield "gather", variant, (size, width)


def _checks() -> Iterator[Row]:
    for rows, (inner, columns) in product((24, 200, 1536, 6144), ((768, 768), (768, 3072), (1600, 1600), (96, 384))):
        for layout in LAYOUTS:
            yield "product", layout, _product(layout, rows, inner, columns)
    for (ins, outs), side, samples, kernel in product(((96, 96), (192, 384), (384, 192)), (10, 20), (12, 48), (1, 9)):
        yield from _convolutions(((ins, outs),), side, samples, kernel)
    for variant, heads, length in product(("forward-causal", "backward-causal"), (48, 192), (384, 768)):
        yield "attention", variant, (heads, length, length, 64)
    for size in (3 * 2**17, 3 * 2**21, 3 * 2**25):
        yield "elementwise", "add", (size,)
        yield "reduction", "softmax", (size, 768)
        yield "normalisation", "layer_norm", (size, 768)
        yield "normalisation", "batch_norm", (size, 96)


def _product(layout: str, rows: int, inner: int, columns: int) -> tuple[int, ...]:
    """The product of that layout in a linear layer from `inner` to `columns` features, for so many rows."""
    shapes = {"nt": (rows, inner, columns), "nn": (rows, columns, inner), "tn": (columns, rows, inner)}
    return (1, *shapes[layout])


def _convolutions(
    channels: tuple[tuple[int, int], ...], side: int, samples: int, kernel: int, stride: int = 1, groups: int = 1
) -> Iterator[Row]:
    for ins, outs in channels:
        if max(ins, outs) * side**2 <= 2**20:  # networks have many channels where they have few places
            for variant in ("forward", "input", "weight"):
                yield "convolution", variant, (samples, ins, outs, side**2, kernel, stride, groups)


def _sizes(kind: str, step: int) -> list[int]:
    """Bytes, from what fits any cache to what fits none."""
    sizes, size = [], 2**14
    while size <= MOST_BYTES[kind] // 2:
        sizes.append(size)
        size *= step
    return [*sizes, MOST_BYTES[kind] // 2]
