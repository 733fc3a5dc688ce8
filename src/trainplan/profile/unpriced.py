"""Operators of which nothing is known but their bytes: an estimate prices them by these, and says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from trainplan.profile.device.families import family_of

# Parts of the names of operators that do little more than read and write: they make, move, sort or sum up numbers.
_BY_BYTES = (
    "all", "amax", "amin", "any", "arange", "arg", "as_strided", "bernoulli", "bincount", "bucketize", "copy", "cum",
    "diag", "empty", "eye", "fill", "flip", "fold", "full", "grid_sampl", "isin", "lift", "linspace", "local_scalar",
    "logsumexp", "loss", "mask", "max", "mean", "min", "new_", "nonzero", "normal", "norm", "one_hot", "ones", "pad",
    "prod", "rand", "repeat", "resize", "roll", "scalar", "select", "shuffle", "slice", "sort", "split", "stack", "std",
    "sum", "topk", "transpose", "tri", "uniform", "unsafe", "upsample", "var", "where", "zero",
)  # fmt: skip
_DO_MORE = ("ctc", "linalg", "fft", "trilinear", "triangular")  # whatever else is in their names


def is_unpriced(function: OpOverload) -> bool:
    """Whether an operator without FLOPs of ours is neither element by element, nor a reduction, nor a move.

    >>> aten = torch.ops.aten
    >>> [is_unpriced(f) for f in (aten.add.Tensor, aten.sum.default, aten._fft_r2c.default, aten.stack.default)]
    [False, False, True, False]
    """
    name = function.overloadpacket.__name__
    if any(word in name for word in _DO_MORE):
        return True
    if {torch.Tag.pointwise, torch.Tag.reduction} & set(function.tags) or family_of(name) != "elementwise":
        return False
    # Of what is done in place, or goes back, only the plain one may be marked.
    plain = name.removesuffix("_backward").rstrip("_")
    return not any(word in plain for word in _BY_BYTES) and not _is_pointwise(plain)


def _is_pointwise(name: str) -> bool:
    """Whether there is such an operator, and it is element by element."""
    there = getattr(torch.ops.aten, name, None)
    return there is not None and any(torch.Tag.pointwise in getattr(there, which).tags for which in there.overloads())


def note(names: Iterable[str]) -> tuple[str, ...]:
    """What a profile says of them."""
    found = sorted(set(names))
    return (f"estimated by its bytes alone, whatever it computes: {', '.join(found)}",) if found else ()
