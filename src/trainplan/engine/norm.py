"""The norm of all gradients, and gradients that are scaled so that it is no larger than it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainplan.engine import crossing
from trainplan.engine.pending import exchange

if TYPE_CHECKING:
    from trainplan.engine.held import Held
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner


def norm(run: Runner, op: Instruction, place: int) -> None:
    """The sum over the ranks whose gradients together are those of the model."""
    crossing.wait(run, run.part.exchanges)
    total = _squares(run).reshape(1)
    exchange(run, op, total).wait()
    run.current.norm = float(total) ** 0.5


def _squares(run: Runner) -> Tensor:
    """Sum of the squares of the gradients that this rank answers for."""
    parameters = [p for held in run.part.held.values() for p in held.counted if p.grad is not None]
    squares = [p.grad.detach().to(torch.float64).square().sum() for p in parameters if p.grad is not None]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return total.to(run.part.device)


def clip(run: Runner, held: Held, limit: float) -> None:
    """Scale the gradients of a stage so that their norm over all stages is at most the limit."""
    state = run.current
    if state.norm is None:
        assert run.part.layout.plan.pp == 1  # with several ranks the program has a NORM
        state.norm = float(_squares(run)) ** 0.5
    scale = limit / (state.norm + 1e-6)
    if scale < 1:
        for parameter in held.stepped.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
