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

from trainplan.program.check.view import Fault, View, where
from trainplan.program.ops import COMPUTES, GATHERS, SHARED_OUT, Kind, Value
from trainplan.program.program import Bools, Ints, are, nonzero
from trainplan.program.wiring import Small

GOES_BACK = are((Kind.B, Kind.I, Kind.W))
EXCHANGES, GATHERING, SHARES = are((Kind.REDUCE_GRAD, Kind.SCATTER_GRAD)), are(GATHERS), are(SHARED_OUT)
_IDLE = "nobody on rank {rank} reads what {op} has summed"
READS_WEIGHTS = are([kind for kind in COMPUTES if kind is not Kind.STEP])
_F, _STEP, _SEND_G, _SCATTER_GRAD = int(Kind.F), int(Kind.STEP), int(Kind.SEND_G), int(Kind.SCATTER_GRAD)
_WEIGHTS = int(Value.WEIGHTS)
# What may be wrong with a member of an exchange, and with who computes: bits.
_BRINGS_NOTHING, _GETS_NOTHING = 1, 2
_STALE, _UNLIKE_FORWARD, _CLAIMS = 1, 2, 4


def updated(view: View) -> Iterator[Fault]:
    program, wiring, reads = view.program, view.wiring, view.program.reads
    idle = summing(
        program.kind, EXCHANGES, reads.start, reads.items, program.value_maker, program.value_rank,
        wiring.member_start, wiring.member_items,
    )  # fmt: skip
    for bit, why in ((_BRINGS_NOTHING, "{op} sums nothing of rank {rank}"), (_GETS_NOTHING, _IDLE)):
        for place in where(idle & bit) if idle.any() else ():
            op = int(np.searchsorted(wiring.member_start, place, side="right")) - 1
            yield Fault("updated", op, why.format(op=program.name(op), rank=wiring.member_items[place]))
    steps = nonzero(program.kind == _STEP)
    if not len(steps):
        return
    names = (view.names.exact[steps] * program.world + program.rank[steps]).tolist()
    if len(set(names)) < len(names):
        for name in sorted({name for name in names if names.count(name) > 1}):
            op = int(steps[names.index(name)])
            yield Fault("updated", op, f"{program.name(op)} steps {names.count(name)} times in one step")
    home = view.names.home * program.world + program.rank
    worker = view.names.turn * program.world + program.rank
    after, lost = stepping(program.kind, GOES_BACK, home, worker)
    for op in where((after >= 0) & (view.place > view.place[after])):
        yield Fault("updated", op, f"{program.name(op)} comes after {program.name(after[op])}")
    for op in where(lost):
        yield Fault("updated", op, f"the gradients of {program.name(op)} are not used: its stage never steps")


