"""Python state that forward changes from call to call: a counter, a list that grows, a generator of its own.

A graph of operators has no such state; what it was at capture would be frozen into every stage. So a model whose
forward changes some is refused. What settles is harmless: a shape or a mask that the first call computes and later
calls find again. The rule is therefore: the state after the third call on the same batch is the state after the second.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainplan.errors import ModelError

State = dict[tuple[str, str], Any]  # (module, attribute) → its value as it was, in a form that can be compared

CALLS = 3
# What nn.Module itself keeps: parameters, buffers and submodules are looked at by name, and hooks are no state.
_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, Tensor)
_DEPTH = 20  # of containers and objects in one another; what lies deeper is not looked at


def python_state(model: nn.Module) -> State:
    """All plain attributes of all modules, by module and attribute, frozen.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> model.seen = [1]
    >>> before = python_state(model)
    >>> model.seen.append(2)
    >>> changed(before, python_state(model))
    ('', 'seen', '[1]', '[1, 2]')
    """
    seen: set[int] = set()
    return {
        (name, key): _frozen(value, seen)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OWN
    }


def changed(before: State, after: State) -> tuple[str, str, str, str] | None:
    """The first attribute that differs: its module, its name, and what it was and is; None if all is as it was."""
    for module, key in [*before, *(place for place in after if place not in before)]:
        old, new = before.get((module, key)), after.get((module, key))
        if old != new:
            return module, key, _shown(old), _shown(new)
    return None


def settled(model: nn.Module, states: list[State]) -> None:
    """Refuse a model whose Python state still moved between the last two of these states, each taken after a call."""
    found = changed(*states[-2:])
    if found is not None:
        module, key, old, new = found
        where = f"module {module!r}" if module else f"the model itself ({type(model).__name__})"
        raise ModelError(
            f"capture of the attribute {key!r} in {where}",
            f"forward changes it at every call (on the same batch {old} after call {len(states) - 1}, {new} after call "
            f"{len(states)}), and a captured model would keep its first value for ever",
            "register_buffer and tensor operators for what forward reads, or counting outside of forward",
        )


def settles(model: nn.Module, call: Callable[[], Any]) -> None:
    """Call a model some times, and refuse it if its Python state does not come to rest; the state is put back."""
    states = []
    with kept(model):
        for _ in range(CALLS):
            call()
            states.append(python_state(model))
    settled(model, states)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Attributes of all modules, and what is in their containers, are afterwards what they were before."""
    found: dict[int, Any] = {}
    for module in model.modules():
        found[id(vars(module))] = vars(module)
        for key, value in vars(module).items():
            if key not in _OWN:
                _collect(value, found)
    saved = [(value, value.copy()) for value in found.values()]
    try:
        yield
    finally:
        for value, content in saved:
            if isinstance(value, dict):
                for key in [key for key in value if key not in content]:
                    del value[key]
                value.update(content)
            else:
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(content)


def _collect(value: Any, found: dict[int, Any], depth: int = 0) -> None:
    """Every container that can be reached from a value; the attributes of an object are one."""
    inside = value if type(value) in _CONTAINERS else _attributes(value)
    if inside is not None:
        if id(inside) in found:
            return
        found[id(inside)] = inside
    parts = value if isinstance(value, tuple) else inside
    if parts is not None and depth < _DEPTH:
        for part in list(parts.values() if isinstance(parts, dict) else parts):
            _collect(part, found, depth + 1)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's (a configuration, a counter)."""
    found = None if isinstance(value, _OPAQUE) else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def _frozen(value: Any, seen: set[int], depth: int = 0) -> Any:
    """A value in a form that later changes do not reach, and that is equal where the values are."""
    if value is None or isinstance(value, bool | int | str | bytes | complex | torch.dtype | torch.device):
        return value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, _SYMBOLS):
        return str(value)  # comparing it would ask the tracer to decide
    if isinstance(value, Tensor):
        return ("tensor", tuple(map(str, value.shape)), value.dtype, _digest(value))
    if isinstance(value, np.ndarray | np.generic):
        return ("array", np.shape(value), str(value.dtype), hashlib.sha256(np.asarray(value).tobytes()).hexdigest())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([np.asarray(part).tobytes() for part in value.get_state(legacy=True)])
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, itertools.count):
        return repr(value)
    attributes = _attributes(value)
    contained = isinstance(value, dict | list | tuple | set | frozenset | deque)
    if (attributes is None and not contained) or depth >= _DEPTH:
        return type(value).__name__
    if not isinstance(value, tuple):
        if id(value) in seen:
            return "again"
        seen.add(id(value))
    inside: Any = None
    if isinstance(value, dict):
        inside = {key: _frozen(part, seen, depth + 1) for key, part in list(value.items())}
    elif isinstance(value, set | frozenset):
        inside = set(value)
    elif contained:
        inside = [_frozen(part, seen, depth + 1) for part in list(value)]
    if not attributes:
        return inside if contained else type(value).__name__
    return (type(value).__name__, inside, {k: _frozen(part, seen, depth + 1) for k, part in list(attributes.items())})


def _digest(tensor: Tensor) -> str:
    """The values of a tensor, where it has any."""
    if torch._subclasses.fake_tensor.is_fake(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return ""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def _shown(value: Any) -> str:
    text = f"a {value[0]}" if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
