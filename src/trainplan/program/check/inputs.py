"""Inputs.

10. *loaded*: where a stage's inputs are loaded (or received) in the program, each of its forward passes reads those of
    its own step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainplan.program.check.view import Fault, View, pack, where
from trainplan.program.ops import Kind, Value
from trainplan.program.program import nonzero

_INPUT = int(Value.INPUT)


def loaded(view: View) -> Iterator[Fault]:
    program = view.program
    brought = (program.value_kind == _INPUT) & (program.value_maker >= 0)
    if not brought.any():
        return
    home = pack(program, "job", "stage") * program.world + program.rank
    reads = program.reads
    chosen = brought[reads.items]
    readers, makers = reads.owner[chosen], program.value_maker[reads.items[chosen]]
    for i in where(program.step[readers] != program.step[makers]):
        op, maker = int(readers[i]), int(makers[i])
        yield Fault("loaded", op, f"{program.name(op)} reads what {program.name(maker)} brings for another step")
    # A pass that was cut into units reads with the first of them.
    passes = nonzero((program.kind == Kind.F) & (program.unit == 0))
    has_read = np.zeros(len(program), dtype=bool)
    has_read[readers[home[readers] == home[makers]]] = True
    loads = np.zeros(int(home.max()) + 1, dtype=bool)
    loads[home[program.value_maker[brought]]] = True
    for op in passes[loads[home[passes]] & ~has_read[passes]].tolist():
        yield Fault("loaded", op, f"{program.name(op)} reads no inputs, and those of its stage are loaded")
