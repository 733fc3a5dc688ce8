"""Values that a user's own model begins with: those of rank 0, on every rank, as torch's DDP has it.

Every rank builds the model for itself. Where nobody seeded the random numbers these models differ, and then so would
replicas, and the copies of a weight in two stages, for good: what is exchanged is gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainplan.errors import ModelError
from trainplan.profile.capture.tensors import values_of


def agree(model: nn.Module, device: torch.device | str) -> tuple[str, ...]:
    """Give this rank's model the values of rank 0's where any rank has others, and say which; all ranks call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    own = values_of(model)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, {name: _said(value) for name, value in own.items()})
    first = said[0]
    for rank, other in enumerate(said):
        differ = sorted(name for name in {*first, *other} if first.get(name, ())[:2] != other.get(name, ())[:2])
        if differ:
            here, there = (_form(said.get(differ[0])) for said in (first, other))
            why = f"{differ[0]} is {here} on rank 0, and {there} on rank {rank}"
            raise ModelError("the model on every rank", why, "building the same model on all of them")
    names = tuple(sorted(name for name in first if any(other[name] != first[name] for other in said)))
    # NCCL sends what is on a GPU, and gloo what is not: a model may be anywhere.
    place = device if dist.get_backend() == "nccl" else "cpu"
    with torch.no_grad():
        for name in names:
            sent = own[name].detach().to(place, copy=True).contiguous()
            dist.broadcast(sent, src=0)
            own[name].copy_(sent)
    return names


def _said(value: Tensor) -> tuple[Any, ...]:
    """The form of a tensor, and two sums over it, which no two draws have in common."""
    if value.is_meta:
        return tuple(value.shape), str(value.dtype)
    flat = value.detach().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        flat = flat.to(torch.float64)
    numbers = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    weights = torch.arange(1, min(numbers.numel(), 64) + 1, dtype=torch.float64, device=numbers.device)
    sums = numbers.sum(dtype=torch.float64), (numbers[: len(weights)].to(torch.float64) * weights).sum()
    return tuple(value.shape), str(value.dtype), *(float(s) for s in sums)


def _form(said: tuple[Any, ...] | None) -> str:
    return f"{said[0]} {said[1]}" if said else "not there"
