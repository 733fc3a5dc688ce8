"""Ways to break a program: small operations on its columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from trainplan.program.program import Program, Ragged

# Fields with one entry for each operation.
COLUMNS = (
    "kind", "job", "step", "pipeline", "stage", "unit", "micro_batch", "slice", "peer_stage", "rank", "peer", "bytes",
    "group", "version", "cost", "waits",
)  # fmt: skip


def find(program: Program, name: str) -> int:
    """The operation of that name, of which there is one."""
    found = [op.id for op in program.ops() if str(op) == name]
    assert len(found) == 1, f"{name} is there {len(found)} times"
    return found[0]


def change(program: Program, column: str, at: int, to: int) -> Program:
    """One entry of a column, of operations or of values."""
    values = getattr(program, column).copy()
    values[at] = to
    return replace(program, **{column: values})


def relist(program: Program, rank: int, edit: Callable[[list[int]], Sequence[int]]) -> Program:
    """Another list for a rank."""
    rows = [program.lists.row(r).tolist() for r in range(program.world)]
    rows[rank] = list(edit(rows[rank]))
    return replace(program, lists=Ragged.of(rows))


def move(program: Program, rank: int, name: str, before: str) -> Program:
    """An operation of a rank's list, moved to stand before another."""
    op, other = find(program, name), find(program, before)

    def edit(row: list[int]) -> list[int]:
        row.remove(op)
        row.insert(row.index(other), op)
        return row

    return relist(program, rank, edit)


def swap(program: Program, rank: int, name: str, other: str) -> Program:
    """Two operations of a rank's list, each in the place of the other."""
    pair = find(program, name), find(program, other)
    swapped = dict(zip(pair, reversed(pair), strict=True))
    return relist(program, rank, lambda row: [swapped.get(op, op) for op in row])


def reread(program: Program, op: int, edit: Callable[[list[int]], Sequence[int]]) -> Program:
    """Other values that an operation reads."""
    rows = [program.reads.row(i).tolist() for i in range(len(program))]
    rows[op] = list(edit(rows[op]))
    return replace(program, reads=Ragged.of(rows))


def forget(program: Program, name: str) -> Program:
    """An operation that waits for nothing and frees nothing, so that it may stand anywhere."""
    op = find(program, name)
    ends = np.where(program.value_end == op, -1, program.value_end)
    return replace(reread(program, op, lambda row: []), value_end=ends)


def values_between(program: Program, maker: str, reader: str) -> list[int]:
    """The values that one operation makes and another reads."""
    made = set(program.makes.row(find(program, maker)).tolist())
    return [v for v in program.reads.row(find(program, reader)).tolist() if v in made]


def without(program: Program, *names: str) -> Program:
    """The program without some operations, as if a pass of the lowering had forgotten them."""
    gone = {find(program, name) for name in names}
    keep = np.array([op for op in range(len(program)) if op not in gone])
    number = np.full(len(program), -1)
    number[keep] = np.arange(len(keep))
    columns = {name: getattr(program, name)[keep] for name in COLUMNS}
    rows = {
        "lists": [[number[op] for op in program.lists.row(r) if op not in gone] for r in range(program.world)],
        "holds": [program.holds.row(op).tolist() for op in keep],
        "reads": [program.reads.row(op).tolist() for op in keep],
    }
    ends = {end: np.where(getattr(program, end) < 0, -1, number[getattr(program, end)]) for end in MAKE_AND_END}
    return replace(program, **columns, **{name: Ragged.of(row) for name, row in rows.items()}, **ends)


def twice(program: Program, name: str) -> Program:
    """The program with a second copy of an operation, right after the first."""
    op = find(program, name)
    columns = {column: np.append(getattr(program, column), getattr(program, column)[op]) for column in COLUMNS}
    rows = {
        "lists": [
            [copy for o in program.lists.row(r).tolist() for copy in ((o, len(program)) if o == op else (o,))]
            for r in range(program.world)
        ],
        "holds": [program.holds.row(o).tolist() for o in [*range(len(program)), op]],
        "reads": [program.reads.row(o).tolist() for o in [*range(len(program)), op]],
    }
    return replace(program, **columns, **{column: Ragged.of(row) for column, row in rows.items()})


MAKE_AND_END = ("value_maker", "value_end")
assert set(COLUMNS) | set(MAKE_AND_END) <= {field.name for field in fields(Program)}
