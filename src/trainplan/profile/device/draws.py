"""Shapes drawn by lot, from the ranges in which operators of networks are. No model is read; imports no torch.

A grid of seven dimensions has few values in each, so whatever lies between is far from all of its points, and what
kernels are chosen by (is it a multiple of 8, of 64?) it shows for the few alone. Shapes that are drawn differ in all
dimensions at once. The same lots draw the points that are held back, so these are like those that will be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import log2
from random import Random

from trainplan.profile.device.families import VARIANTS

Row = tuple[str, str, tuple[int, ...]]  # family, variant, shape
LAYOUTS = ("nt", "nn", "tn")  # of a linear layer: forward, for its input, for its weights
SIDES = (1, 2, 4, 8, 16, 32, 7, 14, 28, 56, 112, 224)  # of images: what is left of 32 and 224 after halving
HEADS = (64, 64, 64, 128, 128, 32, 80, 96)  # widths of heads; some are more usual than others
MOST_FLOPS = 2e12
MOST_NUMBERS = 2**27  # of a tensor
# How many of each family are drawn in a device's precisions, the most telling first.
COUNTS = {
    "product": (2400, 2400, 1500, 240),
    "convolution": (5000, 5000, 450, 300),
    "attention": (640, 0, 400, 120),
    "elementwise": (60, 0, 60, 0),
    "pooling": (60, 0, 60, 0),
    "copy": (100, 0, 0, 0),
    "reduction": (200, 0, 200, 0),
    "normalisation": (600, 0, 600, 0),
    "gather": (100, 0, 100, 0),
    "optimizer": (160, 0, 0, 0),
}


def drawn(family: str, count: int, seed: int) -> Iterator[Row]:
    """So many shapes of a family.

    >>> next(drawn("convolution", 1, 0))
    ('convolution', 'input', (3, 64, 64, 1, 9, 2, 1))
    """
    lot = Random(f"{family} {seed}")
    for _ in range(count):
        variant, shape = _DRAWS.get(family, _bytes)(lot, family)
        yield family, variant, shape


def _between(lot: Random, low: int, high: int, multiple: int = 1) -> int:
    """A whole number, as likely below as above the geometric middle; half of the time a power of two."""
    power = lot.uniform(log2(low), log2(high))
    found = 2 ** round(power) if lot.random() < 0.5 else round(2**power)
    return max(multiple, min(high, round(found / multiple) * multiple))


def linear(layout: str, rows: int, inner: int, columns: int) -> tuple[int, ...]:
    """The product of that layout in a linear layer from `inner` to `columns` features, for so many rows.

    >>> linear("tn", 32, 256, 1024)
    (1, 1024, 32, 256)
    """
    shapes = {"nt": (rows, inner, columns), "nn": (rows, columns, inner), "tn": (columns, rows, inner)}
    return (1, *shapes[layout])


def _product(lot: Random, family: str) -> tuple[str, tuple[int, ...]]:
    layout, kind = lot.choice(LAYOUTS), lot.random()
    while True:
        rows = _between(lot, 1, 2**16)
        inner = _between(lot, 64, 2**14, lot.choice((8, 64, 64)))
        columns = _between(lot, 64, 2**16 if lot.random() < 0.15 else 2**14, lot.choice((8, 64, 64)))
        if kind < 0.15:  # attention that is not fused
            long, width = _between(lot, 16, 2048, 8), lot.choice(HEADS)
            shape: tuple[int, ...] = (_between(lot, 2, 2048), long, *lot.choice(((width, long), (long, width))))
        elif kind < 0.23:
            shape = linear(layout, rows, inner, columns + 1)
        else:
            shape = linear(layout, rows, inner, columns)
        batch, high, deep, wide = shape
        if 2.0 * batch * high * deep * wide <= MOST_FLOPS and batch * max(high * deep, deep * wide) <= MOST_NUMBERS:
            return layout + ("-odd" if 0.15 <= kind < 0.23 else ""), shape


def _convolution(lot: Random, family: str) -> tuple[str, tuple[int, ...]]:
    variant, kind = lot.choice(VARIANTS[family]), lot.random()
    kernel = next(size for most, size in ((0.38, 1), (0.78, 9), (0.82, 25), (0.86, 49), (1.0, 0)) if kind < most)
    while True:
        side, samples = lot.choice(SIDES), _between(lot, 1, 512)
        stride = 2 if lot.random() < 0.2 else 1
        ins, outs = (_between(lot, 8, 2048, lot.choice((8, 16, 32))) for _ in range(2))
        groups = 1
        if not kernel:  # by groups: mostly each channel by itself
            outs = ins
            groups = ins if kind < 0.97 or ins % 32 else 32
        elif kernel > 1 and lot.random() < 0.06:  # at the top of a network
            ins = lot.choice((1, 3, 3))
        places = side**2
        reach = kernel or lot.choice((9, 9, 25, 49))
        numbers = samples * places * max(ins * stride**2, outs)
        flops = 2.0 * samples * places * reach * (ins // groups) * outs
        usual = max(ins, outs) * places <= 2**22 and max(ins / outs, outs / ins if ins > 3 else 0) <= 8
        if usual and numbers <= MOST_NUMBERS and flops <= MOST_FLOPS:
            return variant, (samples, ins, outs, places, reach, stride, groups)


def _attention(lot: Random, family: str) -> tuple[str, tuple[int, ...]]:
    variant = lot.choice(VARIANTS[family])
    while True:
        heads = _between(lot, 4, 2048)
        heads = heads if heads < 16 else heads // 16 * 16
        queries = _between(lot, 32, 8192, lot.choice((1, 8, 8)))
        keys = queries if "causal" in variant or lot.random() < 0.85 else _between(lot, 32, 8192, 8)
        if heads * queries * keys <= 2**30:
            return variant, (heads, queries, keys, lot.choice(HEADS))


def _bytes(lot: Random, family: str) -> tuple[str, tuple[int, ...]]:
    """Of what moves bytes: whole rows of 12 numbers of 2 bytes or 4, so that two tensors or three share them evenly."""
    variant = lot.choice([name for name in VARIANTS[family] if name not in ("in", "out")])
    size = _between(lot, 2**15, 2**29)
    if family in ("elementwise", "pooling", "copy"):
        return variant, (size,)
    if family == "optimizer":
        return variant, (size, _between(lot, 1, 512))
    if variant.startswith("batch_norm"):
        while True:
            width, places = _between(lot, 8, 2048, 8), lot.choice(SIDES) ** 2
            samples = max(1, round(size / (12 * width * places)))
            if width * places <= 2**20 and samples * places > 1 and samples <= 2**12:
                return variant, (samples * places * 24 * width, width, places)
    else:
        width = _between(lot, 32, 2**17 if family == "reduction" else 2**13, lot.choice((1, 8, 8)))
    rows = (max(2, round(size / (24 * width))) * 24 * width, width)
    return variant, (*rows, 1) if family == "normalisation" else rows


_DRAWS: dict[str, Callable[[Random, str], tuple[str, tuple[int, ...]]]] = {
    "product": _product,
    "convolution": _convolution,
    "attention": _attention,
}


def every(ranks: tuple[int, ...], share: float, seed: int) -> Iterator[tuple[int, Row]]:
    """(rank of its precision, shape) of all families, each in its count for that rank, or a share of it."""
    for family, rank in product(COUNTS, ranks):
        for row in drawn(family, round(share * COUNTS[family][rank]), 10 * seed + rank):
            yield rank, row
