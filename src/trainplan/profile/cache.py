"""Measured profiles, remembered: the same model on the same machine with the same versions is measured once.

The model is known by its name and by the source of all its modules, so a change to the user's file is noticed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import torch

from trainplan.cluster.probe import machine
from trainplan.errors import TrainplanError
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.workload.workload import Workload

Progress = Callable[[str, float], None]


def measured(
    workload: Workload,
    device: str = "cpu",
    *,
    compile: bool = False,
    refresh: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """The profile of a workload on a device of this machine; `refresh` measures it again."""
    path = path_of(workload, device, compile)
    if path.is_file() and not refresh:
        try:
            return Profile.load(path)
        except TrainplanError:
            pass  # of an older version, or broken: as good as none
    found = measure(workload, device=device, compile=compile, progress=progress)
    found.save(path)
    return found


def path_of(workload: Workload, device: str, compile: bool) -> Path:
    """The file that such a profile is kept in."""
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    key = {**machine.identity(), **machine.versions(), "device": name, "compile": compile, **_model(workload)}
    mark = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return machine.cache_folder() / f"profile-{mark}.json"


def _model(workload: Workload) -> dict[str, str]:
    with torch.device("meta"):
        model = workload.build()
    sources = {_source(type(module)) for module in model.modules()}
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "workload": workload.name,
        "batch": str(workload.batch),
        "model": hashlib.sha256(repr((str(model), shapes)).encode()).hexdigest(),
        "source": hashlib.sha256("".join(sorted(sources)).encode()).hexdigest(),
        "functions": hashlib.sha256(
            (_source(workload.loss.function) + _source(workload.optimizer) + _source(workload.inputs)).encode()
        ).hexdigest(),
    }


def _source(thing: object) -> str:
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return getattr(thing, "__qualname__", type(thing).__qualname__)
