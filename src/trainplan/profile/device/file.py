"""A device file: what a device was measured to do, as data. Imports no torch.

Made by `trainplan device measure`, from shapes that belong to no model. Whatever is in it was measured on that device;
what could not be is named under `missing`, with the reason. A file is read strictly: an unknown key, a number that
cannot be, or a rate above the device's own data sheet is refused with the name of the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from trainplan import files
from trainplan.errors import InputError, nearest
from trainplan.profile.device.families import DIMENSIONS, PRECISIONS, VARIANTS, amounts
from trainplan.units import gb_per_s, percent, tflops

KIND = "device"
TOLERANCE = 1.05  # a measured rate may be above a data sheet's by so much: clocks are boosted, sheets rounded


@dataclass(frozen=True)
class Curve:
    """Seconds by shape, of one variant of a family in one precision."""

    family: str
    variant: str
    precision: str
    points: tuple[str, ...]  # each "size size … seconds"

    @property
    def name(self) -> str:
        return f"{self.family}.{self.variant}.{self.precision}"

    @property
    def shapes(self) -> np.ndarray:
        """A row of whole numbers for each point."""
        return self._numbers[:, :-1].astype(np.int64)

    @property
    def seconds(self) -> np.ndarray:
        return self._numbers[:, -1]

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.array(" ".join(self.points).split(), dtype=float).reshape(len(self.points), -1)


def point(shape: tuple[int, ...], seconds: float) -> str:
    """A point as it is written.

    >>> point((1, 64, 64, 64), 2.3456e-6)
    '1 64 64 64 2.346e-06'
    """
    return " ".join(map(str, shape)) + f" {seconds:.3e}"


@dataclass(frozen=True)
class Issue:
    """Seconds of the host to issue an operator, with what Python and autograd do around it."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class DeviceFile:
    """What was measured of a device."""

    device: str  # its name in the catalogue, or the driver's
    machine: str
    made: str  # date and time, UTC
    command: str
    versions: dict[str, str]
    seconds: float  # that measuring took
    noise: float  # median of what the readings of one point differ by
    drift: float  # spread of the reference kernel over the whole time
    processors: int
    cache_bytes: int
    peak: dict[str, float]  # FLOP/s of the data sheet by precision; none where it is not known
    memory_peak: float  # bytes/s of the data sheet; 0: not known
    ceiling: dict[str, float]  # the highest FLOP/s of any product, by precision
    memory_rate: float  # the highest bytes/s of copies and sums that no cache holds
    floor_s: float  # the least time from one kernel to the next
    host: dict[str, Issue]  # by family; none where the host is the device
    update_op_s: float  # of the host for an operator of an optimizer's step, however many tensors
    update_tensor_s: float  # and for each tensor of it
    curves: tuple[Curve, ...]
    checks: tuple[Curve, ...]  # points between those of the curves: what the model is judged by, not made of
    missing: dict[str, str] = field(default_factory=dict)  # curve → why it is not there
    skipped: int = 0  # points that there was no time for
    whole: bool = True  # False: measuring was cut short
    # By precision, what is left of the rate of a large product after a second of nothing else; none: not measured.
    sustained: dict[str, float] = field(default_factory=dict)
    # By precision, the share of the highest rate up to which nothing is lost, however long it runs.
    warms_from: dict[str, float] = field(default_factory=dict)
    host_rounds: int = 0  # how often the host was read, over the whole time; 0: it was not counted
    host_spread: float = 0.0  # the range of the middle half of these readings over their median
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability; (0, 0): it was not asked, or there is none

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def curve(self, family: str, variant: str, precision: str) -> Curve | None:
        """The curve of that name, if it was measured."""
        return self._by_name.get((family, variant, precision))

    @cached_property
    def _by_name(self) -> dict[tuple[str, str, str], Curve]:
        return {(c.family, c.variant, c.precision): c for c in self.curves}

    def save(self, path: str | Path) -> None:
        files.write(path, KIND, files.to_json(self))

    @staticmethod
    def load(path: str | Path) -> DeviceFile:
        """Read a file, and refuse it where it cannot be true."""
        return read(files.read(path, KIND), str(path))


def read(data: Any, where: str) -> DeviceFile:
    """A device file from what `to_json` printed; `where` names it in errors."""
    found = files.from_json(DeviceFile, data, where)
    _check(found, where)
    return found


