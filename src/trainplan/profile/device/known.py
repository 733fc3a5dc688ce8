"""Which device files there are: those that come with the package, and those that this user has measured.

What comes with the package is the same everywhere; ranks that must come to the same plan by themselves use no others.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from math import log
from pathlib import Path

from trainplan.cluster.cluster import Device
from trainplan.cluster.probe.machine import cache_folder
from trainplan.profile.device.file import DeviceFile
from trainplan.profile.device.model import Model, describes


def place_of(device: str) -> Path:
    """Where this user's file of a device is kept.

    >>> place_of("NVIDIA Other GPU").name
    'NVIDIA-Other-GPU.json'
    """
    return cache_folder() / "devices" / (re.sub(r"[^\w.]+", "-", device) + ".json")


def own() -> tuple[DeviceFile, ...]:
    """Those that this user has measured."""
    folder = cache_folder() / "devices"
    return tuple(DeviceFile.load(path) for path in sorted(folder.glob("*.json")))


@cache
def packaged() -> tuple[DeviceFile, ...]:
    """Those that come with the package."""
    folder = resources.files("trainplan.profile.device") / "files"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".json")] if folder.is_dir() else []
    return tuple(DeviceFile.load(str(entry)) for entry in sorted(found, key=lambda entry: entry.name))


_models: dict[str, Model] = {}  # of the package's files, by device


def model_of(device: Device, measured_here: bool = False) -> Model | None:
    """The model of a device: by its own file, or scaled from the nearest of its kind; None where there is none.

    `measured_here`: files that this user has measured count, too, and come first.
    """
    files = (*(own() if measured_here else ()), *packaged())
    alike = [file for file in files if describes(file, device)][:1] or [file for file in files if _alike(file, device)]
    if not alike:
        return None
    nearest = min(alike, key=lambda file: _apart(file, device))
    if not any(file is nearest for file in packaged()):
        return Model(nearest, device)
    words = repr(device)
    if words not in _models:  # a search asks for the same one thousands of times, and it remembers what it was asked
        _models[words] = Model(nearest, device)
    return _models[words]


def _alike(file: DeviceFile, device: Device) -> bool:
    """Whether one may be scaled to the other: both or neither are CPUs, and have the same kinds of arithmetic."""
    if file.is_cpu or device.name == "cpu":
        return False  # a core of unknown make: the catalogue's numbers are as good as another core's
    return set(file.peak) == set(device.flops)


def _apart(file: DeviceFile, device: Device) -> float:
    """How far two devices' rates are apart, in logarithms."""
    rates = [abs(log(device.flops[p] / file.peak[p])) for p in file.peak if p in device.flops]
    memory = log(device.memory_rate / file.memory_peak) if file.memory_peak else 0.0
    return sum(rates) / max(1, len(rates)) + abs(memory)
