"""Convolutions with fewer products than are counted, as libraries run them in fp32 without tensor cores. No torch here.

A filter of n × n over tiles of m × m outputs needs (m + n − 1)² products instead of m² n² (Winograd's minimal
filtering; Lavin and Gray 2015, arXiv:1509.09308). cudnn has it twice:

* `WINOGRAD`, for 3 × 3 at stride 1, in one kernel with tiles of 2 × 2: 4/9 of the products, and no more bytes. There is
  none for the gradient of the weights. Its rule of thumb chooses it (pytorch#13412 has a trace of kernels without
  `cudnn.benchmark`: forward and for the input it is among the first, for the weights there are products alone).
* `WINOGRAD_NONFUSED`, for 3 × 3 and 5 × 5 at stride 1, with tiles of 4 × 4: a quarter of the products of 3 × 3. In
  exchange the images, spread out to overlapping tiles, are written and read once more on the way in, and so are the
  results on the way out. So it pays where channels are many, and where they are few its bytes are what takes time. It
  is found by trying (`cudnn.benchmark`, as published benchmarks set it, and as torch does not by itself), and is what
  pipedream's layers of VGG-16 show on a V100: up to 2.6 times the counted products that the peak allows.
"""

from __future__ import annotations

from math import ceil, sqrt

FUSED = 2  # outputs of a tile, each way, in one kernel
TILE = 4  # and in several
SIDES = (3, 5)  # of filters


def fused(shape: tuple[int, ...]) -> float | None:
    """Share of the counted products that one kernel leaves, forward or for the input; None: it is not for this one.

    `shape` is that of an operator: samples, channels in, out, places, places of the kernel, stride, groups.

    >>> round(fused((1, 64, 64, 56 * 56, 9, 1, 1)), 3), fused((1, 64, 64, 56 * 56, 25, 1, 1))
    (0.444, None)
    """
    _, _, _, places, kernel, stride, groups = shape
    if kernel != 9 or stride != 1 or groups != 1:
        return None
    return (FUSED + 2) ** 2 / (FUSED**2 * kernel) * _whole(places, FUSED) / places


def in_steps(shape: tuple[int, ...], item: int = 4) -> tuple[float, float] | None:
    """(share of the counted products that are left, bytes that are moved) of a forward pass; None: not so.

    Backward is as much for the input, and again for the weights.

    >>> in_steps((1, 64, 64, 56 * 56, 9, 1, 1))[0]
    0.25
    >>> in_steps((1, 64, 64, 56 * 56, 9, 2, 1)) is None
    True
    """
    samples, ins, outs, places, kernel, stride, groups = shape
    side = round(sqrt(kernel))
    if side not in SIDES or side**2 != kernel or stride != 1 or groups != 1:
        return None
    padded = _whole(places, TILE)
    products = (TILE + side - 1) ** 2  # of a tile, for every pair of channels
    spread = products / TILE**2 * padded / places
    moved = samples * places * (ins + outs) * item * (1 + 2 * spread)
    return products / (TILE**2 * kernel) * padded / places, moved


def _whole(places: int, tile: int) -> int:
    """Places of an image in whole tiles."""
    return (tile * ceil(sqrt(places) / tile)) ** 2
