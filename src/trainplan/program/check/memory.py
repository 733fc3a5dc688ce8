"""Values.

4. *alive*: an operation makes, reads and frees only what is on its rank, after it was made and before it is freed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainplan.program.check.view import Fault, View, where


def alive(view: View) -> Iterator[Fault]:
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
    for i in where(place < 0):
        why = f"{program.name(reader[i])} reads a value of rank {program.value_rank[value[i]]}, where it does not run"
        yield Fault("alive", int(reader[i]), why)
    judged = listed[value] & (place >= 0)
    for i in where(judged & (program.value_maker[value] >= 0) & (made[value] >= place)):
        op, source = int(reader[i]), program.value_maker[value[i]]
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} makes only later on its rank")
    for i in where(judged & (freed[value] >= 0) & (freed[value] < place)):
        op, source = int(reader[i]), program.value_end[value[i]]
        yield Fault("alive", op, f"{program.name(op)} reads what {program.name(source)} has freed already")
