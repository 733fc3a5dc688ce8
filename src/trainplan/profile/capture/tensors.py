"""The tensors that a model holds: parameters, buffers, and tensors kept as plain attributes, each once and by name.

A tensor that is registered under several names (tied weights) is one `Held` under its first name; the others are its
aliases. A plain attribute (`self.scale = torch.tensor(2.0)`) is state as much as a buffer is, though `state_dict`
does not know it; we treat it as a buffer that is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainplan.errors import ModelError

Kind = Literal["parameter", "buffer", "attribute"]


@dataclass(frozen=True)
class Held:
    """One tensor that the model holds, without its values."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool  # a parameter with requires_grad
    persistent: bool  # part of the state_dict
    aliases: tuple[str, ...] = ()  # other names of the same tensor

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize


def entries_of(model: nn.Module) -> Iterator[tuple[str, Kind, nn.Module, str, Tensor]]:
    """(full name, kind, owner, name in the owner, tensor), in order of registration; a shared tensor comes again."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + key, "parameter", module, key, parameter
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield dot + key, "buffer", module, key, buffer
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield dot + key, "attribute", module, key, value


def held(model: nn.Module) -> dict[str, Held]:
    """What the model holds, by first name: parameters in the order of `named_parameters`, then the rest.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> [(name, held.aliases) for name, held in held(tied).items()]
    [('0.weight', ('1.weight',))]
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[str, Kind, nn.Module, str, Tensor]] = {}
    for entry in entries_of(model):
        same = names.setdefault(id(entry[4]), [])
        if entry[0] not in same:
            same.append(entry[0])
        found.setdefault(id(entry[4]), entry)
    ordered = sorted(found.values(), key=lambda entry: ("parameter", "buffer", "attribute").index(entry[1]))
    return {name: _describe(name, kind, owner, key, tensor, names) for name, kind, owner, key, tensor in ordered}


def _describe(name: str, kind: Kind, owner: nn.Module, key: str, tensor: Tensor, names: dict[int, list[str]]) -> Held:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        raise ModelError(
            f"capture of {kind} {name!r}",
            f"it is a {type(tensor).__name__} with layout {tensor.layout}, and only plain dense tensors are handled",
            "capturing the model before it is sharded, quantised or made lazy",
        )
    return Held(
        name=name,
        kind=kind,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        trainable=kind == "parameter" and tensor.requires_grad,
        persistent=kind == "parameter" or (kind == "buffer" and key not in owner._non_persistent_buffers_set),
        aliases=tuple(other for other in names[id(tensor)] if other != name),
    )


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by first name: the parameter objects themselves, not copies."""
    values: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, _kind, _owner, _key, tensor in entries_of(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            values[name] = tensor
    return values


def within_parameters(values: Mapping[str, Tensor]) -> set[str]:
    """The tensors, other than parameters, that lie in the memory of one (`weight` of the old spectral_norm does).

    >>> linear = nn.Linear(2, 2)
    >>> linear.view = linear.weight.data
    >>> within_parameters(values_of(linear))
    {'view'}
    """
    memory = {v.untyped_storage()._cdata for v in values.values() if isinstance(v, nn.Parameter)}
    others = {name: value for name, value in values.items() if not isinstance(value, nn.Parameter)}
    return {name for name, value in others.items() if value.untyped_storage()._cdata in memory}


@contextmanager
def replaced(model: nn.Module, values: Mapping[str, Tensor], attributes_as_buffers: bool = False) -> Iterator[None]:
    """Put other tensors (by first name) in the place of the model's own, under all their names, for a while.

    The model's own tensors are back afterwards, whatever happened, including those that forward assigned anew.
    """
    first_name: dict[int, str] = {}
    entries = list(entries_of(model))
    saved = []
    for name, kind, owner, key, tensor in entries:
        first_name.setdefault(id(tensor), name)
        saved.append((kind, owner, key, tensor))
    try:
        for _name, kind, owner, key, tensor in entries:
            value = values[first_name[id(tensor)]]
            if kind == "attribute" and attributes_as_buffers:
                vars(owner).pop(key, None)  # a module with two names comes twice
                owner._buffers[key] = value
                owner._non_persistent_buffers_set.add(key)
            else:
                put(kind, owner, key, value)
        yield
    finally:
        for kind, owner, key, tensor in saved:
            if kind == "attribute":
                owner._buffers.pop(key, None)
                owner._non_persistent_buffers_set.discard(key)
            put(kind, owner, key, tensor)


def put(kind: Kind, owner: nn.Module, key: str, value: Tensor) -> None:
    # Straight into the dictionaries: setattr would run registration hooks and refuse tensors that are not Parameters.
    if kind == "parameter":
        owner._parameters[key] = value  # type: ignore[assignment]
    elif kind == "buffer":
        owner._buffers[key] = value
    else:
        vars(owner)[key] = value
