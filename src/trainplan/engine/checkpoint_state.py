"""The optimizer's state in a checkpoint: what it keeps of a parameter, entry by entry, under the parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# What a rank loads at once: places for it, and what becomes of it once it is there.
Portion = tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]


def entries(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"optimizer.{name}:{key}": value for key, value in state.items() if value is not None}


def state_wanted(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: dict[str, Any]
) -> dict[str, Any]:
    """Places for the optimizer's state of some of the parameters that are here."""
    wanted = dict[str, Any]()
    groups = optimizer.param_groups
    on_device = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    for key, item in saved.items():
        name, _, entry = key.removeprefix("optimizer.").rpartition(":")
        if not key.startswith("optimizer.") or name not in parameters:
            continue
        if not isinstance(item, TensorStorageMetadata):
            wanted[key] = None
            continue
        # The number of the step stays on the host, unless the optimizer's kernel reads it, as torch has it.
        parameter = parameters[name]
        on_host = entry == "step" and parameter not in on_device
        device = torch.device("cpu") if on_host else parameter.device
        wanted[key] = torch.empty(item.size, dtype=item.properties.dtype, device=device)
    return wanted


def by_name(loaded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was loaded of the optimizer, by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(":")
            found.setdefault(name, {})[entry] = value
    return found
