"""TeraPipe's slices: cutting a sequence so that short slices fill the pipeline and long ones waste no time.

With causal attention a sequence can go through K stages slice by slice (Li et al., ICML 2021). A slice of l tokens
after c earlier ones takes t(l, c) on a stage: it grows with c, as later tokens attend to more, so the best slices get
shorter. All slices pass the slowest, K − 1 times while the pipeline fills:

    time = Σ t_i + (K − 1) · max t_i

For each t_max among the values of t, rising, the best slicing that never exceeds it is a plain dynamic program:

    S(n) = min over l with t(l, n − l) ≤ t_max of  S(n − l) + t(l, n − l)           value = S(tokens) + (K − 1) · t_max

O(tokens²) each, O(tokens⁴) in all; it stops when (K − 1) · t_max alone is worse than the best. Exact.

Two ways to try fewer values: `epsilon` rounds each up to a multiple and tries each multiple once, which loses at most
(K − 1) · epsilon. TeraPipe's code instead skips a value less than 10⁻⁵ above the last one tried, which bounds nothing
(a row of close values may be skipped all the way), and counts tokens in eights, which the caller of this does by giving
a table in units of eight.

**Batches.** The sequences of a batch may be cut into groups that go one after the other, each sliced in its own way,
with the longest slice of all counting once: for the same t_max, G(n) = min over b of G(n − b) + S_b(tokens).

>>> tokens = [[2 + l + 0.25 * l * (c + l / 2) for c in range(8)] for l in range(1, 9)]
>>> slices(tokens, stages=2)
Slicing(groups=(1,), slices=((4, 2, 2),), value=30.0)
>>> slices(tokens, stages=4).slices
((3, 2, 1, 1, 1),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from trainplan.errors import InputError, PlanError
from trainplan.solve.partition.instance import Floats, Ints


@dataclass(frozen=True)
class Slicing:
    """Groups of sequences, one after the other, and the slices of each."""

    groups: tuple[int, ...]  # sequences in each group
    slices: tuple[tuple[int, ...], ...]  # tokens (or units of tokens) of each slice
    value: float  # seconds


def slices(
    seconds: Sequence[Sequence[float]] | Floats, stages: int, epsilon: float = 0.0, batch: int = 1, count: int = 0
) -> Slicing:
    """The best slices of sequences of L units on so many stages; where a `count` is given, just so many slices.

    `seconds[l − 1][c]`: a slice of l units after c others, one sequence at a time, or `seconds[b − 1][l − 1][c]`: the
    same for b sequences at a time; infinite where that is not possible. What lies beyond the sequence (l + c > L) is
    not read.
    """
    table = np.asarray(seconds, dtype=np.float64)
    table = table[None] if table.ndim == 2 else table
    if table.ndim != 3 or table.shape[1] != table.shape[2] or not table.size:
        why = "slices need seconds by length and by tokens before them"
        raise InputError(f"a table of shape {table.shape}", why, "as many rows as columns: (L, L), or (B, L, L)")
    if stages < 1 or epsilon < 0 or batch < 1:
        asked = f"{stages} stages, epsilon {epsilon}, batch {batch}"
        raise InputError(asked, "counts start at 1, and epsilon at 0", "stages=2, epsilon=0, batch=1")
    units = table.shape[1]
    if not 0 <= count <= units:
        raise PlanError(f"{count} slices of {units} units", "a slice has at least one", f"at most {units}")
    inside = np.add.outer(np.arange(1, units + 1), np.arange(units)) <= units
    tried = np.unique(table[:, inside])
    tried = tried[np.isfinite(tried)]
    if epsilon > 0:
        tried = np.unique(np.ceil(tried / epsilon)) * epsilon
    value, groups, choice = _try_all(table, tried, stages, batch, count)
    if not np.isfinite(value):
        why = f"no way to cut {units} units of {batch} sequences has only slices of finite time"
        raise PlanError(f"slices on {stages} stages", why, "a table with shorter slices in it")
    found, left = list[int](), batch
    while left > 0:
        found.append(int(groups[left]))
        left -= found[-1]
    return Slicing(tuple(found), tuple(_read(choice[size - 1], units, count) for size in found), float(value))


def _read(choice: Ints, units: int, count: int) -> tuple[int, ...]:
    found, left = list[int](), units
    while left > 0:
        found.append(int(choice[count, left]))
        left -= found[-1]
        count = max(0, count - 1)
    return tuple(found[::-1])


@njit(cache=True)
def _try_all(table: Floats, tried: Floats, stages: int, batch: int, count: int) -> tuple[float, Ints, Ints]:
    """The best value, the last group of every part of the batch, and the last slice of every part of a sequence (in
    just k slices, for every k up to the count; in any number of them where there is no count)."""
    sizes, units = table.shape[0], table.shape[1]
    best = np.inf
    best_groups, best_choice = np.zeros(batch + 1, np.int64), np.zeros((sizes, count + 1, units + 1), np.int64)
    groups, choice = best_groups.copy(), best_choice.copy()
    total, least = np.zeros(batch + 1), np.full((count + 1, units + 1), np.inf)
    least[0, 0] = 0.0  # nothing is cut into no slices; with a count, nothing else is
    whole = np.zeros(sizes)
    for longest in tried:
        if (stages - 1) * longest >= best:
            break
        for b in range(min(sizes, batch)):
            for k in range(min(count, 1), count + 1):
                before = max(0, k - 1)
                for n in range(1, units + 1):
                    least[k, n] = np.inf
                    for l in range(1, n + 1):
                        own = table[b, l - 1, n - l]
                        if own <= longest and least[before, n - l] + own < least[k, n]:
                            least[k, n], choice[b, k, n] = least[before, n - l] + own, l
            whole[b] = least[count, units]
        for n in range(1, batch + 1):
            total[n] = np.inf
            for b in range(1, min(sizes, n) + 1):
                if total[n - b] + whole[b - 1] < total[n]:
                    total[n], groups[n] = total[n - b] + whole[b - 1], b
        if total[batch] + (stages - 1) * longest < best:
            best = total[batch] + (stages - 1) * longest
            best_groups[:], best_choice[:] = groups, choice
    return best, best_groups, best_choice
