"""Bytes over time: a running sum over the program that really runs.

A value counts on its rank from the start of the operation that makes it to the end of the operation that frees it;
what has no maker is there from the start, what is never freed stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainplan.predict.clock import Played
from trainplan.program.ops import Kind, Value


@dataclass(frozen=True)
class Peak:
    """The worst moment of a rank."""

    rank: int
    bytes: int
    op: str  # the operation that was starting then; "" where nothing is ever allocated
    breakdown: dict[str, int]  # bytes by kind of value at that moment


def peaks(played: Played) -> list[Peak]:
    """The peak of every rank, with the operation at which it is reached."""
    program = played.program
    place = np.empty(len(program), dtype=np.int64)
    place[program.lists.items] = np.arange(len(program.lists.items))
    here = np.flatnonzero((program.value_rank >= 0) & (program.value_bytes > 0))
    made, freed = program.value_maker[here], program.value_end[here]
    born, dies = here[made >= 0], here[freed >= 0]
    value = np.concatenate([born, dies])
    op = np.concatenate([made[made >= 0], freed[freed >= 0]])
    sign = np.concatenate([np.ones(len(born), dtype=np.int64), -np.ones(len(dies), dtype=np.int64)])
    time = np.where(sign > 0, played.start[op], played.end[op])
    # At equal times in the order of the lists: an operation that ended makes room for the next, and one without
    # duration takes before it gives back.
    order = np.lexsort((2 * place[op] + (sign < 0), time, program.value_rank[value]))
    value, op, sign = value[order], op[order], sign[order]
    delta = sign * program.value_bytes[value]
    rank = program.value_rank[value]
    base = np.zeros((program.world, len(Value)), dtype=np.int64)
    first = program.initial
    first = first[program.value_rank[first] >= 0]
    np.add.at(base, (program.value_rank[first], program.value_kind[first]), program.value_bytes[first])
    bounds = np.searchsorted(rank, np.arange(program.world + 1))
    found = []
    for r in range(program.world):
        low, high = bounds[r], bounds[r + 1]
        level = base[r].sum() + np.cumsum(delta[low:high])
        parts, name, top = base[r].copy(), "", int(base[r].sum())
        if high > low and level.max() > top:
            at = int(level.argmax())
            top, name = int(level[at]), program.name(int(op[low + at]))
            until = slice(low, low + at + 1)
            np.add.at(parts, program.value_kind[value[until]], delta[until])
        breakdown = {kind.name.lower(): int(parts[kind]) for kind in Value if parts[kind]}
        found.append(Peak(r, top, name, breakdown))
    return found


def in_flight(played: Played, rank: int) -> int:
    """The most forward passes of a rank whose backward has not ended, at any time: activations held at once."""
    program = played.program
    begins: dict[tuple[int, ...], tuple[float, int, int]] = {}  # micro-batch → when its forward begins
    ends: dict[tuple[int, ...], tuple[float, int, int]] = {}  # … and when its backward is over
    columns = (program.job, program.step, program.pipeline, program.stage, program.micro_batch, program.slice)
    for place, op in enumerate(program.lists.row(rank).tolist()):
        key = tuple(int(column[op]) for column in columns)
        if program.kind[op] == Kind.F:
            begins.setdefault(key, (float(played.start[op]), 2 * place, 1))
        elif program.kind[op] in (Kind.B, Kind.W):
            ends[key] = (float(played.end[op]), 2 * place + 1, -1)
    changes = sorted([*begins.values(), *ends.values()])
    return int(np.cumsum([change for _, _, change in changes]).max(initial=0))
