"""Lists and passes: every operation in its place, every micro-batch once through every stage.

1. *listed*: each operation stands exactly once in the list of each of its ranks, and in no other.
2. *once*: each micro-batch goes exactly once forward and once backward through each stage of its pipeline, and all
   stages see the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check.view import Fault, View, as_close, where
from trainplan.program.ops import SPECS, Kind
from trainplan.program.program import Bools, Ints, nonzero
from trainplan.program.wiring import Small

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
# What may be wrong with a pass: bits.
_AGAIN, _NEVER_BACK, _NEVER_FORWARD, _NO_WEIGHTS, _NO_INPUT = 1, 2, 4, 8, 16
_WHY = {
    _NEVER_BACK: "goes forward but never backward",
    _NEVER_FORWARD: "goes backward but never forward",
    _NO_WEIGHTS: "has the input part of backward but not the weights'",
    _NO_INPUT: "has the weights' part of backward but not the input's",
}


def listed(view: View) -> Iterator[Fault]:
    program, lists = view.program, view.program.lists
    stands, strange, lacking, sound = _misplaced(
        lists.start, lists.items, program.rank, program.group, view.wiring.member_start, view.member_place
    )
    if sound:
        return
    alone = program.group < 0
    for op in where(alone & lacking):
        yield Fault("listed", op, f"{program.name(op)} stands {stands[op]} times in the lists, not once")
    for entry in where(strange):
        op, rank = int(view.entry_op[entry]), view.entry_rank[entry]
        yield Fault("listed", op, f"{program.name(op)} stands in the list of rank {rank}, not its own")
    for op in where(~alone & lacking):
        ranks, wanted = sorted(view.entry_rank[view.entry_op == op].tolist()), list(program.members(op))
        why = f"{program.name(op)} is for ranks {wanted} and stands in the lists of {ranks}"
        yield Fault("listed", op, why)


@njit(cache=True)
def _misplaced(
    list_start: Ints, list_items: Ints, rank: Ints, group: Ints, member_start: Small, member_place: Small
) -> tuple[Ints, Bools, Bools, bool]:
    """How often each operation stands in the lists; whether an entry is in that of a strange rank; and whether an
    operation is not where it should be. A collective stands in the list of every member, as often as it has members.
    And whether all is as it should be."""
    stands, lacking = np.zeros(len(rank), np.int64), np.zeros(len(rank), np.bool_)
    strange = np.zeros(len(list_items), np.bool_)
    sound = True
    for own in range(len(list_start) - 1):
        for e in range(list_start[own], list_start[own + 1]):
            op = list_items[e]
            stands[op] += 1
            strange[e] = group[op] < 0 and rank[op] != own
            sound &= not strange[e]
    for op in range(len(rank)):
        lacking[op] = stands[op] != member_start[op + 1] - member_start[op]
        if group[op] >= 0:
            for k in range(member_start[op], member_start[op + 1]):
                lacking[op] |= member_place[k] < 0
        sound &= not lacking[op]
    return stands, strange, lacking, sound


def once(view: View) -> Iterator[Fault]:
    program, batch = view.program, view.names.batch
    wrong = judge(program.kind, as_close(units_of_passes(program.kind, batch, program.unit)), as_close(batch))
    if wrong.any():
        for op in where(wrong & _AGAIN):
            kind = Kind(int(program.kind[op]))
            yield Fault("once", op, f"{program.name(op)}: {SPECS[kind].what} runs a second time")
        for bit, why in _WHY.items():
            for op in where(wrong & bit):
                yield Fault("once", op, f"micro-batch of {program.name(op)} {why}")
    # All stages of a pipeline see the same micro-batches: as many as all of them together.
    ops = nonzero(program.kind == _F)
    if not len(ops):
        return
    line, stage = view.names.line[ops], program.stage[ops]
    walk = as_close(view.names.walk[ops])
    seen, counts = micro_batches(walk, as_close(walk * (int(stage.max()) + 1) + stage), line, stage)
    for one, lacking in zip(*np.nonzero((counts > 0) & (counts < seen[:, None])), strict=True):
        op = int(ops[(line == one) & (stage == lacking)][0])
        why = f"stage {lacking} sees {counts[one, lacking]} micro-batches where its pipeline has {seen[one]}"
        yield Fault("once", op, why)


@njit(cache=True)
def units_of_passes(kind: NDArray[np.uint8], batch: Ints, unit: Ints) -> Ints:
    """What a pass is about, as one number. (Others have units in other numbers, as the ticks of a lockstep, which would
    make a long table of a short one.)"""
    most = 0
    for op in range(len(kind)):
        if kind[op] <= _W:
            most = max(most, unit[op])
    found = batch * (most + 1)
    for op in range(len(kind)):
        if kind[op] <= _W:
            found[op] += unit[op]
    return found


@njit(cache=True)
def judge(kind: NDArray[np.uint8], exact: Ints, batch: Ints) -> NDArray[np.uint8]:
    """What is wrong with every pass."""
    wrong = np.zeros(len(kind), np.uint8)
    if not len(kind):
        return wrong
    run, there = np.zeros((4, exact.max() + 1), np.bool_), np.zeros((4, batch.max() + 1), np.bool_)
    for op in range(len(kind)):
        own = kind[op]
        if own <= _W:
            if run[own, exact[op]]:
                wrong[op] = _AGAIN
            run[own, exact[op]] = there[own, batch[op]] = True
    for op in range(len(kind)):
        own, at = kind[op], batch[op]
        if own == _F and not there[_B, at] and not there[_I, at]:
            wrong[op] |= _NEVER_BACK
        elif own in (_B, _I) and not there[_F, at]:
            wrong[op] |= _NEVER_FORWARD
        if own == _I and not there[_W, at]:
            wrong[op] |= _NO_WEIGHTS
        elif own == _W and not there[_I, at]:
            wrong[op] |= _NO_INPUT
    return wrong


@njit(cache=True)
def micro_batches(walk: Ints, walk_at_stage: Ints, line: Ints, stage: Ints) -> tuple[Ints, Ints]:
    """How many micro-batches every line has, and how many every stage of it sees."""
    seen, counts = np.zeros(line.max() + 1, np.int64), np.zeros((line.max() + 1, stage.max() + 1), np.int64)
    known, known_at_stage = np.zeros(walk.max() + 1, np.bool_), np.zeros(walk_at_stage.max() + 1, np.bool_)
    for k in range(len(walk)):
        if not known[walk[k]]:
            known[walk[k]] = True
            seen[line[k]] += 1
        if not known_at_stage[walk_at_stage[k]]:
            known_at_stage[walk_at_stage[k]] = True
            counts[line[k], stage[k]] += 1
    return seen, counts
