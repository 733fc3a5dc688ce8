"""The written specification of a legal program.

Every program is held against it before it is predicted and before it is launched. Each rule below is a function that
finds all its faults; `check` raises one error that lists them and shows the lists of the ranks with the faulty places
marked.

1. *listed*: each operation stands exactly once in the list of each of its ranks, and in no other.
2. *once*: each micro-batch goes exactly once forward and once backward through each stage of its pipeline, and all
   stages see the same micro-batches.
3. *matched*: each message is sent once and received once, by the rank that it is for, with the same bytes; nothing
   else passes between ranks.
4. *alive*: an operation makes, reads and frees only what is on its rank, after it was made and before it is freed.
5. *updated*: a stage steps once, after every backward pass of the step and after every exchange of its gradients; an
   exchange sums something of every member, and every member reads the sum.
6. *fresh*: compute reads weights that lack no more updates than the program allows, and backward the same as forward.
7. *ends*: no operation waits for itself in a circle: the program runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainplan.errors import ProgramError
from trainplan.program.ops import COMPUTES, RECEIVES, SENDS, SPECS, Kind, Value
from trainplan.program.program import Bools, Ints, Program
from trainplan.program.wiring import Wiring, stuck, wire

_SHOWN = 12  # faults and operations beyond these are counted, not printed


def _are(kinds: Sequence[Kind]) -> Bools:
    """Kind → whether it is one of these."""
    return np.isin(np.arange(len(Kind)), kinds)


_SENDS, _RECEIVES, _BACKWARD = _are(SENDS), _are(RECEIVES), _are((Kind.B, Kind.I, Kind.W))
_READS_WEIGHTS = _are([kind for kind in COMPUTES if kind is not Kind.STEP])
_TWIN = np.array([-1 if (twin := SPECS[kind].twin) is None else int(twin) for kind in Kind])


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

    @cached_property
    def exact(self) -> Ints:
        """What an operation is about, as one number."""
        return _pack(self.program, "job", "step", "pipeline", "stage", "micro_batch", "slice", "unit")

    @cached_property
    def batch(self) -> Ints:
        """The same for all units of a micro-batch on a stage."""
        return self.exact // (int(self.program.unit.max(initial=0)) + 1)

    @cached_property
    def listed(self) -> Bools:
        """Rank → its list says what comes before what."""
        return ~self.wiring.free

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
    of = {kind: program.kind == kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for kind, chosen in of.items():
        ops = np.flatnonzero(chosen)
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
    line, stage = _pack(program, "job", "pipeline")[ops], program.stage[ops]
    walk = _pack(program, "job", "pipeline", "step", "micro_batch", "slice")[ops]
    seen = np.bincount(_distinct(walk, line)[1])
    widest = int(stage.max()) + 1
    lines, stages = np.divmod(_distinct(walk * widest + stage, line * widest + stage)[1], widest)
    counts = np.zeros((len(seen), widest), dtype=np.int64)
    np.add.at(counts, (lines, stages), 1)
    for one, lacking in zip(*np.nonzero((counts > 0) & (counts < seen[:, None])), strict=True):
        op = int(ops[(line == one) & (stage == lacking)][0])
        why = f"stage {lacking} sees {counts[one, lacking]} micro-batches where its pipeline has {seen[one]}"
        yield Fault("once", op, why)


def _distinct(key: Ints, label: Ints) -> tuple[Ints, Ints]:
    """The keys that occur, each once, with the label of each."""
    order = np.argsort(key, kind="stable")
    first = np.concatenate([[True], np.diff(key[order]) != 0])
    return key[order][first], label[order][first]


def _same(view: _View, left: Bools, right: Bools, why: str) -> Iterator[Fault]:
    there = np.zeros(int(view.batch.max()) + 1, dtype=bool)
    there[view.batch[right]] = True
    ops = np.flatnonzero(left)
    for op in ops[~there[view.batch[ops]]]:
        yield Fault("once", int(op), f"micro-batch of {view.program.name(op)} {why}")


def _matched(view: _View) -> Iterator[Fault]:
    program = view.program
    sends, receives = _SENDS[program.kind], _RECEIVES[program.kind]
    is_message = program.value_kind == Value.MESSAGE
    for value in _where(is_message != (program.value_rank < 0)):
        what = (
            f"a message, but on rank {program.value_rank[value]}" if is_message[value] else "on no rank, but no message"
        )
        yield Fault("matched", int(program.value_maker[value]), f"what {_maker(program, value)} makes is {what}")
    messages = np.flatnonzero(is_message)
    makers = program.value_maker[messages]
    made = np.bincount(makers[makers >= 0], minlength=len(program))
    for op in _where(sends & (made != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} sends {made[op]} messages, not one")
    carried = is_message[program.reads.items]
    readers, values = program.reads.owner[carried], program.reads.items[carried]
    taken = np.bincount(readers, minlength=len(program))
    for op in _where(receives & (taken != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} receives {taken[op]} messages, not one")
    read = np.bincount(values, minlength=len(program.value_kind))
    for value in messages[read[messages] != 1].tolist():
        op = int(program.value_maker[value])
        yield Fault("matched", op, f"what {_maker(program, value)} sends is received {read[value]} times, not once")
    senders = program.value_maker[values]
    for i in _where(senders < 0):
        yield Fault("matched", int(readers[i]), f"{program.name(readers[i])} receives what nobody sends")
    readers, senders = readers[senders >= 0], senders[senders >= 0]
    wrong = (
        (program.kind[readers] != _TWIN[program.kind[senders]])
        | (program.peer_stage[readers] != program.stage[senders])
        | (program.peer_stage[senders] != program.stage[readers])
        | (program.peer[senders] != program.rank[readers])
        | (program.peer[readers] != program.rank[senders])
    )
    for column in (program.micro_batch, program.slice, program.pipeline, program.step, program.job):
        wrong |= column[readers] != column[senders]
    for i in _where(wrong):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} on rank {program.rank[receiver]} receives what {program.name(sender)} on rank "
        yield Fault("matched", receiver, why + f"{program.rank[sender]} sends to rank {program.peer[sender]}")
    for i in _where(~wrong & (program.bytes[readers] != program.bytes[senders])):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} expects {program.bytes[receiver]} bytes, {program.name(sender)} sends "
        yield Fault("matched", receiver, why + str(program.bytes[sender]))


def _maker(program: Program, value: int) -> str:
    maker = int(program.value_maker[value])
    return program.name(maker) if maker >= 0 else "nobody"


def _alive(view: _View) -> Iterator[Fault]:
    program = view.program
    reader, value = program.reads.owner, program.reads.items
    here = np.flatnonzero(program.value_rank >= 0)  # messages are for `matched`
    never = np.iinfo(np.int64).max
    made = np.full(len(program.value_rank), -1, dtype=np.int64)  # places in the list of the value's rank
    freed = np.full(len(program.value_rank), never, dtype=np.int64)
    for places, ops, does in ((made, program.value_maker, "makes"), (freed, program.value_end, "frees")):
        some = here[ops[here] >= 0]
        places[some] = view.places(ops[some], program.value_rank[some])
        for v in some[places[some] < 0]:
            why = f"{program.name(ops[v])} {does} a value of rank {program.value_rank[v]}, not of its own"
            yield Fault("alive", int(ops[v]), why)
    listed = view.listed[program.value_rank] & (program.value_rank >= 0)
    for v in np.flatnonzero(listed & (freed >= 0) & (freed < made)):
        op, source = program.value_end[v], program.value_maker[v]
        yield Fault("alive", int(op), f"{program.name(op)} frees what {program.name(source)} makes only later")
    local = program.value_rank[value] >= 0
    reader, value = reader[local], value[local]
    place = view.places(reader, program.value_rank[value])
    for i in _where(place < 0):
        why = f"{program.name(reader[i])} reads a value of rank {program.value_rank[value[i]]}, where it does not run"
        yield Fault("alive", int(reader[i]), why)
    judged = listed[value] & (place >= 0)
    for i in _where(judged & (program.value_maker[value] >= 0) & (made[value] >= place)):
        op, source = int(reader[i]), program.value_maker[value[i]]
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} makes only later on its rank")
    for i in _where(judged & (freed[value] >= 0) & (freed[value] < place)):
        op, source = int(reader[i]), program.value_end[value[i]]
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} has freed already")


def _updated(view: _View) -> Iterator[Fault]:
    program = view.program
    is_read = np.zeros(len(program.value_kind), dtype=bool)
    is_read[program.reads.items] = True
    for op in _where(program.kind == Kind.REDUCE_GRAD):
        reads, makes = program.reads.row(op), program.makes.row(op)
        makes = makes[is_read[makes]]
        for rank in program.members(op):
            if not (program.value_rank[reads] == rank).any():
                yield Fault("updated", op, f"{program.name(op)} sums nothing of rank {rank}")
            if not (program.value_rank[makes] == rank).any():
                yield Fault("updated", op, f"nobody on rank {rank} reads what {program.name(op)} has summed")
    steps = np.flatnonzero(program.kind == Kind.STEP)
    if not len(steps):
        return
    exact = view.exact * program.world + program.rank
    _unique, first, counts = np.unique(exact[steps], return_index=True, return_counts=True)
    for i in _where(counts > 1):
        op = int(steps[first[i]])
        yield Fault("updated", op, f"{program.name(op)} steps {counts[i]} times in one step")
    # Where a stage computes and steps on the same rank, its last backward comes before its step.
    home = _pack(program, "job", "step", "stage") * program.world + program.rank
    work = np.flatnonzero(_BACKWARD[program.kind])
    step_of = np.full(int(home.max()) + 1, -1, dtype=np.int64)
    step_of[home[steps]] = steps
    after = step_of[home[work]]
    for i in _where((after >= 0) & (view.place[work] > view.place[after])):
        yield Fault("updated", int(work[i]), f"{program.name(work[i])} comes after {program.name(after[i])}")
    # Elsewhere its gradients are pushed to whoever steps.
    worker = _pack(program, "job", "step") * program.world + program.rank
    pushes = np.zeros(int(worker.max()) + 1, dtype=bool)
    pushes[worker[program.kind == Kind.SEND_G]] = True
    lost = work[(after < 0) & ~pushes[worker[work]]]
    for op in lost[np.unique(home[lost], return_index=True)[1]]:
        yield Fault("updated", int(op), f"the gradients of {program.name(op)} are not used: its stage never steps")


def _fresh(view: _View) -> Iterator[Fault]:
    program = view.program
    compute = _READS_WEIGHTS[program.kind]
    lack = program.step - program.version
    for op in _where(compute & ((lack < 0) | (lack > program.staleness))):
        allowed = f"{program.staleness} update(s) less than step {program.step[op]} may be missing"
        yield Fault("fresh", int(op), f"{program.name(op)} reads weights of version {program.version[op]}; {allowed}")
    forward, backward = np.flatnonzero(program.kind == Kind.F), np.flatnonzero(compute & (program.kind != Kind.F))
    twin = np.full(int(view.batch.max(initial=0)) + 1, -1, dtype=np.int64)
    twin[view.batch[forward]] = forward
    source = twin[view.batch[backward]]
    for i in _where((source >= 0) & (program.version[source] != program.version[backward])):
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
        top = int(values.max(initial=0))
        if top:
            key = key * (top + 1) + values
    return key


def _grid(program: Program, marked: set[int]) -> str:
    """The lists of the ranks around the marked operations, which stand between » and «.

    One that is in none of the lists that it belongs to is put at the end of those, as missing.
    """
    lines = []
    for rank in range(program.world):
        ops = [int(op) for op in program.lists.row(rank)]
        there = set(ops)
        missing = [f"»{program.name(op)} missing«" for op in sorted(marked - there) if rank in program.members(op)]
        places = [i for i, op in enumerate(ops) if op in marked]
        if not places and not missing:
            continue
        first = max(0, places[0] - _SHOWN // 2) if places else 0
        shown = ops[first : first + 2 * _SHOWN]
        cells = [f"»{program.name(op)}«" if op in marked else program.name(op) for op in shown]
        before, after = "… " if first else "", " …" if first + len(shown) < len(ops) else ""
        lines.append(f"  rank {rank}: {before}{' '.join(cells)}{after} {' '.join(missing)}".rstrip())
        if len(lines) >= _SHOWN:
            break
    return "\n".join(lines)
