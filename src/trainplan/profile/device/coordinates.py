"""Where on a family's surface a shape is: numbers that differ by one where seconds have little to do with each other.

Sizes count by their logarithm; whatever else a kernel is chosen by counts, too: which pass it is, in which numbers, and
how many of them fit whole into words and tiles. What each is worth (`WORTH`) was found by leaving out points of an H200
one after the other and asking the rest. All curves of a family lie on one surface, so that few points in fp16 are
enough beside many in bf16.

Imports no torch.
"""

from __future__ import annotations

import numpy as np

from trainplan.profile.device.families import VARIANTS

TILE = 64  # numbers of which products like whole multiples
WORD = 8  # and convolutions; beyond that, they too like whole tiles of channels
# What a doubling is worth, or a change from one to another. The first of each is that by which devices differ.
WORTH = {
    "product": {
        "rows": 0.25, "batch": 0.25, "inner": 0.25, "columns": 0.25, "even": 0.1, "turned": 0.25, "odd": 3.0,
        "batched": 1.0,
    },
    "convolution": {
        "size": 0.25, "ins": 0.25, "outs": 0.25, "places": 0.12, "kernel": 0.5, "stride": 1.0, "grouped": 1.0,
        "groups": 0.3, "depthwise": 0.5, "even": 0.25, "tiles": 0.15, "pointwise": 0.15, "even_pointwise": 0.6,
        "even_places": 0.1, "weight": 1.2, "input": 3.0,
    },
    "attention": {"size": 0.25, "width": 0.25, "variant": 0.5},
    "elementwise": {"size": 0.2, "variant": 1.2},
    "pooling": {"size": 0.2, "variant": 1.2},
    "copy": {"size": 0.2, "variant": 3.0},
    "reduction": {"size": 0.15, "width": 0.5, "variant": 1.2},
    "normalisation": {"size": 0.15, "width": 0.4, "places": 0.2, "variant": 1.2},
    "gather": {"size": 0.15, "width": 0.4, "variant": 2.0},
    "optimizer": {"size": 0.15, "width": 0.15, "variant": 3.0},
}  # fmt: skip
HALF, SINGLE, FP16 = 2.0, 3.0, 0.1  # two bytes or four; without tensor cores; fp16 and bf16 run by the same kernels


def coordinates(family: str, variant: str, precision: str, shapes: np.ndarray, larger: float = 1.0) -> np.ndarray:
    """Where shapes are, a row each; on a device that is `larger` by so much, each is where a smaller one would be.

    >>> at = coordinates("product", "nt", "bf16", np.array([[1, 64, 256, 256], [1, 128, 256, 256], [1, 132, 256, 256]]))
    >>> np.abs(at[1:] - at[0]).sum(axis=1).round(2).tolist()
    [0.25, 0.66]
    """
    columns = {"product": _product, "convolution": _convolution}.get(family, _sizes)(family, variant, shapes)
    columns[0] = columns[0] - next(iter(WORTH[family].values())) * np.log2(larger)
    half = precision in ("bf16", "fp16")
    columns += [HALF * half, SINGLE * (precision == "fp32"), FP16 * (precision == "fp16")]
    found = np.empty((len(shapes), len(columns)))
    for number, column in enumerate(columns):
        found[:, number] = column
    return found


Columns = list[np.ndarray | float]


def _sizes(family: str, variant: str, shapes: np.ndarray) -> Columns:
    worth = WORTH[family]
    scales = [worth["size"], *[worth.get("width", 0.0)] * (shapes.shape[1] - 1)]
    if "places" in worth:
        scales[-1] = worth["places"]
    return [scale * np.log2(sizes) for scale, sizes in zip(scales, shapes.T, strict=True)] + [
        worth["variant"] * (variant == other) for other in VARIANTS[family]
    ]


def _product(family: str, variant: str, shapes: np.ndarray) -> Columns:
    worth = WORTH[family]
    batch, rows, inner, columns = shapes.T
    return [
        worth["rows"] * np.log2(rows),
        worth["batch"] * np.log2(batch),
        worth["inner"] * np.log2(inner),
        worth["columns"] * np.log2(columns),
        *(worth["even"] * np.log2(np.gcd(sizes, TILE)) for sizes in (rows, inner, columns)),
        *(worth["turned"] * variant.startswith(layout) for layout in ("nt", "tn")),
        worth["odd"] * variant.endswith("odd"),
        worth["batched"] * (batch > 1),
    ]


def _convolution(family: str, variant: str, shapes: np.ndarray) -> Columns:
    worth = WORTH[family]
    samples, ins, outs, places, kernel, stride, groups = shapes.T
    whole = np.log2(np.gcd(places, WORD))  # a kernel of one place makes a product of it, if these are whole words
    return [
        worth["size"] * np.log2(samples * places),
        worth["ins"] * np.log2(ins / groups),
        worth["outs"] * np.log2(outs / groups),
        worth["places"] * np.log2(places),
        worth["kernel"] * np.log2(kernel),
        worth["stride"] * np.log2(stride),
        worth["grouped"] * (groups > 1),
        worth["groups"] * np.log2(groups),
        worth["depthwise"] * ((groups > 1) & (groups == ins)),
        *(worth["even"] * np.log2(np.gcd(channels // groups, WORD)) for channels in (ins, outs)),
        *(worth["tiles"] * np.log2(np.gcd(channels // groups, TILE).clip(WORD)) for channels in (ins, outs)),
        worth["pointwise"] * (kernel == 1),
        np.where(kernel == 1, worth["even_pointwise"], worth["even_places"]) * whole,
        *(worth[part] * (variant == part) for part in ("weight", "input")),
    ]
