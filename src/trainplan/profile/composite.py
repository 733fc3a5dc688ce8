"""Operators that are many products, one after the other: what they consist of, and their FLOPs. No torch here.

A recurrent layer multiplies its whole sequence with the weights of its input at once, and what it remembers once a
step: the rows of these products are the samples, and no two steps of a layer can be at the same time. (cudnn's standard
algorithm. It can also keep weights in registers, and begin a layer before the one below is over: not counted on.)
Going back, each product is two: for what was read, in the same order, and for its weights, over all steps at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from trainplan.profile.op import RECURRENT, Op

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
TRILINEAR = "_trilinear"
COMPOSITE = RECURRENT | {TRILINEAR}


def recurrent_flops(shape: tuple[int, ...], backward: bool = False) -> float:
    """FLOPs of the products of recurrent layers; the shape is that of `Op.shape`.

    >>> recurrent_flops((256, 64, 2048, 2048, 4, 1, 1, 2048)) == 2 * 256 * 64 * 4 * 2048 * (2048 + 2048)
    True
    """
    return sum(count * 2.0 * prod(sizes) for sizes, count, _ in _multiplied(shape, backward))


def pieces(op: Op) -> Iterator[tuple[Op, int]]:
    """The operators that a composite one consists of, and how many there are of each."""
    if op.name == TRILINEAR:  # a product for each place of the dimension that it goes along
        rows, inner, columns = op.shape
        each = 2.0 * rows * inner * columns
        yield _product((rows, inner, columns), "nn", op), max(1, round(op.flops / each)) if each else 1
        return
    backward = op.name.endswith("backward")
    for sizes, count, layout in _multiplied(op.shape, backward):
        yield _product(sizes, layout, op), count
    steps, batch, _, hidden, gates, layers, directions, _ = op.shape
    size = _size(op)
    numbers = batch * hidden * gates * size
    # What becomes of the gates in each step is one kernel.
    moved = Op("sigmoid", 0.0, 2 * numbers, numbers, precision=op.precision, elements=batch * hidden * gates)
    yield moved, steps * layers * directions


def _multiplied(shape: tuple[int, ...], backward: bool) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """(rows, inner, columns), how many of them, and how their factors lie."""
    steps, batch, width, hidden, gates, layers, directions, out = shape
    wide, every = gates * hidden, steps * batch
    for number in range(layers):
        given = width if number == 0 else directions * out
        # (terms of a sum, columns) of what is multiplied once for the sequence, and of what is, step by step
        at_once, by_step = [(given, wide)], [(out, wide)] + [(hidden, out)] * (out != hidden)
        for inner, columns in at_once:
            yield (every, columns, inner) if backward else (every, inner, columns), directions, _way(backward)
        for inner, columns in by_step:
            yield (batch, columns, inner) if backward else (batch, inner, columns), steps * directions, _way(backward)
        if backward:
            for inner, columns in at_once + by_step:
                yield (columns, every, inner), directions, "tn"


def _way(backward: bool) -> str:
    return "nn" if backward else "nt"


def _product(sizes: tuple[int, int, int], layout: str, op: Op) -> Op:
    rows, inner, columns = sizes
    size = _size(op)
    read, written = size * inner * (rows + columns), size * rows * columns
    return Op("mm", 2.0 * prod(sizes), read, written, sizes, precision=op.precision, layout=layout)


def _size(op: Op) -> int:
    return 2 if op.precision in ("bf16", "fp16") else 8 if op.precision == "fp64" else 4
