"""Profiles that were measured before, so that nothing is measured twice.

A profile is found again by all that it depends on: the workload (its name, the user's file and what that imports from
beside it, the source of the model's modules, the functions that were given from Python), how it was to be measured, the
machine, the versions, and our own code that measured it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import trainplan
from trainplan.cluster.probe import machine as here
from trainplan.errors import TrainplanError
from trainplan.profile import machine
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.measure import SECONDS, Progress, measure
from trainplan.profile.profile import Profile
from trainplan.workload.call import Call
from trainplan.workload.modes import kept_in_evaluation
from trainplan.workload.origin import origin
from trainplan.workload.workload import Loss, Workload


def measured(
    workload: Workload,
    *,
    device: str | torch.device = "cpu",
    samples: Sequence[int] | None = None,
    compile: bool | Mapping[str, Any] = False,
    repeats: int | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
    verify: bool = True,
    refresh: bool = False,
) -> Profile:
    """The measured profile of a workload: the one that is remembered, or a new one, which is then remembered.

    `refresh` measures anew. The other arguments are those of `measure`. A workload made from a module in Python is
    measured every time: its name does not say what it is.
    """
    options = {"samples": samples, "compile": compile, "repeats": repeats, "seconds": seconds, "verify": verify}
    path = place(workload, device, options)
    if path is not None and path.is_file() and not refresh:
        try:
            return Profile.load(path)
        except TrainplanError:
            pass  # half-written by another version, or broken: as good as none
    profile = measure(workload, device=device, progress=progress, **options)  # type: ignore[arg-type]
    if path is not None:
        profile.save(path)
    return profile


def place(workload: Workload, device: str | torch.device, options: Mapping[str, Any]) -> Path | None:
    """The file that such a profile is kept in; None: it is not kept."""
    if workload.name.startswith("module:"):
        return None
    where = machine.device_of(device)
    key = {
        "workload": fingerprint(workload),
        "source": [source.path, source.digest] if (source := origin(workload.name)) else "",
        "model": _model(workload),
        "options": fingerprint(dict(options)),
        "device": machine.describe(where) if where.type == "cuda" else "cpu",
        "machine": here.identity(),
        "versions": here.versions(),
        "code": _own_code(),
    }
    mark = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return here.cache_folder() / f"profile-{mark}.json"


def fingerprint(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """A value as plain JSON that is the same in every process, and another for another value.

    Functions count with their code and all that they have closed over.

    >>> fingerprint(Call(int, {"base": 2})) == fingerprint(Call(int, {"base": 2}))
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in inside:  # a function that has closed over itself
        return "itself"

    def of(item: Any) -> Any:
        return fingerprint(item, (*inside, id(value)))

    if isinstance(value, Call):
        return [of(value.function), of(dict(value.options))]
    if isinstance(value, Workload | Loss):
        return {name: of(item) for name, item in vars(value).items()}
    if isinstance(value, types.FunctionType):
        closed = inspect.getclosurevars(value).nonlocals
        named = f"{value.__module__}.{value.__qualname__}"
        return [named, _code(value.__code__), of(value.__defaults__), of(closed)]
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape)]
    if isinstance(value, torch.nn.Module):
        return ["module", repr(value)]
    if isinstance(value, Mapping):
        return {str(key): of(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [of(item) for item in value]
    if isinstance(value, Callable | type):  # type: ignore[arg-type]
        named = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{named}"
    return type(value).__qualname__


def _code(code: types.CodeType) -> str:
    """A digest of a function's instructions and constants, those of functions inside it too."""

    def constant(item: Any) -> str:
        if isinstance(item, types.CodeType):
            return _code(item)
        # Sets have another order in every process.
        return repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item)

    text = code.co_code.hex() + repr(code.co_names) + repr([constant(item) for item in code.co_consts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _model(workload: Workload) -> str:
    """A digest of the model: its modules with their settings and their source, and its parameters."""
    model = Skeleton(workload.build).model
    sources = sorted({_source(type(module)) for module in model.modules()})
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    modes = kept_in_evaluation(model)
    return hashlib.sha256(repr((str(model), sources, shapes, modes)).encode()).hexdigest()[:16]


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made at run time, or written in C
        return kind.__qualname__


@cache
def _own_code() -> str:
    """A digest of our own source that a profile depends on."""
    root = Path(trainplan.__file__).parent
    digest = hashlib.sha256()
    for room in ("profile", "workload"):
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