@njit(cache=True)
def summing(
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
def stepping(kind: NDArray[np.uint8], backward: Bools, home: Ints, worker: Ints) -> tuple[Ints, Bools]:
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
    program, wiring, reads = view.program, view.wiring, view.program.reads
    if not SHARES[program.kind].any():
        return
    ops, units = not_gathered(
        program.kind, READS_WEIGHTS, GATHERING, program.step, program.stage, program.rank, program.micro_batch,
        program.unit, program.world, view.place, program.value_kind, program.value_maker, program.value_end,
        reads.start, reads.items, wiring.member_start, wiring.member_items,
    )  # fmt: skip
    for op, unit in zip(ops.tolist(), units.tolist(), strict=True):
        why = f"{program.name(op)} computes with weights of unit {unit} that nobody has gathered for it"
        yield Fault("updated", op, why)


@njit(cache=True)
def not_gathered(
    kind: NDArray[np.uint8], computes: Bools, gathers: Bools, step: Ints, stage: Ints, rank: Ints, micro: Ints,
    unit: Ints, world: int, place: Ints, value_kind: NDArray[np.uint8], maker: Ints, end: Ints, read_start: Ints,
    read_items: Ints, member_start: Small, member_items: Small,
) -> tuple[Ints, Ints]:  # fmt: skip
    """The first operations of passes that lack weights of their stage, and the first unit that each lacks. A pass is
    what a micro-batch does at a home (a stage on a rank) in a step, forward or back; it needs the units that are
    scattered there in that step. Where weights stay, only the first pass there has to read them all."""
    ops = len(kind)
    steps, stages, micros, units = step.max() + 1, stage.max() + 1, micro.max() + 1, unit.max() + 1
    home = np.full(stages * world, -1, np.int64)  # → its number, of those at which units are scattered
    for op in range(ops):
        if kind[op] == _SCATTER_GRAD:
            for k in range(member_start[op], member_start[op + 1]):
                home[stage[op] * world + member_items[k]] = 0
    homes = 0
    for at in range(len(home)):
        if home[at] == 0:
            home[at] = homes
            homes += 1
    wanted = np.zeros((steps * homes, units), np.bool_)
    for op in range(ops):
        if kind[op] == _SCATTER_GRAD:
            for k in range(member_start[op], member_start[op + 1]):
                wanted[step[op] * homes + home[stage[op] * world + member_items[k]], unit[op]] = True
    stays = True
    for v in range(len(maker)):
        if value_kind[v] == _WEIGHTS and maker[v] >= 0 and gathers[kind[maker[v]]] and end[v] >= 0:
            stays = False
    passes = steps * homes * micros * 2
    begin, first = np.full(passes, -1, np.int64), np.full(steps * homes, -1, np.int64)
    has = np.zeros((passes, units), np.bool_)
    for op in range(ops):
        at = home[stage[op] * world + rank[op]]
        if at < 0 or not computes[kind[op]]:
            continue
        here = step[op] * homes + at
        name = (here * micros + micro[op]) * 2 + (kind[op] != _F)
        if begin[name] < 0:
            begin[name] = op
            if first[here] < 0 or place[op] < place[begin[first[here]]]:
                first[here] = name
        for k in range(read_start[op], read_start[op + 1]):
            by = maker[read_items[k]]
            if by >= 0 and value_kind[read_items[k]] == _WEIGHTS and gathers[kind[by]] and step[by] == step[op]:
                has[name, unit[by]] = True
    lacking, lacks, count = np.empty(passes, np.int64), np.empty(passes, np.int64), 0
    for name in range(passes):
        here = name // (2 * micros)
        if begin[name] < 0 or (stays and first[here] != name):
            continue
        for u in range(units):
            if wanted[here, u] and not has[name, u]:
                lacking[count], lacks[count] = begin[name], u
                count += 1
                break
    return lacking[:count], lacks[:count]


def fresh(view: View) -> Iterator[Fault]:
    program, reads = view.program, view.program.reads
    wrong, twin = stale(
        program.kind, READS_WEIGHTS, program.step, program.version, view.names.batch, program.staleness,
        program.value_kind, program.value_maker, reads.start, reads.items,
    )  # fmt: skip
    if not wrong.any():
        return
    for op in where(wrong & _STALE):
        allowed = f"{program.staleness} update(s) less than step {program.step[op]} may be missing"
        yield Fault("fresh", op, f"{program.name(op)} reads weights of version {program.version[op]}; {allowed}")
    for op in where(wrong & _UNLIKE_FORWARD):
        source = program.version[twin[view.names.batch[op]]]
        why = f"{program.name(op)} reads version {program.version[op]}, its forward read {source}"
        yield Fault("fresh", op, why)
    for op in where(wrong & _CLAIMS):
        made = program.value_maker[reads.row(op)[program.value_kind[reads.row(op)] == _WEIGHTS]]
        made = made[(made >= 0) & (program.kind[made] == _STEP)]
        (by, *_) = made[program.step[made] + 1 != program.version[op]]
        why = f"{program.name(op)} claims version {program.version[op]} and reads what {program.name(by)} made"
        yield Fault("fresh", op, why)


@njit(cache=True)
def stale(
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
