"""A program as the rules see it: with the places of operations in lists, and several columns as one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints, Program
from trainplan.program.wiring import Wiring


@dataclass(frozen=True)
class Fault:
    """A place where a program breaks a rule."""

    rule: str
    op: int  # -1: no single operation is at fault
    why: str


@dataclass(frozen=True)
class View:
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
        return pack(self.program, "job", "step", "pipeline", "stage", "micro_batch", "slice", "unit")

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
        for i in where(self.program.group[ops] >= 0):
            found[i] = self.shared.get((int(ops[i]), int(ranks[i])), -1)
        return found


def where(mask: np.ndarray) -> list[int]:
    """The places where something is wrong."""
    return [int(i) for i in np.flatnonzero(mask)]


def pack(program: Program, *columns: str) -> Ints:
    """Several columns as one number, so that rows can be compared and sorted."""
    key = np.zeros(len(program), dtype=np.int64)
    for column in columns:
        values = getattr(program, column)
        top = int(values.max(initial=0))
        if top:
            key = key * (top + 1) + values
    return key


def maker(program: Program, value: int) -> str:
    """Who makes a value, by name."""
    found = int(program.value_maker[value])
    return program.name(found) if found >= 0 else "nobody"


def are(kinds: Sequence[Kind]) -> Bools:
    """Kind → whether it is one of these."""
    return np.isin(np.arange(len(Kind)), kinds)
