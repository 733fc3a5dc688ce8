"""Convolutions with fewer products than are counted, as libraries run them in fp32 without tensor cores. No torch here.

A filter of n × n over tiles of 4 × 4 outputs needs (4 + n − 1)² products instead of 16 n² (Winograd's minimal
filtering; Lavin and Gray 2015, arXiv:1509.09308): a quarter of them for 3 × 3. In exchange the images, spread out to
overlapping tiles, are written and read once more on the way in, and so are the results on the way out (cudnn's
`WINOGRAD_NONFUSED`, which there is for 3 × 3 and 5 × 5 at stride 1). So it pays where channels are many, and where they
are few its bytes are what takes time.
"""

from __future__ import annotations

from math import ceil, sqrt

TILE = 4  # outputs of a tile, each way
SIDES = (3, 5)  # of filters


def winograd(shape: tuple[int, ...], item: int = 4) -> tuple[float, float] | None:
    """(share of the counted products that are left, bytes that are moved) of a forward pass; None: not so.

    `shape` is that of an operator: samples, channels in, out, places, places of the kernel, stride, groups. Backward is
    as much for the input, and again for the weights.

    >>> winograd((1, 64, 64, 56 * 56, 9, 1, 1))[0]
    0.25
    >>> winograd((1, 64, 64, 56 * 56, 9, 2, 1)) is None
    True
    """
    samples, ins, outs, places, kernel, stride, groups = shape
    side = round(sqrt(kernel))
    if side not in SIDES or side**2 != kernel or stride != 1 or groups != 1:
        return None
    padded = (TILE * ceil(sqrt(places) / TILE)) ** 2  # tiles are whole
    products = (TILE + side - 1) ** 2  # of a tile, for every pair of channels
    spread = products / TILE**2 * padded / places
    moved = samples * places * (ins + outs) * item * (1 + 2 * spread)
    return products / (TILE**2 * kernel) * padded / places, moved
