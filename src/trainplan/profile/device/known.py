"""Which device files there are: those that come with the package, and those that this user has measured.

What comes with the package is the same everywhere; ranks that must come to the same plan by themselves use no others.
A device of a cluster may name a file (`Device.file`): then that one counts, and no other.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import resources
from pathlib import Path

from trainplan.cluster.cluster import Device
from trainplan.cluster.probe.machine import cache_folder
from trainplan.errors import InputError
from trainplan.profile.device.file import PART, DeviceFile
from trainplan.profile.device.model import Model, apart, describes


def place_of(device: str) -> Path:
    """Where this user's file of a device is kept.

    >>> place_of("NVIDIA Other GPU").name
    'NVIDIA-Other-GPU.json'
    """
    return cache_folder() / "devices" / (re.sub(r"[^\w.]+", "-", device) + ".json")


def own() -> tuple[DeviceFile, ...]:
    """Those that this user has measured to the end. One that cannot be read, or that ended early, is named in a
    warning, and passed over; what is still being measured is not looked at."""
    found = []
    for path in sorted((cache_folder() / "devices").glob("*.json")):
        if path.name.endswith(PART):
            continue
        try:
            file = DeviceFile.load(path)
        except InputError as error:
            warnings.warn(f"a device file that was measured here is passed over: {error}", stacklevel=2)
            continue
        if file.whole:
            found.append(file)
        else:
            why = f"{path}: measuring ended early ({file.coverage}). Try trainplan device measure"
            warnings.warn(f"a device file that was measured here is passed over: {why}", stacklevel=2)
    return tuple(found)


@cache
def packaged() -> tuple[DeviceFile, ...]:
    """Those that come with the package, whose numbers its tests have looked through."""
    folder = resources.files("trainplan.profile.device") / "files"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".json")] if folder.is_dir() else []
    return tuple(DeviceFile.load(str(entry), known=True) for entry in sorted(found, key=lambda entry: entry.name))


_models: dict[str, Model] = {}  # of the package's files and of those that devices name, by device


def model_of(device: Device, measured_here: bool = False) -> Model | None:
    """The model of a device: by its own file, or scaled from the nearest of its kind; None where there is none.

    `measured_here`: files that this user has measured count, too, and come first. Where the device names a file, that
    one is taken.
    """
    if device.file:
        return _kept(device, device.file)
    files = (*(own() if measured_here else ()), *packaged())
    alike = [file for file in files if describes(file, device)][:1] or [file for file in files if _alike(file, device)]
    if not alike:
        return None
    nearest = min(alike, key=lambda file: apart(file, device))
    if not any(file is nearest for file in packaged()):
        return Model(nearest, device)
    return _kept(device, nearest)


def _kept(device: Device, file: DeviceFile | str) -> Model:
    """The model of a device by a file: a search asks for the same one thousands of times, and it remembers what it was
    asked."""
    words = repr(device)
    if isinstance(file, str) and Path(file).exists():  # it may be measured again meanwhile
        words += f" {Path(file).stat().st_mtime_ns}"
    if words not in _models:
        _models[words] = Model(DeviceFile.load(file) if isinstance(file, str) else file, device)
    return _models[words]


def _alike(file: DeviceFile, device: Device) -> bool:
    """Whether one may be scaled to the other: both or neither are CPUs, and have the same kinds of arithmetic."""
    if file.is_cpu or device.name == "cpu":
        return False  # a core of unknown make: the catalogue's numbers are as good as another core's
    return set(file.peak) == set(device.flops)
