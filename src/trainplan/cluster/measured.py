"""A device as a device file describes it: what a file says that `trainplan device measure -o FILE` has written.

Only what a cluster says of a device is read here. What it was measured to do, operator by operator, is read where
something is estimated, strictly (`profile/device`): by this file and by no other, since the device names it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from trainplan import files
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Device
from trainplan.errors import InputError

KIND = "device"  # what such a file says that it is
SLICED = "under MPS"  # what its `machine` says of a part of a GPU


@dataclass(frozen=True)
class _Sheet:
    """What of a device file is of interest here."""

    device: str
    processors: int
    peak: dict[str, float]
    memory_peak: float
    ceiling: dict[str, float]
    memory_rate: float
    capability: tuple[int, int] = (0, 0)
    machine: str = ""


def measured_device(path: str | Path, like: Device | None = None) -> Device:
    """The device of a file; its memory, and whatever else no kernel tells, is as of the one that it is `like`, which is
    the catalogue's of the same name where none is given.

    Roofs are those of its data sheet where that is known, and else the best that was measured. Its name is the file's,
    so that a part of a device is not taken for the whole; a slice knows of how many processors it is one. Where the
    catalogue has no such device, its memory is 0.
    """
    sheet = _read(path)
    known = like or (catalogue.device(sheet.device) if catalogue.has("device", sheet.device) else None)
    from_ = f"device file {Path(path).name}"
    sources = {key: source for key, source in (known.sources if known else {}).items() if not key.startswith("flops")}
    for precision in (flops := sheet.ceiling | sheet.peak):
        sources[f"flops.{precision}"] = _source(from_, precision in sheet.peak)
    sources |= {"memory_rate": _source(from_, bool(sheet.memory_peak)), "processors": f"measured: {from_}"}
    if any(sheet.capability):
        sources["capability"] = f"measured: {from_}"
    sheets = catalogue.device(sheet.device) if catalogue.has("device", sheet.device) else None
    part = sheets is not None and SLICED in sheet.machine and sheet.processors < sheets.processors
    base = known or Device(sheet.device, 0, {}, 0.0)
    return replace(
        base,
        # That a device is a CPU is told by its name.
        name="cpu" if sheet.device == "cpu" else Path(path).stem,
        flops=flops,
        memory_rate=sheet.memory_peak or sheet.memory_rate,
        processors=sheet.processors,
        capability=sheet.capability if any(sheet.capability) else base.capability,
        efficiency={},  # constants of devices without a file
        file=str(Path(path).resolve()),
        slice_of=sheets.processors if part and sheets is not None else 0,
        sources=sources,
    )


def device_named(path: str | Path) -> str:
    """What the device of a file is called in the catalogue, or by its driver."""
    return _read(path).device


def without_memory(where: str, path: str | Path) -> InputError:
    """The refusal of a device whose memory nobody says."""
    why = f"{device_named(path)} is not in the catalogue, and a device file does not say how much memory it has"
    instead = f"a cluster file: nodes: [{{devices: [{{file: {Path(path).name}, memory: 80GiB}}]}}]"
    return InputError(where, why, instead)


def _source(from_: str, of_sheet: bool) -> str:
    return f"data sheet, in {from_}" if of_sheet else f"measured: {from_}"


def _read(path: str | Path) -> _Sheet:
    data = files.read(path, KIND)
    known = {field.name for field in fields(_Sheet)}
    if not isinstance(data, dict):
        raise InputError(str(path), f"a mapping was expected, found {data!r:.60}", files.made_by(KIND))
    found = files.from_json(_Sheet, {key: value for key, value in data.items() if key in known}, str(path))
    rates = {f"ceiling.{p}": rate for p, rate in found.ceiling.items()} | {"memory_rate": found.memory_rate}
    for key, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise InputError(
                f"{path}.{key}", f"{rate}: it must be above zero, and finite", "measuring the device again"
            )
    return found
