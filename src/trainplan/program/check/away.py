"""What goes away.

10. *back*: what is copied out is given up on the device only by an operation that waits for the copy, comes back once,
    and is read then by the backward pass that it was saved for.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainplan.program.check.view import Fault, View
from trainplan.program.ops import COPIES, Kind, Value
from trainplan.program.program import are, nonzero

_COPY = are(COPIES)


def back(view: View) -> Iterator[Fault]:
    program = view.program
    if not _COPY[program.kind].any():
        return
    home = view.names.exact * program.world + program.rank
    reader, made = program.reads.owner, program.value_maker[program.reads.items]
    same = (made >= 0) & (view.names.batch[reader] == view.names.batch[made])
    read = set(made[same & (program.kind[made] == Kind.FETCH)].tolist())
    out, into = (nonzero(program.kind == kind).tolist() for kind in (Kind.OFFLOAD, Kind.FETCH))
    returns: dict[int, list[int]] = {}
    for op in into:
        returns.setdefault(int(home[op]), []).append(op)
    for op in out:
        name, own = program.name(op), returns.pop(int(home[op]), [])
        if len(own) != 1:
            yield Fault("back", op, f"what {name} copies out comes back {len(own)} times, not once")
            continue
        hosted = [v for v in program.makes.row(op).tolist() if program.value_kind[v] == Value.HOST]
        if not any(v in hosted for v in program.reads.row(own[0]).tolist()):
            yield Fault("back", own[0], f"{program.name(own[0])} does not read what {name} has copied out")
        for value in program.reads.row(op).tolist():
            end = int(program.value_end[value])
            if end >= 0 and not (program.value_maker[program.reads.row(end)] == op).any():
                yield Fault("back", end, f"{program.name(end)} gives up what {name} copies, and does not wait for it")
        if own[0] not in read:
            yield Fault("back", own[0], f"no backward pass reads what {program.name(own[0])} brings back")
    for left in returns.values():
        for op in left:
            yield Fault("back", op, f"{program.name(op)} brings back what never went away")
