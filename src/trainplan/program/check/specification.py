"""The written specification of a legal program.

Every program is held against it before it is predicted and before it is launched. Each rule below is a function that
finds all its faults; `check` raises one error that lists them and shows the lists of the ranks with the faulty places
marked.

1. *listed*: each operation stands exactly once in the list of each of its ranks, and in no other.   (passes.py)
2. *once*: each micro-batch goes exactly once forward and once backward through each stage of its pipeline, and all
   stages see the same micro-batches.
3. *matched*: each message is sent once and received once, by the rank that it is for, with the same bytes; nothing
   else passes between ranks. What a stage leaves for another on the same rank is taken by it.   (messages.py)
4. *alive*: an operation makes, reads and frees only what is on its rank, after it was made and before it is freed.
   (memory.py)
5. *updated*: a stage steps once, after every backward pass of the step and after every exchange of its gradients; an
   exchange sums something of every member, and every member reads the sum. Where replicas share out a stage, each
   steps its share, and nobody computes with weights that were not gathered since.   (weights.py)
6. *fresh*: compute reads weights that lack no more updates than the program allows, and backward the same as forward.
7. *ends*: no operation waits for itself in a circle: the program runs to its end.   (order.py)
8. *ordered*: there is one order of all collectives that every rank keeps to, also of collectives of different groups.
9. *apart*: between ranks that meet at barriers, a message is sent and received between the same two.
10. *loaded*: where a stage's inputs are loaded (or received) in the program, each of its forward passes reads those of
    its own step.   (inputs.py)
11. *back*: what is copied out is given up on the device only by an operation that waits for the copy, comes back once,
    and is read then by the backward pass that it was saved for.   (away.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainplan.errors import ProgramError
from trainplan.program.check.away import back
from trainplan.program.check.grid import grid
from trainplan.program.check.inputs import loaded
from trainplan.program.check.memory import alive
from trainplan.program.check.messages import handed_over, matched
from trainplan.program.check.order import apart, ends, ordered
from trainplan.program.check.passes import listed, once
from trainplan.program.check.suspects import suspects
from trainplan.program.check.view import Fault, View, view_of
from trainplan.program.check.weights import fresh, gathered, updated
from trainplan.program.program import Program
from trainplan.program.wiring import Wiring, wire

_SHOWN = 12  # faults beyond these are counted, not printed
RULES: tuple[Callable[[View], Iterator[Fault]], ...] = (
    once, matched, handed_over, alive, updated, gathered, fresh, ends, ordered, apart, loaded, back,
)  # fmt: skip


def faults(program: Program, wiring: Wiring | None = None) -> list[Fault]:
    """All faults of a program."""
    view = view_of(program, wiring or wire(program))
    found = list(listed(view))
    if found:  # the other rules need sound lists
        return found
    for rule, suspected in zip(RULES, suspects(view), strict=True):
        if suspected:
            found += rule(view)
    return found


def check(program: Program, wiring: Wiring | None = None) -> Program:
    """The program itself, if it is legal; otherwise an error that shows every fault in its place."""
    found = faults(program, wiring)
    if found:
        lines = [f"  {f.rule}: {f.why}" for f in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  … and {len(found) - _SHOWN} more")
        lists = grid(program, {f.op for f in found if f.op >= 0})
        title = f"program {program.title}".strip()
        raise ProgramError(title, f"it is not legal, {len(found)} fault(s)\n" + "\n".join(lines) + "\n" + lists)
    return program
