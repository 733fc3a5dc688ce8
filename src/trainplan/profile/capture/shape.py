"""The shape of a tensor as a function of the number of samples.

>>> Shape(((1, 0), (0, 64)), torch.float32).at(8)
(8, 64)
>>> Shape(((1, 0), (0, 64)), torch.float32).bytes_per_sample
256.0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

SAMPLES = sympy.Symbol("samples", integer=True, positive=True)


def in_samples(expression: sympy.Expr, symbols: frozenset[sympy.Symbol]) -> sympy.Expr:
    """An expression of a trace, in which each input's first dimension has a symbol of its own, in `SAMPLES`."""
    return expression.xreplace(dict.fromkeys(symbols, SAMPLES))


@dataclass(frozen=True)
class Shape:
    """Every dimension is a·samples + b."""

    dimensions: tuple[tuple[int, int], ...]  # (a, b)
    dtype: torch.dtype

    @staticmethod
    def of(value: Tensor, symbols: frozenset[sympy.Symbol]) -> Shape | None:
        """The shape of a traced value, or None where it is not a linear function of the samples."""
        dimensions = []
        for size in value.shape:
            if isinstance(size, int):
                dimensions.append((0, size))
                continue
            line = _line(in_samples(size.node.expr, symbols))
            if line is None:
                return None
            dimensions.append(line)
        return Shape(tuple(dimensions), value.dtype)

    def at(self, samples: int) -> tuple[int, ...]:
        return tuple(a * samples + b for a, b in self.dimensions)

    def bytes(self, samples: int) -> int:
        return torch.Size(self.at(samples)).numel() * self.dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the batch."""
        return self.bytes(0)

    @property
    def bytes_per_sample(self) -> float:
        """Bytes that each sample adds (at one sample, should the tensor grow faster than the batch)."""
        return float(self.bytes(1) - self.bytes(0))


@lru_cache(maxsize=4096)
def _line(expression: sympy.Expr) -> tuple[int, int] | None:
    """(a, b) of an expression that is a·samples + b with whole numbers, else None."""
    if expression.is_Integer:
        return 0, int(expression)
    polynomial = expression.as_poly(SAMPLES) if expression.free_symbols == {SAMPLES} else None
    if polynomial is None or polynomial.degree() > 1:
        return None
    slope, offset = polynomial.coeff_monomial(SAMPLES), polynomial.coeff_monomial(1)
    return (int(slope), int(offset)) if slope.is_Integer and offset.is_Integer else None
