"""Backward in two parts, as the program has it: I and W (how: `profile/capture/halves.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainplan.engine import crossing
from trainplan.profile.capture.halves import Halfway, backward_input, backward_weight

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner


def of_input(run: Runner, op: Instruction, place: int) -> None:
    """I: the gradients of what came in, which the stages before wait for."""
    from trainplan.engine.handlers import Pass, give_back, roots_of

    done: Pass = run.current.values[op.held[0]]
    weights = run.part.held[op.stage].parameters.values()
    run.current.passes[op.stage, op.micro] = backward_input(*roots_of(run, op, done), done.leaves.values(), weights)
    give_back(run, op, {name: leaf.grad for name, leaf in done.leaves.items()}, done.leaves)


def of_weights(run: Runner, op: Instruction, place: int) -> None:
    """W: the gradients of the weights, which only the optimizer waits for."""
    from trainplan.engine.handlers import completes

    last = completes(run, op)
    crossing.backward_begins(run, op, last)
    halfway: Halfway = run.current.passes.pop((op.stage, op.micro))
    backward_weight(halfway, run.part.held[op.stage].parameters.values())
    crossing.backward_over(run, op, last)
