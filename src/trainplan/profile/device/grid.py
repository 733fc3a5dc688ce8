"""Which shapes are measured, the most telling first. No model is read; imports no torch.

Points come in *rounds*. The first spans every family by a coarse grid in one precision, so that a measurement that is
cut short still has something of everything; then come checks, shapes drawn by lot that are held back, to judge the
model by; then the other precisions, and many more that are drawn by lot (`draws`). Within a round the families take
turns, in proportion, each in an order that was shuffled once, so that a slow machine leaves out the same share
everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from trainplan.profile.device.draws import LAYOUTS, Row, every, linear
from trainplan.profile.device.families import ARITHMETIC, ITEM_BYTES, Place, place

# The most bytes that one point may touch: beyond it nothing changes but the time that it takes.
MOST_BYTES = {"cpu": 2**28, "cuda": 2**31}
PLAIN = ("optimizer", "copy")  # states are of 32 bits, and a copy of bytes is a copy of bytes
CHECKED = 0.05  # for so many that are drawn, one is held back


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
    first, others = precisions[:1], precisions[1:]
    coarse = list(_coarse(kind))
    if quick:
        few = [case for case in _in_turns(_in(first, coarse), kind) if case.at.bytes < 2**23]
        kept: dict[str, int] = {}
        found = []
        for case in few:
            kept[case.curve] = kept.get(case.curve, 0) + 1
            found += [case] if kept[case.curve] <= 3 else []
        drawn = _in_turns(_lots(first, CHECKED, 1), kind, check=True)
        return found + [case for case in drawn if case.at.bytes < 2**23 and case.at.flops < 2**28][:4]
    checks = _in_turns(_lots(precisions[:3], CHECKED, 1), kind, check=True)
    held = {case.at for case in checks}
    found = (
        _in_turns(_in(first, coarse), kind)
        + checks
        + _in_turns(_in(others, coarse), kind)
        + _in_turns([*_lots(precisions, 1.0, 0), *_in(precisions[:3], _fine(kind))], kind)
    )
    # Copies, for one, are the same in every precision; and what is held back is held back everywhere.
    return [case for case in dict.fromkeys(found) if case.check or case.at not in held]


def _in(precisions: tuple[str, ...], rows: Iterable[Row]) -> Iterator[Place]:
    """Rows in every precision that tells something new."""
    for family, variant, shape in rows:
        for precision in _worth(family, variant, precisions):
            yield place(family, variant, precision, shape)


def _lots(precisions: tuple[str, ...], share: float, seed: int) -> Iterator[Place]:
    """What is drawn by lot, in the precision that it was drawn for."""
    for rank, (family, variant, shape) in every(tuple(range(len(precisions))), share, seed):
        precision = "fp32" if family in PLAIN else precisions[rank]
        variant = variant.removesuffix("-odd") if precision == "fp32" else variant  # there no number is odd
        yield place(family, variant, precision, shape)


def _in_turns(places: Iterable[Place], kind: str, check: bool = False) -> list[Case]:
    """The places as cases, families in proportion."""
    shuffle = random.Random(0).shuffle
    by_family: dict[str, list[Case]] = {}
    for at in places:
        if at.bytes <= MOST_BYTES[kind]:
            by_family.setdefault(at.family, []).append(Case(at, check))
    placed = []
    for number, alike in enumerate(by_family.values()):
        shuffle(alike)
        placed += [(turn / len(alike), number, case) for turn, case in enumerate(alike)]
    return [case for _, _, case in sorted(placed, key=lambda item: item[:2])]


def _worth(family: str, variant: str, precisions: tuple[str, ...]) -> list[str]:
    if family in PLAIN:
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
            yield "product", layout, linear(layout, rows, inner, columns)
    for side, samples, kernel in product((7, 28, 112), (8, 64), (1, 9)):
        yield from _convolutions(
            ((16, 16), (64, 64), (64, 256), (256, 64), (256, 256), (512, 512)), side, samples, kernel
        )
    for variant, heads, length in product(("forward-causal", "backward-causal"), (16, 128), (128, 1024)):
        yield "attention", variant, (heads, length, length, 64)
    for size in _sizes(kind, 16):
        for variant in ("relu", "add", "gelu", "dropout"):
            yield "elementwise", variant, (size,)
        for variant in ("max", "max_backward", "average", "average_backward"):
            yield "pooling", variant, (size,)
        host = ("in", "out") if kind == "cuda" else ()
        for variant in ("contiguous", "strided", "transposed", "cast", "cast-up", *host):
            yield "copy", variant, (size,)
        for variant in ("sum", "columns", "softmax", "softmax_backward"):
            yield "reduction", variant, (size, 1024)
        for variant in ("layer_norm", "layer_norm_backward"):
            yield "normalisation", variant, (size, 1024, 1)
        for variant, side in product(("batch_norm", "batch_norm_backward"), (14, 56)):
            yield "normalisation", variant, (size, 64, side**2)
        for variant in ("embedding", "embedding_backward"):
            yield "gather", variant, (size, 512)
        for variant in ("foreach", "fused"):
            yield "optimizer", variant, (size, 16)


def _fine(kind: str) -> Iterator[Row]:
    """What is asked for more often than lots would have it: large products, and bytes of all sizes."""
    widths = (256, 1024, 4096)
    for rows, inner, columns in product((64, 1024, 2048, 8192, 16384), widths, widths):
        for layout in LAYOUTS:
            yield "product", layout, linear(layout, rows, inner, columns)
    for variant in ("forward", "backward", "forward-causal", "backward-causal"):
        for heads, length, width in product((16, 64, 256), (128, 256, 512, 2048, 4096), (64, 128)):
            yield "attention", variant, (heads, length, length, width)
    for size in _sizes(kind, 4):
        for variant in ("relu", "add", "gelu", "dropout"):
            yield "elementwise", variant, (size,)
        for tensors in (1, 128):
            for variant in ("foreach", "fused"):
                yield "optimizer", variant, (size, tensors)


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
