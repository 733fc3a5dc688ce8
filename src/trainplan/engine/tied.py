"""Weights that several stages hold: their gradients are put side by side and summed over all holders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainplan.program.lower.buckets import Tie

if TYPE_CHECKING:
    from trainplan.engine.held import Held


def copies_of(tie: Tie, held: dict[int, Held]) -> list[list[nn.Parameter]]:
    """The weights of a tie in every stage of this rank that holds them."""
    return [[one.parameters[name] for name in tie.names] for one in held.values() if one.number in tie.stages]


def side_by_side(members: list[nn.Parameter]) -> Tensor:
    """The gradients of some weights, one after the other."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in members]
    return torch.cat([g.reshape(-1) for g in gradients])
