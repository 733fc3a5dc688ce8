"""A backward pass in two parts: first the gradients of what came in (I), later those of the weights (W).

torch's own functions do it: while the first part runs, hooks keep the gradients at the places where the paths to the
weights branch off, and the second part goes on from there. Some operators run twice that way, which is why the two
together take longer than the whole.

A stage that nothing differentiable comes into has no first part: its I does nothing, and its W is the whole pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner


@dataclass
class Halfway:
    """What the first part leaves for the second."""

    groups: list[dict[str, Any]]  # torch's: weights, and the gradients where the paths to them branch off
    roots: list[Tensor]  # of the whole pass, where there was no first part
    seeds: list[Tensor | None]


def of_input(run: Runner, op: Instruction) -> None:
    """I: the gradients of what came in, which the stages before wait for."""
    from trainplan.engine.handlers import Pass, give_back, roots_of

    state, held = run.current, run.part.held[op.stage]
    done: Pass = state.values[op.held[0]]
    roots, seeds = roots_of(run, op, done)
    leaves = {name: leaf for name, leaf in done.leaves.items() if leaf.requires_grad}
    if not leaves:
        state.passes[op.stage, op.micro] = Halfway([], roots, seeds)
        return
    # torch cuts the roots off from their graph when it is through with them, which it cannot do to a view.
    ends = [root.clone() if root._is_view() else root for root in roots]
    given = [torch.ones_like(end) if seed is None else seed for end, seed in zip(ends, seeds, strict=True)]
    _, groups = stage_backward_input(ends, given, list(leaves.values()), iter(held.parameters.values()))
    state.passes[op.stage, op.micro] = Halfway(groups, [], [])
    give_back(run, op, {name: leaf.grad for name, leaf in done.leaves.items()}, done.leaves)


def of_weights(run: Runner, op: Instruction) -> None:
    """W: the gradients of the weights, which only the optimizer waits for."""
    halfway: Halfway = run.current.passes.pop((op.stage, op.micro))
    if halfway.roots:
        torch.autograd.backward(halfway.roots, halfway.seeds)
    else:
        stage_backward_weight(iter(run.part.held[op.stage].parameters.values()), halfway.groups)
