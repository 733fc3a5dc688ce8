"""The written specification of a legal program.

Every program is held against it before it is predicted and before it is launched. Each rule below is a function that
finds all its faults; `check` raises one error that lists them and shows the lists of the ranks with the faulty places
marked.

1. *listed*: each operation stands exactly once in the list of each of its ranks, and in no other.
2. *once*: each micro-batch goes exactly once forward and once backward through each stage of its pipeline, and all
   stages see the same micro-batches.
3. *matched*: each message is sent once and received once, by the rank that it is for, with the same bytes.
4. *alive*: an operation reads only what is on its rank, after it was made and before it is freed.
5. *updated*: a stage steps once, after every backward pass of the step and after every exchange of its gradients.
6. *fresh*: compute reads weights that lack no more updates than the program allows, and backward the same as forward.
7. *ends*: no operation waits for itself in a circle: the program runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trainplan.errors import ProgramError
from trainplan.program.ops import COMPUTES, RECEIVES, SENDS, SPECS, Kind, Value
from trainplan.program.program import Ints, Program
from trainplan.program.wiring import Wiring, stuck, wire

_SHOWN = 12  # faults and operations beyond these are counted, not printed


@dataclass(frozen=True)
class Fault:
    """A place where a program breaks a rule."""

    rule: str
    op: int  # -1: no single operation is at fault
    why: str


@dataclass(frozen=True)
class _View:
    """A program with what several rules need."""

    program: Program
    wiring: Wiring
    entry_op: Ints  # every list entry: its operation, rank and place in that list
    entry_rank: Ints
    place: Ints  # of operations with one rank
    shared: dict[tuple[int, int], int]  # (operation, rank) → place, for operations of several ranks

    def places(self, ops: Ints, ranks: Ints) -> Ints:
        """Place of each operation in the list of the given rank; -1 where it does not stand there."""
        found = np.where((ops >= 0) & (self.program.rank[ops] == ranks), self.place[ops], -1)
        for i in _where(self.program.group[ops] >= 0):
            found[i] = self.shared.get((int(ops[i]), int(ranks[i])), -1)
        return found


def faults(program: Program, wiring: Wiring | None = None) -> list[Fault]:
    """All faults of a program."""
    wiring = wiring or wire(program)
    lists = program.lists
    rank = lists.owner
    place = np.arange(len(lists.items), dtype=np.int64) - lists.start[rank]
    by_op = np.full(len(program), -1, dtype=np.int64)
    by_op[lists.items] = place
    several = np.flatnonzero(program.group[lists.items] >= 0)
    shared = {(int(lists.items[e]), int(rank[e])): int(place[e]) for e in several}
    view = _View(program, wiring, lists.items, rank, by_op, shared)
    found = list(_listed(view))
    if found:  # the other rules need sound lists
        return found
    for rule in RULES:
        found += rule(view)
    return found


def check(program: Program, wiring: Wiring | None = None) -> Program:
    """The program itself, if it is legal; otherwise an error that shows every fault in its place."""
    found = faults(program, wiring)
    if found:
        lines = [f"  {f.rule}: {f.why}" for f in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  … and {len(found) - _SHOWN} more")
        grid = _grid(program, {f.op for f in found if f.op >= 0})
        title = f"program {program.title}".strip()
        raise ProgramError(title, f"it is not legal, {len(found)} fault(s)\n" + "\n".join(lines) + "\n" + grid)
    return program


# -- the rules ----------------------------------------------------------------------------------------------------


def _listed(view: _View) -> Iterator[Fault]:
    program = view.program
    alone = program.group < 0
    stands = np.bincount(view.entry_op, minlength=len(program))
    for op in _where(alone & (stands != 1)):
        yield Fault("listed", int(op), f"{program.name(op)} stands {stands[op]} times in the lists, not once")
    strange = alone[view.entry_op] & (program.rank[view.entry_op] != view.entry_rank)
    for entry in _where(strange):
        op = int(view.entry_op[entry])
        yield Fault(
            "listed", op, f"{program.name(op)} stands in the list of rank {view.entry_rank[entry]}, not its own"
        )
    shared = np.flatnonzero(~alone[view.entry_op])
    found: dict[int, list[int]] = {int(op): [] for op in _where(~alone)}
    for entry in shared.tolist():
        found[int(view.entry_op[entry])].append(int(view.entry_rank[entry]))
    for op, ranks in found.items():
        if sorted(ranks) != sorted(program.members(op)):
            wanted = list(program.members(op))
            why = f"{program.name(op)} is for ranks {wanted} and stands in the lists of {sorted(ranks)}"
            yield Fault("listed", op, why)


def _once(view: _View) -> Iterator[Fault]:
    program = view.program
    forward, whole = program.kind == Kind.F, program.kind == Kind.B
    parts = {kind: program.kind == kind for kind in (Kind.I, Kind.W)}
    exact = _pack(program, "job", "step", "pipeline", "stage", "unit", "micro_batch", "slice")
    for kind, chosen in ((Kind.F, forward), (Kind.B, whole), *parts.items()):
        ops = np.flatnonzero(chosen)
        order = ops[np.argsort(exact[ops], kind="stable")]
        for op in order[1:][np.diff(exact[order]) == 0]:
            yield Fault("once", int(op), f"{program.name(op)}: {SPECS[kind].what} runs a second time")
    batch = _pack(program, "job", "step", "pipeline", "stage", "micro_batch", "slice")
    backward = whole | parts[Kind.I]
    yield from _same(program, batch, forward, backward, "goes forward but never backward")
    yield from _same(program, batch, backward, forward, "goes backward but never forward")
    yield from _same(
        program, batch, parts[Kind.I], parts[Kind.W], "has the input part of backward but not the weights'"
    )
    yield from _same(
        program, batch, parts[Kind.W], parts[Kind.I], "has the weights' part of backward but not the input's"
    )
    # All stages of a pipeline see the same micro-batches.
    ops = np.flatnonzero(forward)
    if not len(ops):
        return
    walk = _pack(program, "job", "step", "pipeline", "micro_batch", "slice")[ops]
    line = _pack(program, "job", "pipeline")[ops]
    stage = program.stage[ops]
    key = (line * (stage.max() + 1) + stage) * (walk.max() + 1) + walk
    key.sort()
    key = key[np.concatenate([[True], np.diff(key) != 0])] // (walk.max() + 1)  # one for each micro-batch of a stage
    lines, stages = np.divmod(key, stage.max() + 1)
    for one in range(int(lines.max()) + 1):
        counts = np.bincount(stages[lines == one], minlength=1)
        for lacking in _where((counts > 0) & (counts < counts.max())):
            op = int(ops[(line == one) & (stage == lacking)][0])
            why = f"stage {lacking} sees {counts[lacking]} micro-batches where another stage sees {counts.max()}"
            yield Fault("once", op, why)


def _same(program: Program, key: Ints, left: np.ndarray, right: np.ndarray, why: str) -> Iterator[Fault]:
    if not left.any():
        return
    ops = np.flatnonzero(left)
    for op in ops[~np.isin(key[ops], key[right])]:
        yield Fault("once", int(op), f"micro-batch of {program.name(op)} {why}")


def _matched(view: _View) -> Iterator[Fault]:
    program = view.program
    sends, receives = np.isin(program.kind, SENDS), np.isin(program.kind, RECEIVES)
    messages = np.flatnonzero(program.value_kind == Value.MESSAGE)
    makers = program.value_maker[messages]
    made = np.bincount(makers[makers >= 0], minlength=len(program))
    for op in _where(sends & (made != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} sends {made[op]} messages, not one")
    reader_of, value_of = program.reads.owner, program.reads.items
    carried = program.value_kind[value_of] == Value.MESSAGE
    readers, values = reader_of[carried], value_of[carried]
    taken = np.bincount(readers, minlength=len(program))
    for op in _where(receives & (taken != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} receives {taken[op]} messages, not one")
    read = np.bincount(values, minlength=len(program.value_kind))
    for value in messages[read[messages] != 1]:
        op = int(program.value_maker[value])
        yield Fault("matched", op, f"what {program.name(op)} sends is received {read[value]} times, not once")
    senders = program.value_maker[values]
    twins = np.array([-1 if SPECS[k].twin is None else int(SPECS[k].twin or 0) for k in Kind])
    peers = program.peer
    wrong = (
        (program.kind[readers] != twins[program.kind[senders]])
        | (program.micro_batch[readers] != program.micro_batch[senders])
        | (program.slice[readers] != program.slice[senders])
        | (program.peer_stage[readers] != program.stage[senders])
        | (program.peer_stage[senders] != program.stage[readers])
        | (peers[senders] != program.rank[readers])
        | (peers[readers] != program.rank[senders])
    )
    for i in _where(wrong):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} on rank {program.rank[receiver]} receives what {program.name(sender)} on rank "
        yield Fault("matched", receiver, why + f"{program.rank[sender]} sends to rank {peers[sender]}")
    for i in _where(~wrong & (program.bytes[readers] != program.bytes[senders])):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} expects {program.bytes[receiver]} bytes, {program.name(sender)} sends "
        yield Fault("matched", receiver, why + str(program.bytes[sender]))


def _alive(view: _View) -> Iterator[Fault]:
    program = view.program
    reader, value = program.reads.owner, program.reads.items
    where = program.value_rank[value]
    local = where >= 0
    reader, value, where = reader[local], value[local], where[local]
    place = view.places(reader, where)
    for i in _where(place < 0):
        name = program.name(reader[i])
        yield Fault("alive", int(reader[i]), f"{name} reads a value of rank {where[i]}, where it does not run")
    maker, end = program.value_maker[value], program.value_end[value]
    listed = np.array([not free for free in view.wiring.free])[where]
    made = np.where(maker >= 0, view.places(maker, where), -1)
    early = listed & (maker >= 0) & (made >= place) & (place >= 0)
    for i in _where(early):
        op, source = int(reader[i]), int(maker[i])
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} makes only later on its rank")
    freed = np.where(end >= 0, view.places(end, where), np.iinfo(np.int64).max)
    late = listed & (end >= 0) & (freed < place)
    for i in _where(late):
        op, source = int(reader[i]), int(end[i])
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} has freed already")
    owned = np.flatnonzero((program.value_end >= 0) & (program.value_rank >= 0))
    homes, ends, makers = program.value_rank[owned], program.value_end[owned], program.value_maker[owned]
    for i in _where(view.places(ends, homes) < 0):
        yield Fault("alive", int(ends[i]), f"{program.name(ends[i])} frees a value of rank {homes[i]}, not of its own")
    backwards = (
        (makers >= 0) & (view.places(ends, homes) < view.places(makers, homes)) & (view.places(ends, homes) >= 0)
    )
    for i in _where(backwards & np.array([not free for free in view.wiring.free])[homes]):
        why = f"{program.name(ends[i])} frees what {program.name(makers[i])} makes only later"
        yield Fault("alive", int(ends[i]), why)


def _updated(view: _View) -> Iterator[Fault]:
    program = view.program
    steps = np.flatnonzero(program.kind == Kind.STEP)
    if not len(steps):
        return
    home = (_pack(program, "job", "step", "stage") * program.world) + program.rank
    exact = (
        _pack(program, "job", "step", "pipeline", "stage", "unit", "micro_batch", "slice") * program.world
        + program.rank
    )
    _unique, first, counts = np.unique(exact[steps], return_index=True, return_counts=True)
    for i in _where(counts > 1):
        yield Fault(
            "updated", int(steps[first[i]]), f"{program.name(steps[first[i]])} steps {counts[i]} times in one step"
        )
    # Where a stage computes and steps on the same rank, its last backward comes before its step.
    work = np.flatnonzero(np.isin(program.kind, (Kind.B, Kind.I, Kind.W)))
    order = np.argsort(home[steps], kind="stable")
    keys = home[steps][order]
    spot = np.searchsorted(keys, home[work])
    inside = (spot < len(keys)) & (keys[np.minimum(spot, len(keys) - 1)] == home[work])
    after = steps[order][np.minimum(spot, len(keys) - 1)]
    for i in _where(inside & (view.place[work] > view.place[after])):
        yield Fault("updated", int(work[i]), f"{program.name(work[i])} comes after {program.name(after[i])}")
    # What an exchange makes is read by a step (or by what comes before one: a norm).
    for op in _where(program.kind == Kind.REDUCE_GRAD):
        if not np.isin(program.makes.row(int(op)), program.reads.items).all():
            yield Fault("updated", int(op), f"nobody reads what {program.name(op)} has summed")


def _fresh(view: _View) -> Iterator[Fault]:
    program = view.program
    compute = np.isin(program.kind, [k for k in COMPUTES if k is not Kind.STEP])
    lack = program.step - program.version
    for op in _where(compute & ((lack < 0) | (lack > program.staleness))):
        allowed = f"{program.staleness} update(s) less than step {program.step[op]} may be missing"
        yield Fault("fresh", int(op), f"{program.name(op)} reads weights of version {program.version[op]}; {allowed}")
    key = _pack(program, "job", "step", "pipeline", "stage", "micro_batch", "slice")
    forward, backward = (
        np.flatnonzero(program.kind == Kind.F),
        np.flatnonzero(np.isin(program.kind, (Kind.B, Kind.I, Kind.R))),
    )
    if not len(forward) or not len(backward):
        return
    order = forward[np.argsort(key[forward], kind="stable")]
    spot = np.minimum(np.searchsorted(key[order], key[backward]), len(order) - 1)
    twin = order[spot]
    for i in _where((key[twin] == key[backward]) & (program.version[twin] != program.version[backward])):
        op, source = int(backward[i]), int(twin[i])
        why = f"{program.name(op)} reads version {program.version[op]}, its forward read {program.version[source]}"
        yield Fault("fresh", op, why)
    # The version that an operation claims is that of the weights value that it reads.
    weights = program.value_kind[program.reads.items] == Value.WEIGHTS
    readers, makers = program.reads.owner[weights], program.value_maker[program.reads.items[weights]]
    stepped = makers >= 0
    readers, makers = readers[stepped], makers[stepped]
    wrong = (
        compute[readers] & (program.kind[makers] == Kind.STEP) & (program.version[readers] != program.step[makers] + 1)
    )
    for i in _where(wrong):
        op = int(readers[i])
        why = f"{program.name(op)} claims version {program.version[op]} and reads what {program.name(makers[i])} made"
        yield Fault("fresh", op, why)


def _ends(view: _View) -> Iterator[Fault]:
    program = view.program
    left = stuck(program, view.wiring)
    if not len(left):
        return
    never = np.zeros(len(program), dtype=bool)
    never[left] = True
    for rank in range(program.world):
        waiting = [int(op) for op in program.lists.row(rank) if never[op]]
        if not waiting:
            continue
        op = waiting[0]
        missing = [int(program.value_maker[v]) for v in program.reads.row(op)]
        missing = [m for m in missing if m >= 0 and never[m]]
        if missing:
            at = int(program.rank[missing[0]])
            head = next(int(other) for other in program.lists.row(at) if never[other])
            why = f"rank {rank} waits at {program.name(op)} for {program.name(missing[0])} of rank {at}, "
            yield Fault(
                "ends", op, why + (f"which waits at {program.name(head)}" if head != missing[0] else "which waits too")
            )
        else:
            yield Fault("ends", op, f"rank {rank} waits for ever at {program.name(op)}")


RULES: tuple[Callable[[_View], Iterator[Fault]], ...] = (_once, _matched, _alive, _updated, _fresh, _ends)


def _where(mask: np.ndarray) -> list[int]:
    """The places where something is wrong."""
    return [int(i) for i in np.flatnonzero(mask)]


def _pack(program: Program, *columns: str) -> Ints:
    """Several columns as one number, so that rows can be compared and sorted."""
    key = np.zeros(len(program), dtype=np.int64)
    for column in columns:
        values = getattr(program, column)
        key = key * (int(values.max(initial=0)) + 1) + values
    return key


def _grid(program: Program, marked: set[int]) -> str:
    """The lists of the ranks around the marked operations, which stand between » and «."""
    lines = []
    for rank in range(program.world):
        ops = [int(op) for op in program.lists.row(rank)]
        places = [i for i, op in enumerate(ops) if op in marked]
        if not places:
            continue
        first = max(0, places[0] - _SHOWN // 2)
        shown = ops[first : first + 2 * _SHOWN]
        cells = [f"»{program.name(op)}«" if op in marked else program.name(op) for op in shown]
        before, after = "… " if first else "", " …" if first + len(shown) < len(ops) else ""
        lines.append(f"  rank {rank}: {before}{' '.join(cells)}{after}")
        if len(lines) >= _SHOWN:
            break
    return "\n".join(lines)