def _check(found: DeviceFile, where: str) -> None:
    for name in ("memory_rate", "floor_s"):
        _positive(getattr(found, name), f"{where}.{name}")
    counts = (
        "memory_peak",
        "cache_bytes",
        "update_op_s",
        "update_tensor_s",
        "seconds",
        "noise",
        "drift",
        "host_spread",
    )
    for name in counts:
        _not_negative(getattr(found, name), f"{where}.{name}")
    if found.processors < 1:
        raise InputError(f"{where}.processors", f"{found.processors}: a device has at least one")
    for table in ("peak", "ceiling"):
        for precision, rate in getattr(found, table).items():
            _known(precision, PRECISIONS, f"{where}.{table}.{precision}", "precision")
            _positive(rate, f"{where}.{table}.{precision}")
    if not found.ceiling:
        raise InputError(f"{where}.ceiling", "no product was measured in any precision", "measuring the device again")
    for precision, rate in found.ceiling.items():
        peak = found.peak.get(precision)
        if peak is not None and rate > peak * TOLERANCE:
            why = f"{tflops(peak)} is below the {tflops(rate)} that was measured"
            raise InputError(f"{where}.peak.{precision}", why, "the dense peak of the device's data sheet")
    if found.memory_peak and found.memory_rate > found.memory_peak * TOLERANCE:
        why = f"{gb_per_s(found.memory_peak)} is below the {gb_per_s(found.memory_rate)} that was measured"
        raise InputError(f"{where}.memory_peak", why, "the memory bandwidth of the device's data sheet")
    for precision, share in found.sustained.items():
        _known(precision, PRECISIONS, f"{where}.sustained.{precision}", "precision")
        if not 0 < share <= 1:
            raise InputError(f"{where}.sustained.{precision}", f"{share}: a share is above 0 and at most 1", "1.0")
    for precision, share in found.warms_from.items():
        _known(precision, PRECISIONS, f"{where}.warms_from.{precision}", "precision")
        if not 0 <= share < 1:
            raise InputError(f"{where}.warms_from.{precision}", f"{share}: a share is at least 0 and below 1", "0.3")
    for family, issue in found.host.items():
        _known(family, VARIANTS, f"{where}.host.{family}", "family")
        _not_negative(issue.forward_s, f"{where}.host.{family}.forward_s")
        _not_negative(issue.backward_s, f"{where}.host.{family}.backward_s")
    for table, curves in (("curves", found.curves), ("checks", found.checks)):
        for number, curve in enumerate(curves):
            _check_curve(curve, f"{where}.{table}[{number}]", found)


def _check_curve(curve: Curve, where: str, of: DeviceFile) -> None:
    _known(curve.family, VARIANTS, f"{where}.family", "family")
    _known(curve.variant, VARIANTS[curve.family], f"{where}.variant", f"variant of {curve.family}")
    _known(curve.precision, PRECISIONS, f"{where}.precision", "precision")
    size = DIMENSIONS[curve.family]
    if not curve.points:
        raise InputError(f"{where}.points", "a curve has at least one point", "leaving it out")
    for number, text in enumerate(curve.points):
        *sizes, seconds = text.split() or [""]
        if len(sizes) != size or not all(word.isdigit() and word != "0" for word in sizes):
            at, why = f"{where}.points[{number}]", f"{text!r}: {size} sizes and the seconds were expected"
            raise InputError(at, why, "1 64 64 64 2.3e-06")
        try:
            taken = float(seconds)
        except ValueError:
            why = f"{seconds!r} is not a number of seconds"
            raise InputError(f"{where}.points[{number}]", why, "2.3e-06") from None
        if not 0 < taken < inf:
            _positive(taken, f"{where}.points[{number}]")
    ceiling = of.ceiling.get(curve.precision)
    if curve.family == "product" and ceiling is not None:
        flops, _ = amounts(curve.family, curve.variant, curve.precision, curve.shapes.T.astype(float))
        rates = flops / curve.seconds
        if rates.max() > ceiling * 1.01:
            why = f"{percent(rates.max() / ceiling)} of the ceiling, which is the highest rate of any product"
            raise InputError(f"{where}.points[{rates.argmax()}]", why, "measuring the device again")


def _positive(value: float, where: str) -> None:
    if not (isfinite(value) and value > 0):
        raise InputError(where, f"{value}: it must be above zero, and finite", "measuring the device again")


def _not_negative(value: float, where: str) -> None:
    if not (isfinite(value) and value >= 0):
        raise InputError(where, f"{value}: it must be zero or more, and finite", "measuring the device again")


def _known(word: str, known: Any, where: str, what: str) -> None:
    if word not in known:
        raise InputError(where, f"there is no such {what}", nearest(word, known))
