"""Lists and passes: every operation in its place, every micro-batch once through every stage.

1. *listed*: each operation stands exactly once in the list of each of its ranks, and in no other.
2. *once*: each micro-batch goes exactly once forward and once backward through each stage of its pipeline, and all
   stages see the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainplan.program.check.view import Fault, View, pack, where
from trainplan.program.ops import SPECS, Kind
from trainplan.program.program import Bools, Ints


def listed(view: View) -> Iterator[Fault]:
    program = view.program
    alone = program.group < 0
    stands = np.bincount(view.entry_op, minlength=len(program))
    for op in where(alone & (stands != 1)):
        yield Fault("listed", int(op), f"{program.name(op)} stands {stands[op]} times in the lists, not once")
    strange = alone[view.entry_op] & (program.rank[view.entry_op] != view.entry_rank)
    for entry in where(strange):
        op = int(view.entry_op[entry])
        yield Fault(
            "listed", op, f"{program.name(op)} stands in the list of rank {view.entry_rank[entry]}, not its own"
        )
    # A collective stands in the list of every member, and as often as it has members.
    members = np.diff(view.wiring.member_start)
    missing = np.zeros(len(program), dtype=bool)
    missing[np.repeat(np.arange(len(program)), members)[view.member_place < 0]] = True
    for op in where(~alone & (missing | (stands != members))):
        ranks, wanted = sorted(view.entry_rank[view.entry_op == op].tolist()), list(program.members(op))
        why = f"{program.name(op)} is for ranks {wanted} and stands in the lists of {ranks}"
        yield Fault("listed", op, why)


def once(view: View) -> Iterator[Fault]:
    program = view.program
    of = {kind: program.kind == kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for kind, chosen in of.items():
        ops = np.flatnonzero(chosen)
        if not len(ops) or np.bincount(_close(view.exact[ops])).max() == 1:
            continue
        order = ops[np.argsort(view.exact[ops], kind="stable")]
        for op in order[1:][np.diff(view.exact[order]) == 0]:
            yield Fault("once", int(op), f"{program.name(op)}: {SPECS[kind].what} runs a second time")
    backward = of[Kind.B] | of[Kind.I]
    yield from _same(view, of[Kind.F], backward, "goes forward but never backward")
    yield from _same(view, backward, of[Kind.F], "goes backward but never forward")
    yield from _same(view, of[Kind.I], of[Kind.W], "has the input part of backward but not the weights'")
    yield from _same(view, of[Kind.W], of[Kind.I], "has the weights' part of backward but not the input's")
    # All stages of a pipeline see the same micro-batches: as many as all of them together.
    ops = np.flatnonzero(of[Kind.F])
    if not len(ops):
        return
    line, stage = pack(program, "job", "pipeline")[ops], program.stage[ops]
    walk = pack(program, "job", "pipeline", "step", "micro_batch", "slice")[ops]
    seen = np.bincount(_distinct(walk, line))
    widest = int(stage.max()) + 1
    counts = np.bincount(_distinct(walk * widest + stage, line * widest + stage), minlength=len(seen) * widest)
    counts = counts.reshape(len(seen), widest)
    for one, lacking in zip(*np.nonzero((counts > 0) & (counts < seen[:, None])), strict=True):
        op = int(ops[(line == one) & (stage == lacking)][0])
        why = f"stage {lacking} sees {counts[one, lacking]} micro-batches where its pipeline has {seen[one]}"
        yield Fault("once", op, why)


def _distinct(key: Ints, label: Ints) -> Ints:
    """The label of every key that occurs, once each."""
    key = _close(key)
    found = np.full(int(key.max()) + 1, -1, dtype=np.int64)
    found[key] = label
    return found[found >= 0]


def _close(key: Ints) -> Ints:
    """The keys, or where they are few and far apart (ticks of a lockstep) their places: a table of all between them
    would be larger than what it is for.

    >>> _close(np.array([3, 1, 3])).tolist(), _close(np.array([10**9, 5, 10**9])).tolist()
    ([3, 1, 3], [1, 0, 1])
    """
    if key.max() < 8 * len(key):
        return key
    return np.asarray(np.unique(key, return_inverse=True)[1], dtype=np.int64)


def _same(view: View, left: Bools, right: Bools, why: str) -> Iterator[Fault]:
    if not left.any():
        return
    there = np.zeros(int(view.batch.max()) + 1, dtype=bool)
    there[view.batch[right]] = True
    ops = np.flatnonzero(left)
    for op in ops[~there[view.batch[ops]]]:
        yield Fault("once", int(op), f"micro-batch of {view.program.name(op)} {why}")
