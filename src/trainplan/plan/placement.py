"""Where every stage runs: a table (pipeline, stage) → ranks.

A replica of the model is one pipeline, or several **lines** that share its ranks and its weights: two directions
(Chimera, GEMS), or the ways through stages of which some have more ranks than others (`dp=2,1,1`). A micro-batch stays
in its line. The table holds the lines of replica 0, then those of replica 1, and so on.

By default the ranks that share a stage between them (tensor parallelism) stand side by side, then the replicas of a
stage, so that what is exchanged most stays inside a node and activations cross.

Which stages share a rank is part of most orders of work (rank r of an interleaved pipeline has stages r, p + r, …), and
a table of one's own may then only say which rank is which. Orders that write a list for each stage (`ANY_TABLE`) go
with any table: the lists of the stages on a rank are merged into one.

>>> placement(dp=2, local=lines("1f1b", ranks=2))
(((0,), (2,)), ((1,), (3,)))
>>> placement(dp=1, local=lines("1f1b", ranks=2), tp=2)
(((0, 1), (2, 3)),)
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

Placement = tuple[tuple[tuple[int, ...], ...], ...]  # pipeline → stage → ranks (more than one: tensor parallelism)
Lines = tuple[tuple[int, ...], ...]  # line → stage → place among the ranks of one replica

ANY_TABLE = ("naive", "gpipe", "lockstep", "1f1b", "1f1b-early", "zb-h1", "zb-h2")


def lines(
    schedule: str, ranks: int, chunks: int = 1, pairs: int = 1, spread: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """The lines of one replica, as the order of work wants them.

    >>> lines("interleaved", ranks=2, chunks=2), lines("zb-v", ranks=2, chunks=2), lines("gems", ranks=3)
    (((0, 1, 0, 1),), ((0, 1, 1, 0),), ((0, 1, 2), (2, 1, 0)))
    >>> lines("chimera", ranks=4, pairs=2)
    ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2))
    >>> lines("1f1b", ranks=3, spread=(2, 1))           # two ranks for the first stage
    ((0, 2), (1, 2))
    """
    if spread:
        begin = [sum(spread[:stage]) for stage in range(len(spread))]
        ways = range(math.lcm(*spread))
        return tuple(tuple(first + way % count for first, count in zip(begin, spread, strict=True)) for way in ways)
    down = tuple(stage % ranks for stage in range(ranks * chunks))
    if schedule == "zb-v":
        return ((*range(ranks), *reversed(range(ranks))),)
    if schedule == "gems":
        return down, down[::-1]
    if schedule.startswith("chimera"):
        shifts = [pair * ranks // pairs for pair in range(pairs)]
        return tuple(tuple((r + shift) % ranks for r in way) for shift in shifts for way in (down, down[::-1]))
    return (down,)


def renamed(usual: Lines, table: tuple[int, ...]) -> Lines | None:
    """The usual lines where the first has its stages on the ranks of a table; None where other stages share a rank.

    >>> renamed(((0, 1, 1, 0),), (1, 0, 0, 1)), renamed(((0, 1), (1, 0)), (1, 0))
    (((1, 0, 0, 1),), ((1, 0), (0, 1)))
    >>> renamed(((0, 1, 0, 1),), (0, 1, 1, 0)) is None
    True
    """
    named = set(zip(usual[0], table, strict=False))
    names = dict(named)
    everyone = {rank for line in usual for rank in line}
    if len(table) != len(usual[0]) or not len(named) == len(everyone) == len(set(names.values())):
        return None
    return tuple(tuple(names[rank] for rank in line) for line in usual)


@lru_cache(maxsize=1024)
def placement(dp: int, local: Lines, tp: int = 1) -> Placement:
    """The table of so many replicas, whose stages have so many ranks each. Plans share it: it is as long as there are
    ranks. One without stages is no plan, and whoever says so names it by its table: that is empty."""
    places = 1 + max((place for line in local for place in line), default=-1)
    groups = list(zip(*(range(first, places * dp * tp, tp) for first in range(tp)), strict=True))  # by place, replica
    by_line = [zip(*(groups[place * dp : (place + 1) * dp] for place in line), strict=True) for line in local]
    return tuple(itertools.chain.from_iterable(zip(*by_line, strict=True)))
