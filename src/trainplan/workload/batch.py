"""Batches: splitting, joining, moving and counting them.

A tensor is split along its first dimension where that equals the number of samples; all else goes along whole, and so
does what the batch says is shared (an attention mask of 8 × 8 is no row a sample, in a batch of 8 neither). Tensors may
sit in dicts, lists and tuples of any depth, and in mappings such as transformers' `BatchEncoding`.

>>> import torch
>>> batch = Batch(3, args=(torch.tensor([10, 11, 12]),), kwargs={"scale": torch.tensor(0.5)}, targets=[torch.ones(3)])
>>> first, second = split(batch, [1, 2])
>>> second.args[0].tolist(), second.kwargs["scale"].item(), len(second.targets[0])
([11, 12], 0.5, 2)
>>> join([first, second]).args[0].tolist()
[10, 11, 12]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainplan.errors import InputError, PlanError
from trainplan.workload.workload import Batch


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Consecutive parts of the given sizes, which are views of the batch."""
    if any(size < 1 for size in sizes):
        raise PlanError(
            f"splitting {batch.samples} samples into {_list(sizes)}",
            "a part needs at least one sample",
            f"at most {batch.samples} parts",
        )
    if sum(sizes) != batch.samples:
        raise PlanError(
            f"splitting {batch.samples} samples into {_list(sizes)}",
            f"the sizes sum to {sum(sizes)}",
            f"sizes that sum to {batch.samples}",
        )
    parts, start = [], 0
    for size in sizes:
        parts.append(_each(batch, size, lambda tensor: tensor.narrow(0, start, size)))  # noqa: B023  # called at once
        start += size
    return parts


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """The samples with these numbers, in this order; a sample may come several times."""
    index = torch.tensor(rows, dtype=torch.long, device="cpu")
    return _each(batch, len(rows), lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def join(parts: Sequence[Batch]) -> Batch:
    """The batch whose parts these are, in order: the inverse of `split`.

    What all parts share (the same object, or equal in all and not of the length of its part) is taken once.
    """
    if not parts:
        return Batch(0)
    if len(parts) == 1:
        return parts[0]
    sizes, shared = [part.samples for part in parts], parts[0].shared
    return Batch(
        sum(sizes),
        _join([part.args for part in parts], sizes, "args", shared),
        _join([part.kwargs for part in parts], sizes, "kwargs", shared),
        _join([part.targets for part in parts], sizes, "targets", shared),
        shared,
    )


def to_device(
    batch: Batch, device: torch.device | str, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> Batch:
    """The batch on a device; with `dtype`, tensors of floating-point numbers become that type."""

    def move(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=kind, non_blocking=non_blocking)

    return each_tensor(batch, move)


def each_tensor(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed."""
    args, kwargs, targets = (_map(value, change) for value in (batch.args, batch.kwargs, batch.targets))
    return replace(batch, args=args, kwargs=kwargs, targets=targets)


def each_place(batch: Batch, change: Callable[[str, Tensor], Tensor]) -> Batch:
    """The same, told the place of every tensor, as `tensors` names it."""
    found = iter(tensors(batch))
    return each_tensor(batch, lambda tensor: change(next(found), tensor))


def tensors(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of the batch by its place.

    >>> list(tensors(Batch(2, args=(torch.ones(2),), kwargs={"mask": [torch.ones(2)]}, targets=torch.ones(2))))
    ['args[0]', 'kwargs[mask][0]', 'targets']
    """
    found: dict[str, Tensor] = {}
    for place in ("args", "kwargs", "targets"):
        _collect(getattr(batch, place), place, found)
    return found


def per_sample(batch: Batch, place: str, tensor: Tensor) -> bool:
    """Whether a tensor at this place of the batch has one row a sample."""
    return tensor.dim() > 0 and tensor.shape[0] == batch.samples and place not in batch.shared


def samples(*values: Any) -> int:
    """How many samples there are in plain values: the length of the first tensor that has one.

    >>> samples({"scale": torch.tensor(2.0), "x": torch.zeros(4, 3)}, torch.zeros(4))
    4
    """
    found: dict[str, Tensor] = {}
    for value in values:
        _collect(value, "", found)
        for tensor in found.values():
            if tensor.dim():
                return tensor.shape[0]
    raise InputError("a batch", "no tensor with a first dimension is in it", "tensors of shape (samples, …)")


def as_batch(value: Any, shared: frozenset[str] = frozenset()) -> Batch:
    """A `Batch` from what training loops pass around.

    * a `Batch` stays as it is;
    * a pair `(inputs, targets)`: inputs are one argument, a tuple of arguments, or a dict of keyword arguments;
    * a dict of keyword arguments, for a model that takes its labels too;
    * a tensor, for a model without targets.

    `shared` are places that are known to have no rows.

    >>> as_batch((torch.zeros(4, 3), torch.zeros(4))).samples, list(as_batch({"x": torch.zeros(2)}).kwargs)
    (4, ['x'])
    """
    if isinstance(value, Batch):
        return replace(value, shared=value.shared | shared)
    inputs, targets = value, None
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise InputError(
                f"a batch of {len(value)} items", "a pair (inputs, targets) was expected", "((a, b), targets) or a dict"
            )
        inputs, targets = value
    count = samples(inputs, targets)
    if isinstance(inputs, Mapping):
        return Batch(count, kwargs=dict(inputs), targets=targets, shared=shared)
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return Batch(count, args=args, targets=targets, shared=shared)


# -- nested values -------------------------------------------------------------------------------------------------


def _each(batch: Batch, size: int, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of `size` samples in which every tensor that holds one row a sample is changed."""

    def apply(place: str, tensor: Tensor) -> Tensor:
        return change(tensor) if per_sample(batch, place, tensor) else tensor

    changed = each_place(batch, apply)
    changed.samples = size
    return changed


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _rebuild(value, [_map(item, change) for item in value.values()])
    if isinstance(value, list | tuple):
        return _rebuild(value, [_map(item, change) for item in value])
    return value


def _rebuild(like: Any, items: list[Any]) -> Any:
    """A container of the same type with other items."""
    if isinstance(like, Mapping):
        if type(like) is dict:
            return dict(zip(like, items, strict=True))
        new: Any = copy.copy(like)  # keeps what a subclass holds beside its items
        for key, item in zip(like, items, strict=True):
            new[key] = item
        return new
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*items)
    return type(like)(items)


def _collect(value: Any, place: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[place] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{place}[{key}]", found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(item, f"{place}[{index}]", found)


def _join(values: list[Any], sizes: list[int], place: str, shared: frozenset[str]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise InputError(f"joining {place} of {len(values)} parts", f"their types differ: {kinds}", "one type for all")
    if isinstance(first, Tensor):
        rows = place not in shared
        if rows and all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(values)
        if all(torch.equal(value, first) for value in values):
            return first
        shapes = ", ".join(str(tuple(value.shape)) for value in values[:4])
        asked = f"joining {place} of parts of {_list(sizes)} samples"
        raise InputError(asked, f"their shapes are {shapes}", "a first dimension that is the number of samples")
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            other = next(value for value in values if value.keys() != first.keys())
            why = f"their keys differ: {list(first)} and {list(other)}"
            raise InputError(f"joining {place} of {len(values)} parts", why, "the same keys for all")
        items = [_join([value[key] for value in values], sizes, f"{place}[{key}]", shared) for key in first]
        return _rebuild(first, items)
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            other = next(value for value in values if len(value) != len(first))
            why = f"their lengths differ: {len(first)} and {len(other)}"
            raise InputError(f"joining {place} of {len(values)} parts", why, f"{len(first)} items for all")
        columns = zip(*values, strict=True)
        return _rebuild(first, [_join(list(of), sizes, f"{place}[{i}]", shared) for i, of in enumerate(columns)])
    if all(value == first for value in values):
        return first
    why = f"it differs between them and is no tensor: {first!r:.30}, {next(v for v in values if v != first)!r:.30}"
    raise InputError(f"joining {place} of {len(values)} parts", why, "a tensor with one row a sample")


def _list(sizes: Sequence[int]) -> str:
    shown = ", ".join(str(size) for size in sizes[:8])
    return f"[{shown}{', …' if len(sizes) > 8 else ''}]"
