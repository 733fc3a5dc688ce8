"""Seconds of slices of sequences, from a few of them: what goes by their length, and what by all they attend to.

A slice of a share x of the tokens that reaches over a share r of the sequence (itself and all before it) takes

    fixed + x · (by_length + by_reach · r)

Most operators go by the number of tokens; attention by the number of pairs of tokens; and calling them costs the same
for any slice. What fits best, with no part below nothing, is kept as (fixed seconds, and two shares of what whole
sequences take beyond them), since whole sequences are timed for many sizes of micro-batches and slices for one: a
larger micro-batch has more of the other two parts, and calls no more operators. The shares may sum to more than 1:
attention of a whole sequence need not look at later tokens at all, that of a slice masks them.

>>> terms([(0.5, 0.5, 2.75), (0.5, 1.0, 4.25), (0.25, 0.25, 1.25)], own=8.0, whole=16.0)       # 0.5 + x (1.5 + 6 r)
(1.0, 0.2, 0.8)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from trainplan.profile.profile import Floats

Point = tuple[float, float, float]  # share of the tokens, reach, seconds


def terms(points: Sequence[Point], own: float, whole: float, attends: bool = True) -> Floats:
    """What is kept of a block. `whole` are its seconds for whole sequences, as its profile has them, and `own` as they
    are when they are timed as slices are: by the ratio of the two, what slices take is put into proportion. A block
    that does not attend to other tokens goes by length alone."""
    share, reach, seconds = np.array(points, dtype=np.float64).T
    columns = np.column_stack([np.ones_like(share), share, share * reach])
    best, found = np.inf, np.zeros(3)
    parts = 3 if attends else 2
    for size in range(1, parts + 1):
        for chosen in itertools.combinations(range(parts), size):
            fit = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
            left = float(((columns[:, chosen] @ fit - seconds) ** 2).sum())
            if fit.min() >= 0 and left < best - 1e-18:
                best, found = left, np.zeros(3)
                found[list(chosen)] = fit
    if not own or not whole:
        return 0.0, 1.0, 0.0
    beyond = own - found[0]
    by_length, by_reach = (round(float(part), 12) for part in found[1:] / beyond) if beyond > 0 else (0.0, 0.0)
    return round(float(found[0] / own), 12) * whole, by_length, by_reach
