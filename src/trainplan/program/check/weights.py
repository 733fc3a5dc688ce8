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

from trainplan.program.check.view import Fault, View, pack, where
from trainplan.program.ops import COMPUTES, GATHERS, Kind, Value
from trainplan.program.program import Bools, Ints, Program, Ragged, are
from trainplan.program.wiring import Small

_BACKWARD = are((Kind.B, Kind.I, Kind.W))
_EXCHANGES, _GATHERS = are((Kind.REDUCE_GRAD, Kind.SCATTER_GRAD)), are(GATHERS)
_IDLE = "nobody on rank {rank} reads what {op} has summed"
_READS_WEIGHTS = are([kind for kind in COMPUTES if kind is not Kind.STEP])


def updated(view: View) -> Iterator[Fault]:
    program = view.program
    is_read = np.zeros(len(program.value_kind), dtype=bool)
    is_read[program.reads.items] = True
    # Every exchange has a value of each of its members to read, and makes one for each that somebody reads.
    exchange, wiring, reads = _EXCHANGES[program.kind], view.wiring, program.reads
    read = np.flatnonzero(exchange[reads.owner])
    made = np.flatnonzero(is_read & (program.value_maker >= 0))
    made = made[exchange[program.value_maker[made]]]
    brings = _served(reads.owner[read], program.value_rank[reads.items[read]], wiring.member_start, wiring.member_items)
    gets = _served(program.value_maker[made], program.value_rank[made], wiring.member_start, wiring.member_items)
    summing = np.repeat(exchange, np.diff(wiring.member_start))
    for lacks, why in ((brings, "{op} sums nothing of rank {rank}"), (gets, _IDLE)):
        for place in where(summing & ~lacks):
            op = int(np.searchsorted(wiring.member_start, place, side="right")) - 1
            yield Fault("updated", op, why.format(op=program.name(op), rank=wiring.member_items[place]))
    steps = np.flatnonzero(program.kind == Kind.STEP)
    if not len(steps):
        return
    _unique, first, counts = np.unique(
        view.exact[steps] * program.world + program.rank[steps], return_index=True, return_counts=True
    )
    for i in where(counts > 1):
        op = int(steps[first[i]])
        yield Fault("updated", op, f"{program.name(op)} steps {counts[i]} times in one step")
    # Where a stage computes and steps on the same rank, its last backward comes before its step.
    home = pack(program, "job", "step", "stage") * program.world + program.rank
    work = np.flatnonzero(_BACKWARD[program.kind])
    step_of = np.full(int(home.max()) + 1, -1, dtype=np.int64)
    step_of[home[steps]] = steps
    after = step_of[home[work]]
    for i in where((after >= 0) & (view.place[work] > view.place[after])):
        yield Fault("updated", int(work[i]), f"{program.name(work[i])} comes after {program.name(after[i])}")
    # Elsewhere its gradients are pushed to whoever steps.
    worker = pack(program, "job", "step") * program.world + program.rank
    pushes = np.zeros(int(worker.max()) + 1, dtype=bool)
    pushes[worker[program.kind == Kind.SEND_G]] = True
    lost = work[(after < 0) & ~pushes[worker[work]]]
    for op in lost[np.unique(home[lost], return_index=True)[1]]:
        yield Fault("updated", int(op), f"the gradients of {program.name(op)} are not used: its stage never steps")


@njit(cache=True)
def _served(ops: Ints, ranks: Ints, member_start: Small, member_items: Small) -> Bools:
    """Of every member of every operation, whether it is among these (operation, rank)."""
    found = np.zeros(len(member_items), np.bool_)
    for i in range(len(ops)):
        for k in range(member_start[ops[i]], member_start[ops[i] + 1]):
            if member_items[k] == ranks[i]:
                found[k] = True
    return found


def gathered(view: View) -> Iterator[Fault]:
    """Part of *updated*: who reads what was gathered."""
    program = view.program
    scatters, gathers = np.flatnonzero(program.kind == Kind.SCATTER_GRAD), np.flatnonzero(_GATHERS[program.kind])
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
    ops = np.flatnonzero(_READS_WEIGHTS[program.kind])
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
    at = np.flatnonzero(weights[reads.items])
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
    program = view.program
    compute = _READS_WEIGHTS[program.kind]
    lack = program.step - program.version
    for op in where(compute & ((lack < 0) | (lack > program.staleness))):
        allowed = f"{program.staleness} update(s) less than step {program.step[op]} may be missing"
        yield Fault("fresh", int(op), f"{program.name(op)} reads weights of version {program.version[op]}; {allowed}")
    forward, backward = np.flatnonzero(program.kind == Kind.F), np.flatnonzero(compute & (program.kind != Kind.F))
    twin = np.full(int(view.batch.max(initial=0)) + 1, -1, dtype=np.int64)
    twin[view.batch[forward]] = forward
    source = twin[view.batch[backward]]
    for i in where((source >= 0) & (program.version[source] != program.version[backward])):
        op = int(backward[i])
        why = f"{program.name(op)} reads version {program.version[op]}, its forward read {program.version[source[i]]}"
        yield Fault("fresh", op, why)
    # The version that an operation claims is that of the weights value that it reads.
    weights = program.value_kind[program.reads.items] == Value.WEIGHTS
    readers, makers = program.reads.owner[weights], program.value_maker[program.reads.items[weights]]
    stepped = makers >= 0
    readers, makers = readers[stepped], makers[stepped]
    wrong = (
        compute[readers] & (program.kind[makers] == Kind.STEP) & (program.version[readers] != program.step[makers] + 1)
    )
    for i in where(wrong):
        op = int(readers[i])
        why = f"{program.name(op)} claims version {program.version[op]} and reads what {program.name(makers[i])} made"
        yield Fault("fresh", op, why)
