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

from trainplan.program.check.view import Fault, View, pack, where
from trainplan.program.ops import COMPUTES, GATHERS, Kind, Value
from trainplan.program.program import Program, are

_BACKWARD = are((Kind.B, Kind.I, Kind.W))
_EXCHANGES, _GATHERS = are((Kind.REDUCE_GRAD, Kind.SCATTER_GRAD)), are(GATHERS)
_READS_WEIGHTS = are([kind for kind in COMPUTES if kind is not Kind.STEP])


def updated(view: View) -> Iterator[Fault]:
    program = view.program
    is_read = np.zeros(len(program.value_kind), dtype=bool)
    is_read[program.reads.items] = True
    for op in where(_EXCHANGES[program.kind]):
        reads, makes = program.reads.row(op), program.makes.row(op)
        brings, gets = (set(program.value_rank[values].tolist()) for values in (reads, makes[is_read[makes]]))
        for rank in program.members(op):
            if rank not in brings:
                yield Fault("updated", op, f"{program.name(op)} sums nothing of rank {rank}")
            if rank not in gets:
                yield Fault("updated", op, f"nobody on rank {rank} reads what {program.name(op)} has summed")
    steps = np.flatnonzero(program.kind == Kind.STEP)
    if not len(steps):
        return
    exact = view.exact * program.world + program.rank
    _unique, first, counts = np.unique(exact[steps], return_index=True, return_counts=True)
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


def gathered(view: View) -> Iterator[Fault]:
    """Part of *updated*: who reads what was gathered."""
    program = view.program
    scatters, gathers = np.flatnonzero(program.kind == Kind.SCATTER_GRAD), np.flatnonzero(_GATHERS[program.kind])
    if not len(scatters) and not len(gathers):
        return
    shared: dict[tuple[int, ...], set[int]] = {}  # step, stage, rank → units
    for op in scatters.tolist():
        for rank in program.members(op):
            shared.setdefault(_where(program, op, rank), set()).add(int(program.unit[op]))
    makers = program.value_maker
    weights = np.flatnonzero((program.value_kind == Value.WEIGHTS) & (makers >= 0))
    weights = weights[_GATHERS[program.kind[makers[weights]]]]
    unit_of = dict(zip(weights.tolist(), program.unit[makers[weights]].tolist(), strict=True))
    stays = not (program.value_end[weights] >= 0).any()
    read: dict[tuple[int, ...], set[int]] = {}  # step, stage, rank, micro-batch, backward → units that a pass reads
    first: dict[tuple[int, ...], int] = {}  # the same → its first operation
    for op in np.flatnonzero(_READS_WEIGHTS[program.kind]).tolist():
        where_ = _where(program, op, int(program.rank[op]))
        if where_ not in shared:
            continue
        name = (*where_, int(program.micro_batch[op]), int(program.kind[op] != Kind.F))
        first.setdefault(name, op)
        found = read.setdefault(name, set())
        for value in program.reads.row(op).tolist():
            if value in unit_of and program.step[makers[value]] == program.step[op]:
                found.add(unit_of[value])
    begun: dict[tuple[int, ...], tuple[int, ...]] = {}  # step, stage, rank → the pass that comes first
    for name, op in first.items():
        own = name[:3]
        if own not in begun or view.place[op] < view.place[first[begun[own]]]:
            begun[own] = name
    for name, units in read.items():
        if stays and begun[name[:3]] != name:
            continue
        missing = sorted(shared[name[:3]] - units)
        if missing:
            op = first[name]
            why = f"{program.name(op)} computes with weights of unit {missing[0]} that nobody has gathered for it"
            yield Fault("updated", op, why)


def _where(program: Program, op: int, rank: int) -> tuple[int, ...]:
    return int(program.step[op]), int(program.stage[op]), rank


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
