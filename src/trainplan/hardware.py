"""The public functions about devices: what one was measured to do, and what bounds a model on it.

They belong to `trainplan.api`, which names them; here because they need no plan and no cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, nearest, refuse_unheard
from trainplan.situation import made_in_python, parts

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Device
    from trainplan.profile.device.file import DeviceFile
    from trainplan.profile.device.model import Model
    from trainplan.report.device import MeasuredDevice
    from trainplan.report.roofline import Roofline


def device(
    action: str = "show",
    name: str = "",
    output: str | None = None,
    device: str = "",
    minutes: float = 5.0,
    quick: bool = False,
) -> MeasuredDevice:
    """Measure a device of this machine (`measure`), or show what its file says (`show` NAME or FILE).

    A measurement is kept for this user, in `output` or where later estimates find it, and takes at most so many
    minutes. `device` is torch's name of it: cuda:0, cpu; without it, the GPU where there is one. `quick` measures a
    handful of shapes, to see that all works; such a file is kept only where `output` says.
    """
    from trainplan.report.device import MeasuredDevice

    if action == "show":
        given, of = {"device": device, "minutes": minutes, "quick": quick}, f"device show {name}".strip()
        instead = "device measure with them, or leaving them out"
        refuse_unheard(_DEVICE, given, given, of, "a file is shown, and nothing is measured", instead)
        found, path, scaled_to = _file(name)
        if output:
            found.save(output)
        return MeasuredDevice(found, output or path, scaled_to)
    if action != "measure":
        raise InputError(f"device {action}", "a device can be shown or measured", nearest(action, ("show", "measure")))
    if name:
        raise InputError(f"device measure {name}", "what is measured is a device of this machine", f"--device {name}")
    import torch

    from trainplan.profile import machine
    from trainplan.profile.device.known import place_of
    from trainplan.profile.device.measure import measure, part_of
    from trainplan.report.lines import command
    from trainplan.report.progress import progress

    chosen = machine.device_of(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    path = output or ("" if quick else str(place_of(machine.name_of(chosen))))
    typed = command("device", "measure", device=str(chosen), minutes=minutes) + (" --quick" if quick else "")
    with progress() as report:
        found = measure(chosen, minutes, path or None, quick, report, typed)
    if path and not found.whole and part_of(path).is_file():  # what is there is whole, and stays
        path = str(part_of(path))
    return MeasuredDevice(found, path)


_DEVICE = device  # in the function its name is torch's of the device


def _file(name: str) -> tuple[DeviceFile, str, str]:
    """The device file that is meant, where it is, and which device is scaled from it, where it has none of its own."""
    from trainplan.cluster import catalogue
    from trainplan.profile.device.file import DeviceFile
    from trainplan.profile.device.known import model_of, own, packaged, place_of

    if name.endswith(".json"):
        return DeviceFile.load(name), name, ""
    known = {file.device: file for file in (*packaged(), *own())}
    by_lower = {file.lower(): file for file in known}
    asked = f"device show {name}".strip()
    if not known:
        why = "no device has been measured here, and none comes with this version"
        raise InputError(asked, why, "trainplan device measure")
    if not name and len(known) == 1:
        name = next(iter(known))
    if name.lower() in by_lower:
        found = known[by_lower[name.lower()]]
        path = place_of(found.device)
        return found, str(path) if path.is_file() else "", ""
    if not catalogue.has("device", name):
        names = dict.fromkeys((*known, *catalogue.names("device")))
        raise InputError(asked, "there is no such device in the catalogue, and no file of it", nearest(name, names))
    there = catalogue.device(name)
    model = model_of(there, measured_here=True)
    if model is None:
        why = f"there is no file of {there.name}, nor of a device like it: estimates are by its data sheet"
        raise InputError(asked, why, "trainplan device measure, where there is one")
    return model.file, "", there.name


def roofline(
    model: Any,
    device: str = "H100-SXM",
    batch: int | None = None,
    precision: str = "fp32",
    output: str | None = None,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Roofline:
    """Arithmetic intensity and bound of every operator of a model on a device.

    `device` is a name of the catalogue or a device file; `precision` is what the model's numbers are in (bf16, fp16),
    or what products of 32-bit numbers run in (fp32, tf32). `output` is a picture.
    """
    from trainplan.profile.bounds import bounds, in_half
    from trainplan.profile.estimate import traced
    from trainplan.profile.roofline import speed_of
    from trainplan.report.picture import check_picture
    from trainplan.report.progress import progress
    from trainplan.report.roofline import Roofline, draw
    from trainplan.workload.load import load

    if output:
        check_picture(output)
    there, measured = _device(device)
    speed = speed_of(there, precision, measured)
    if batch is not None and batch < 1:
        raise InputError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    made = made_in_python(model, parts(inputs, loss, optimizer)) or load(model)
    size = batch or made.batch
    version = speed.model.file.versions.get("torch", "") if speed.model is not None else ""
    with progress() as report:
        work = in_half(made, precision)
        found = traced(work, [size], not speed.is_cpu, report, capability=there.capability, version=version)
    answer = bounds(found.at(size), [block.name for block in found.base.blocks], made.name, speed)
    if output:
        draw(answer, output)
    return Roofline(answer, output or "")


def _device(name: str) -> tuple[Device, Model | None]:
    """The device that is meant, and what was measured of it or of one like it."""
    from trainplan.cluster import catalogue
    from trainplan.cluster.measured import measured_device
    from trainplan.profile.device.known import model_of

    there = measured_device(name) if name.endswith(".json") else catalogue.device(name)
    return there, model_of(there, measured_here=True)
