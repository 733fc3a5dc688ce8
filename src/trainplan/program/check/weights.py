"""Weights: when they are updated, and which ones are read.

5. *updated*: a stage steps once, after every backward pass of the step and after every exchange of its gradients; an
   exchange sums something of every member, and every member reads the sum. Where replicas share out a stage, each
   steps its share, and nobody computes with weights that were not gathered since: the first forward pass of a step
   reads all units that are scattered in it, and where weights do not stay, every pass does.
6. *fresh*: compute reads weights that lack no more updates than the program allows, and backward the same as forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check.view import Fault, View, pack, where
from trainplan.program.ops import COMPUTES, GATHERS, Kind, Value
from trainplan.program.program import Bools, Ints, Program, Ragged, are, nonzero
from trainplan.program.wiring import Small

_BACKWARD = are((Kind.B, Kind.I, Kind.W))
_EXCHANGES, _GATHERS = are((Kind.REDUCE_GRAD, Kind.SCATTER_GRAD)), are(GATHERS)
_IDLE = "nobody on rank {rank} reads what {op} has summed"
_READS_WEIGHTS = are([kind for kind in COMPUTES if kind is not Kind.STEP])
_F, _STEP, _SEND_G, _WEIGHTS = int(Kind.F), int(Kind.STEP), int(Kind.SEND_G), int(Value.WEIGHTS)
# What may be wrong with a member of an exchange, and with who computes: bits.
_BRINGS_NOTHING, _GETS_NOTHING = 1, 2
_STALE, _UNLIKE_FORWARD, _CLAIMS = 1, 2, 4


def updated(view: View) -> Iterator[Fault]:
    program, wiring, reads = view.program, view.wiring, view.program.reads
    idle = _summing(
        program.kind, _EXCHANGES, reads.start, reads.items, program.value_maker, program.value_rank,
        wiring.member_start, wiring.member_items,
    )  # fmt: skip
    for bit, why in ((_BRINGS_NOTHING, "{op} sums nothing of rank {rank}"), (_GETS_NOTHING, _IDLE)):
        for place in where(idle & bit) if idle.any() else ():
            op = int(np.searchsorted(wiring.member_start, place, side="right")) - 1
            yield Fault("updated", op, why.format(op=program.name(op), rank=wiring.member_items[place]))
    steps = nonzero(program.kind == Kind.STEP)
    if not len(steps):
        return
    _unique, first, counts = np.unique(
        view.exact[steps] * program.world + program.rank[steps], return_index=True, return_counts=True
    )
    for i in where(counts > 1):
        op = int(steps[first[i]])
        yield Fault("updated", op, f"{program.name(op)} steps {counts[i]} times in one step")
    home = pack(program, "job", "step", "stage") * program.world + program.rank
    worker = pack(program, "job", "step") * program.world + program.rank
    after, lost = _stepping(program.kind, _BACKWARD, home, worker)
    for op in where((after >= 0) & (view.place > view.place[after])):
        yield Fault("updated", op, f"{program.name(op)} comes after {program.name(after[op])}")
    for op in where(lost):
        yield Fault("updated", op, f"the gradients of {program.name(op)} are not used: its stage never steps")


@njit(cache=True)
def _summing(
    kind: NDArray[np.uint8], exchanges: Bools, read_start: Ints, read_items: Ints, maker: Ints, value_rank: Ints,
    member_start: Small, member_items: Small,
) -> NDArray[np.uint8]:  # fmt: skip
    """What is wrong with every member of every exchange: each has a value of each of them to read, and makes one for
    each that somebody reads."""
    wrong = np.zeros(len(member_items), np.uint8)
    for op in range(len(kind)):
        if exchanges[kind[op]]:
            wrong[member_start[op] : member_start[op + 1]] = _BRINGS_NOTHING | _GETS_NOTHING
    for op in range(len(kind)):
        for k in range(read_start[op], read_start[op + 1]):
            by, rank = maker[read_items[k]], value_rank[read_items[k]]
            if exchanges[kind[op]]:
                for m in range(member_start[op], member_start[op + 1]):
                    if member_items[m] == rank:
                        wrong[m] &= ~np.uint8(_BRINGS_NOTHING)
            if by >= 0 and exchanges[kind[by]]:
                for m in range(member_start[by], member_start[by + 1]):
                    if member_items[m] == rank:
                        wrong[m] &= ~np.uint8(_GETS_NOTHING)
    return wrong


@njit(cache=True)
def _stepping(kind: NDArray[np.uint8], backward: Bools, home: Ints, worker: Ints) -> tuple[Ints, Bools]:
    """Of every backward pass the step of its stage on its rank, -1: there is none, nor of any other operation. And of
    those the first at a place whose gradients nobody pushes to whoever steps."""
    step_of, pushes = np.full(home.max() + 1, -1, np.int64), np.zeros(worker.max() + 1, np.bool_)
    for op in range(len(kind)):
        if kind[op] == _STEP:
            step_of[home[op]] = op
        elif kind[op] == _SEND_G:
            pushes[worker[op]] = True
    after, lost, told = (
        np.full(len(kind), -1, np.int64),
        np.zeros(len(kind), np.bool_),
        np.zeros(len(step_of), np.bool_),
    )
    for op in range(len(kind)):
        if backward[kind[op]]:
            after[op] = step_of[home[op]]
            if after[op] < 0 and not pushes[worker[op]] and not told[home[op]]:
                lost[op] = told[home[op]] = True
    return after, lost


def gathered(view: View) -> Iterator[Fault]:
    """Part of *updated*: who reads what was gathered."""
    program = view.program
    scatters, gathers = nonzero(program.kind == Kind.SCATTER_GRAD), nonzero(_GATHERS[program.kind])
    if not len(scatters) and not len(gathers):
        return
    makers, reads = program.value_maker, program.reads
    # A place is a stage on a rank in a step; `wanted` has the units that are shared out there, as (place, unit).
    place = pack(program, "step", "stage") * program.world
    units = int(program.unit.max(initial=0)) + 1
    ops, ranks = _with_members(program, scatters)
    wanted = np.unique((place[ops] + ranks) * units + program.unit[ops])
    here = place + program.rank
    # A pass is what a micro-batch does at a place, forward or back. Which of them read what is shared out?
    ops = nonzero(_READS_WEIGHTS[program.kind])
    shared_out = np.zeros(int(here.max()) + program.world + 1, dtype=bool)
    shared_out[wanted // units] = True
    ops = ops[shared_out[here[ops]]]
    if not len(ops):
        return
    name = (here * (int(program.micro_batch.max(initial=0)) + 1) + program.micro_batch) * 2 + (program.kind != Kind.F)
    passes, begin, which = np.unique(name[ops], return_index=True, return_inverse=True)
    begin = ops[begin]  # their first operations
    number = np.full(len(program), -1, dtype=np.int64)
    number[ops] = which
    # What each of them reads of what was gathered in its step.
    weights = (program.value_kind == Value.WEIGHTS) & (makers >= 0)
    weights[weights] = _GATHERS[program.kind[makers[weights]]]
    stays = not (program.value_end[weights] >= 0).any()
    at = nonzero(weights[reads.items])
    reader, source = reads.owner[at], makers[reads.items[at]]
    known = (number[reader] >= 0) & (program.step[source] == program.step[reader])
    has = number[reader[known]] * units + program.unit[source[known]]
    # Where weights stay, only the first pass at a place has to read them all.
    asked = np.arange(len(passes))
    if stays:
        order = np.lexsort((view.place[begin], here[begin]))
        asked = order[np.unique(here[begin][order], return_index=True)[1]]
    low = np.searchsorted(wanted, here[begin[asked]] * units)
    many = np.searchsorted(wanted, (here[begin[asked]] + 1) * units) - low
    each = np.repeat(low - np.cumsum(many) + many, many) + np.arange(int(many.sum()))
    needs = np.repeat(asked, many) * units + wanted[each] % units
    there = np.zeros(len(passes) * units, dtype=bool)
    there[has] = True
    missing = np.unique(needs[~there[needs]]) if not there[needs].all() else needs[:0]
    for i in np.unique(missing // units, return_index=True)[1].tolist():
        op = int(begin[missing[i] // units])
        why = f"{program.name(op)} computes with weights of unit {missing[i] % units} that nobody has gathered for it"
        yield Fault("updated", op, why)


def _with_members(program: Program, ops: Ints) -> tuple[Ints, Ints]:
    """Collectives, each as often as it has members; and these."""
    members = Ragged.of(program.groups)
    sizes = np.diff(members.start)[program.group[ops]]
    first = np.repeat(members.start[program.group[ops]] - np.cumsum(sizes) + sizes, sizes)
    return np.repeat(ops, sizes), members.items[first + np.arange(len(first))]


def fresh(view: View) -> Iterator[Fault]:
    program, reads = view.program, view.program.reads
    wrong, twin = _stale(
        program.kind, _READS_WEIGHTS, program.step, program.version, view.batch, program.staleness, program.value_kind,
        program.value_maker, reads.start, reads.items,
    )  # fmt: skip
    if not wrong.any():
        return
    for op in where(wrong & _STALE):
        allowed = f"{program.staleness} update(s) less than step {program.step[op]} may be missing"
        yield Fault("fresh", op, f"{program.name(op)} reads weights of version {program.version[op]}; {allowed}")
    for op in where(wrong & _UNLIKE_FORWARD):
        source = program.version[twin[view.batch[op]]]
        why = f"{program.name(op)} reads version {program.version[op]}, its forward read {source}"
        yield Fault("fresh", op, why)
    for op in where(wrong & _CLAIMS):
        made = program.value_maker[reads.row(op)[program.value_kind[reads.row(op)] == Value.WEIGHTS]]
        made = made[(made >= 0) & (program.kind[made] == Kind.STEP)]
        (by, *_) = made[program.step[made] + 1 != program.version[op]]
        why = f"{program.name(op)} claims version {program.version[op]} and reads what {program.name(by)} made"
        yield Fault("fresh", op, why)


@njit(cache=True)
def _stale(
    kind: NDArray[np.uint8], computes: Bools, step: Ints, version: Ints, batch: Ints, staleness: int,
    value_kind: NDArray[np.uint8], maker: Ints, read_start: Ints, read_items: Ints,
) -> tuple[NDArray[np.uint8], Ints]:  # fmt: skip
    """What is wrong with the weights that every operation reads; and of every micro-batch on a stage its forward pass.
    The version that an operation claims is that of the weights value that it reads."""
    wrong = np.zeros(len(kind), np.uint8)
    most = 0
    for op in range(len(kind)):
        most = max(most, batch[op])
    twin = np.full(most + 1, -1, np.int64)
    for op in range(len(kind)):
        if kind[op] == _F:
            twin[batch[op]] = op
    for op in range(len(kind)):
        if not computes[kind[op]]:
            continue
        if version[op] > step[op] or version[op] < step[op] - staleness:
            wrong[op] |= _STALE
        source = twin[batch[op]]
        if kind[op] != _F and source >= 0 and version[source] != version[op]:
            wrong[op] |= _UNLIKE_FORWARD
        for k in range(read_start[op], read_start[op + 1]):
            by = maker[read_items[k]]
            if value_kind[read_items[k]] == _WEIGHTS and by >= 0 and kind[by] == _STEP and version[op] != step[by] + 1:
                wrong[op] |= _CLAIMS
    return wrong, twin
