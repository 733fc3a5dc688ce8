"""The account of bytes: what each rank sends for each operation of a program, payload only.

A message is sent by one rank. What is gathered or scattered in equal shares goes from everybody to everybody else. Of a
sum everybody sends a part, and how much depends on who sums: in rounds of ours that is counted, gloo's own ring is
known to the byte (`exchanges/gloo.py`), and of NCCL, which chooses and does not say, it is what a ring would send.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.exchanges import BY_ROUNDS, TELLING, gloo, rounds_of
from trainplan.program.exchanges.rounds import sent as sent_in
from trainplan.program.ops import SENDS, SHARED_OUT, SPECS, Kind
from trainplan.program.program import Ints, Program

_AROUND = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # times that a ring goes round


def sent(program: Program, op: int) -> dict[int, int]:
    """Bytes that each rank sends for an operation; ranks that send nothing are left out. (Of the ranks of the cluster,
    also where one replica stands for all.)"""
    kind = Kind(int(program.kind[op]))
    if kind in SENDS:
        return {int(program.rank[op]): int(program.bytes[op])}
    c = program.classes[int(program.cost[op])]
    if c.inside:  # what ranks that share a pass exchange inside it, all of them alike
        ranks, share = len(c.sharing), c.until - c.since if kind is Kind.B else 1.0
        each = {part: _AROUND[part.what] * (ranks - 1) / ranks * part.bytes * part.times for part in c.inside}
        return dict.fromkeys(c.sharing, round(share * sum(each.values())))
    if not SPECS[kind].collective:
        return {}
    if kind in SHARED_OUT:
        ranks = len(c.members)
        return dict.fromkeys(c.members, c.bytes // ranks * (ranks - 1))
    sizes = summing(c.by, c.members, c.bytes, c.element, c.node)
    return {rank: size for rank, size in zip(c.members, sizes, strict=True) if size}


def sent_by_rank(program: Program) -> Ints:
    """Bytes that each rank sends a step."""
    ranks = max(
        program.world * program.slicers, 1 + max((max(c.sharing, default=0) for c in program.classes), default=0)
    )
    total = np.zeros(ranks, dtype=np.int64)
    for op in range(len(program)):
        for rank, size in sent(program, op).items():
            total[rank] += size
    return np.asarray(total // program.steps)


def summing(by: str, members: tuple[int, ...], size: int, element: int = 4, node: int = 0) -> tuple[int, ...]:
    """Bytes that each member sends for a sum of `size` bytes, whoever makes it.

    >>> summing("gloo", (0, 1, 2), 4000), summing("ring", (0, 1, 2), 4000), summing("nccl", (0, 1, 2), 4000)
    ((5336, 5328, 5336), (5336, 5332, 5332), (5333, 5333, 5333))
    >>> summing("telling", (0, 1, 2), 24, element=8)
    (48, 48, 48)
    """
    ranks = len(members)
    if by in (*BY_ROUNDS, TELLING):
        rounds = rounds_of(by, members, size // element, node)
        return tuple(element * elements for elements in sent_in(rounds, ranks))
    if by == "gloo":
        return gloo.sent(ranks, size, element)
    return (round(2 * (ranks - 1) / ranks * size),) * ranks
