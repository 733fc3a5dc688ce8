"""A backward pass in two parts: first the gradients of what came in (I), later those of the weights (W).

torch's own functions do it: while the first part runs, hooks keep the gradients at the places where the paths to the
weights branch off, and the second part goes on from there. Some operators run twice that way, which is why the two
together take longer than the whole.

What nothing differentiable comes into has no first part: its I does nothing, and its W is the whole pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


@dataclass
class Halfway:
    """What the first part leaves for the second."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # torch's: weights, and gradients where paths branch off
    roots: list[Tensor] = field(default_factory=list)  # of the whole pass, where there was no first part
    seeds: list[Tensor | None] = field(default_factory=list)


def backward_input(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Iterable[Tensor], weights: Iterable[nn.Parameter]
) -> Halfway:
    """The gradients of the leaves, into their `.grad`."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not roots:
        return Halfway(roots=list(roots), seeds=list(seeds))
    # torch cuts the roots off from their graph when it is through with them, which it cannot do to a view.
    ends = [root.clone() if root._is_view() else root for root in roots]
    given = [torch.ones_like(end) if seed is None else seed for end, seed in zip(ends, seeds, strict=True)]
    _, groups = stage_backward_input(ends, given, wanted, iter(list(weights)))
    return Halfway(groups)


def backward_weight(halfway: Halfway, weights: Iterable[nn.Parameter]) -> None:
    """The gradients of the weights, added to their `.grad`."""
    if halfway.roots:
        torch.autograd.backward(halfway.roots, halfway.seeds)
    elif halfway.groups:
        stage_backward_weight(iter(list(weights)), halfway.groups)
