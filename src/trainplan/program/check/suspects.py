"""Which rules a program may break, found out in one compiled pass over it.

Nearly every program breaks none, and then there is nothing to be said in words. Each rule's own judge is called here,
with the same arguments, and all that is kept of what it finds is whether there is anything; a rule of which there is
something looks once more, and says where (`specification.py`). Rules about what few programs have (barriers, loads,
copies to the host) are asked wherever that is there.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check import memory, messages, order, passes, weights
from trainplan.program.check.view import View, as_close, as_names
from trainplan.program.ops import COPIES, Kind, Value
from trainplan.program.program import Bools, Ints, are
from trainplan.program.wiring import Small, run_without_time

_F, _STEP, _BARRIER = int(Kind.F), int(Kind.STEP), int(Kind.BARRIER)
_BOUNDARY, _MESSAGE, _INPUT = int(Value.BOUNDARY), int(Value.MESSAGE), int(Value.INPUT)
_COPY = are(COPIES)
# In the order in which `specification.RULES` has them.
_ONCE, _MATCHED, _HANDED_OVER, _ALIVE, _UPDATED, _GATHERED, _FRESH, _ENDS, _ORDERED, _APART, _LOADED, _BACK = range(12)


def suspects(view: View) -> list[bool]:
    """Of every rule (but that of lists, which all others need) whether it may have a fault to tell: it has none where
    this says no."""
    p, wiring = view.program, view.wiring
    return list(
        _suspects(
            p.kind, p.job, p.step, p.pipeline, p.stage, p.unit, p.micro_batch, p.slice, p.peer_stage, p.rank, p.peer,
            p.bytes, p.group, p.version, p.waits, p.lists.start, p.lists.items, p.reads.start, p.reads.items,
            p.value_kind, p.value_rank, p.value_maker, p.value_end, p.staleness, view.place, view.member_place,
            view.listed, wiring.free, wiring.unmet, wiring.successor_start, wiring.successor_items,
            wiring.member_start, wiring.member_items, wiring.attended,
        ).tolist()
    )  # fmt: skip


@njit(cache=True)
def _suspects(
    kind: NDArray[np.uint8], job: Ints, step: Ints, pipeline: Ints, stage: Ints, unit: Ints, micro: Ints, slice_: Ints,
    peer_stage: Ints, rank: Ints, peer: Ints, bytes_: Ints, group: Ints, version: Ints, waits: Bools, list_start: Ints,
    list_items: Ints, read_start: Ints, read_items: Ints, value_kind: NDArray[np.uint8], value_rank: Ints, maker: Ints,
    end: Ints, staleness: int, place: Ints, member_place: Small, listed: Bools, free: Bools, unmet: Small,
    successor_start: Small, successor_items: Small, member_start: Small, member_items: Small, attended: Small,
) -> Bools:  # fmt: skip
    found, world = np.zeros(12, np.bool_), len(list_start) - 1
    exact, batch, passed, walk, line, home, turn = as_names(job, step, pipeline, stage, micro, slice_, unit)
    found[_ONCE] = _goes_astray(kind, unit, stage, batch, walk, line)
    sent = messages.judge(
        kind, rank, peer, stage, peer_stage, passed, bytes_, value_kind == _MESSAGE, value_rank, maker, read_start,
        read_items, messages.SENDING, messages.RECEIVING, messages.TWIN,
    )  # fmt: skip
    found[_MATCHED] = sent[3].any() or sent[4].any()
    found[_HANDED_OVER] = _left_lying(kind, stage, read_start, read_items, value_kind, maker, end)
    values, readings = memory.judge(
        value_rank, maker, end, read_start, read_items, listed, member_start, member_items, member_place
    )
    found[_ALIVE] = values.any() or readings.any()
    idle = weights.summing(
        kind, weights.EXCHANGES, read_start, read_items, maker, value_rank, member_start, member_items
    )  # fmt: skip
    found[_UPDATED] = idle.any() or _steps_amiss(kind, exact, home, turn, rank, world, place)
    shares = False
    for op in range(len(kind)):
        shares |= weights.SHARES[kind[op]]
        found[_APART] |= kind[op] == _BARRIER
        found[_BACK] |= _COPY[kind[op]]
    if shares:
        lacking, _ = weights.not_gathered(
            kind, weights.READS_WEIGHTS, weights.GATHERING, step, stage, rank, micro, unit, world, place, value_kind,
            maker, end, read_start, read_items, member_start, member_items,
        )  # fmt: skip
        found[_GATHERED] = len(lacking) > 0
    stale, _ = weights.stale(
        kind, weights.READS_WEIGHTS, step, version, batch, staleness, value_kind, maker, read_start, read_items
    )  # fmt: skip
    found[_FRESH] = stale.any()
    done = run_without_time(
        list_start, list_items, waits, free, unmet, successor_start, successor_items, member_start,
        member_items, attended, rank, group >= 0,
    )  # fmt: skip
    found[_ENDS] = not done.all()
    found[_ORDERED] = not order.in_order(list_start, list_items, group, listed)
    for v in range(len(maker)):
        found[_LOADED] |= value_kind[v] == _INPUT and maker[v] >= 0
    return found


@njit(cache=True)
def _goes_astray(kind: NDArray[np.uint8], unit: Ints, stage: Ints, batch: Ints, walk: Ints, line: Ints) -> bool:
    """Whether a pass runs twice or not at all, or a stage does not see a micro-batch of its pipeline."""
    wrong = passes.judge(kind, as_close(passes.units_of_passes(kind, batch, unit)), as_close(batch))
    if wrong.any():
        return True
    ops = np.flatnonzero(kind == _F)
    if not len(ops):
        return False
    of, at = as_close(walk[ops]), stage[ops]
    seen, counts = passes.micro_batches(of, as_close(of * (at.max() + 1) + at), line[ops], at)
    for one in range(len(seen)):
        for own in range(counts.shape[1]):
            if 0 < counts[one, own] < seen[one]:
                return True
    return False


@njit(cache=True)
def _left_lying(
    kind: NDArray[np.uint8], stage: Ints, read_start: Ints, read_items: Ints, value_kind: NDArray[np.uint8],
    maker: Ints, end: Ints,
) -> bool:  # fmt: skip
    """Whether what a stage makes for another is not taken by it (`messages.handed_over`)."""
    sent, taken = np.zeros(len(maker), np.bool_), np.zeros(len(maker), np.bool_)
    for op in range(len(kind)):
        forward, back = messages.FORWARD[kind[op]], messages.BACKWARD[kind[op]]
        for k in range(read_start[op], read_start[op + 1]):
            v = read_items[k]
            sent[v] |= forward
            taken[v] |= back and end[v] >= 0 and stage[end[v]] == stage[op]
    for v in range(len(maker)):
        if value_kind[v] != _BOUNDARY or maker[v] < 0:
            continue
        by, until = maker[v], end[v]
        if kind[by] == _F and not sent[v]:
            return True
        gives = messages.BACKWARD[kind[by]] and until >= 0 and messages.GATHERING[kind[until]]
        if gives and stage[by] != stage[until] and not taken[v]:
            return True
    return False


@njit(cache=True)
def _steps_amiss(
    kind: NDArray[np.uint8], exact: Ints, home: Ints, turn: Ints, rank: Ints, world: int, place: Ints
) -> bool:  # fmt: skip
    """Whether a stage steps twice in a step, or before a backward pass of it, or never."""
    steps = np.flatnonzero(kind == _STEP)
    if not len(steps):
        return False
    names = np.sort(exact[steps] * world + rank[steps])
    if (names[1:] == names[:-1]).any():
        return True
    after, lost = weights.stepping(kind, weights.GOES_BACK, home * world + rank, turn * world + rank)
    for op in range(len(kind)):  # noqa: SIM110 (compiled: a loop is a loop)
        if lost[op] or (after[op] >= 0 and place[op] > place[after[op]]):
            return True
    return False
