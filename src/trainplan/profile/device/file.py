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
from zlib import crc32

import numpy as np

from trainplan import files
from trainplan.cluster import catalogue
from trainplan.cluster.measured import SLICED
from trainplan.errors import InputError, nearest
from trainplan.profile.device.families import DIMENSIONS, PRECISIONS, VARIANTS, amounts
from trainplan.units import gb_per_s, percent, seconds, tflops

KIND = "device"
PART = ".part.json"  # what the name of a file ends in that is still being measured, or ended early beside a whole one
TOLERANCE = 1.05  # a measured rate may be above a data sheet's by so much: clocks are boosted, sheets rounded
ROUNDED = 1.01  # points are written with four digits
LIKE = "elementwise"  # the family that stands for those whose issuing was not measured
# What no device does, by a wide margin to what those that were measured do.
SHORTEST_S = 1e-8  # an operator: calling it takes longer
FEWER_FLOPS = 10.0  # times the ceiling: convolutions that need fewer than are counted (Winograd; seen: 2.9)
FROM_CACHE = 100.0  # times the rate of memory: what caches hold (one core: 20)
FROM_MEMORY = 2.0  # and what is larger than so many caches
BEYOND_CACHES = 4
# The highest rate of a file's own points is its ceiling, or the rate of its memory, within this.
REACHED = 1.5
STREAMS = {("copy", "contiguous"), ("elementwise", "add"), ("elementwise", "relu")}  # the rate of memory is theirs


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
    whole: bool = True  # False: measuring ended before its time: it was interrupted, or the device gave up
    # By precision, what is left of the rate of a large product after a second of nothing else; none: not measured.
    sustained: dict[str, float] = field(default_factory=dict)
    # By precision, the share of the highest rate up to which nothing is lost, however long it runs.
    warms_from: dict[str, float] = field(default_factory=dict)
    host_rounds: int = 0  # how often the host was read, over the whole time; 0: it was not counted
    host_spread: float = 0.0  # the range of the middle half of these readings over their median
    # What the model makes of all this, so that nobody has to find it again: `waves` and `error` (`model.py`), and the
    # `mark` of the points that they were found from. With other points they do not count.
    found: dict[str, float] = field(default_factory=dict)
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability; (0, 0): it was not asked, or there is none

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def curve(self, family: str, variant: str, precision: str) -> Curve | None:
        """The curve of that name, if it was measured."""
        return self._by_name.get((family, variant, precision))

    @property
    def host_lacks(self) -> tuple[str, ...]:
        """Families (and `optimizer`) whose issuing a GPU's file does not say; `host`: all of it."""
        if self.is_cpu:
            return ()
        if LIKE not in self.host:
            return ("host",)
        lacking = [name.removeprefix("host.") for name in self.missing if name.startswith("host.")]
        return tuple(name for name in lacking if name not in self.host and name != "mixed")

    @property
    def coverage(self) -> str:
        """How much of what is measured where there is time was measured; nothing where it is all of it."""
        count = sum(len(curve.points) for curve in (*self.curves, *self.checks))
        words = f"{count:,} of {count + self.skipped:,} shapes" if self.skipped else ""
        early = "" if self.whole else "cut short before its time"
        return ", ".join(word for word in (early, words) if word)

    @cached_property
    def mark(self) -> float:
        """A number that other points would not have."""
        sums = (crc32(point.encode()) for curve in (*self.curves, *self.checks) for point in curve.points)
        return float(sum(sums) % 2**52)

    @cached_property
    def _by_name(self) -> dict[tuple[str, str, str], Curve]:
        return {(c.family, c.variant, c.precision): c for c in self.curves}

    def save(self, path: str | Path) -> None:
        files.write(path, KIND, files.to_json(self))

    @staticmethod
    def load(path: str | Path, known: bool = False) -> DeviceFile:
        """Read a file, and refuse it where it cannot be true; one that is `known` to be is not looked through."""
        return read(files.read(path, KIND), str(path), known)


def read(data: Any, where: str, known: bool = False) -> DeviceFile:
    """A device file from what `to_json` printed; `where` names it in errors."""
    found = files.from_json(DeviceFile, data, where)
    if not known:
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
        "skipped",
        "host_rounds",
    )
    for name in counts:
        _not_negative(getattr(found, name), f"{where}.{name}")
    if found.processors < 1:
        raise InputError(f"{where}.processors", f"{found.processors}: a device has at least one", "1 or more")
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
    _check_host(found, where)
    for table, curves in (("curves", found.curves), ("checks", found.checks)):
        names: dict[str, int] = {}
        for number, curve in enumerate(curves):
            at = f"{where}.{table}[{number}]"
            _check_curve(curve, at, found)
            if curve.name in names:
                why = f"{curve.name} is there already, as {table}[{names[curve.name]}]"
                raise InputError(at, why, "one curve with the points of both")
            names[curve.name] = number
    _check_against_catalogue(found, where)
    _check_rates(found, where)


def _check_host(found: DeviceFile, where: str) -> None:
    """What the host of a GPU takes is there, or said to be missing: an estimate without it is too fast for small work.

    Families of which only others were read are issued like what is element by element.
    """
    if found.is_cpu or "host" in found.missing:
        return
    instead = "measuring the device again, or saying why under missing."
    if LIKE not in found.host and f"host.{LIKE}" not in found.missing:
        why = f"{sorted(found.host) or 'nothing'}: what the host takes for {LIKE} work is neither there nor missing"
        raise InputError(f"{where}.host", why, f"{instead}host.{LIKE}")
    if not (found.update_op_s or found.update_tensor_s or "host.optimizer" in found.missing):
        why = "0, and update_tensor_s is, too: what the host takes for a step is neither there nor missing"
        raise InputError(f"{where}.update_op_s", why, f"{instead}host.optimizer")


def _check_against_catalogue(found: DeviceFile, where: str) -> None:
    """What the catalogue knows of a device of that name is true of this one, too."""
    if not catalogue.has("device", found.device):
        return
    known = catalogue.device(found.device)
    part = SLICED in found.machine and found.processors < known.processors
    if known.processors and found.processors != known.processors and not part:
        why = f"{found.processors}, and {known.name} has {known.processors}, or fewer where the machine is a slice"
        raise InputError(f"{where}.processors", f"{why} {SLICED}", "another name of the device")
    if any(found.capability) and found.capability != known.capability:
        have, expected = (".".join(map(str, pair)) for pair in (found.capability, known.capability))
        why = f"{have}, and that of {known.name} is {expected if any(known.capability) else 'none'}"
        raise InputError(f"{where}.capability", why, "another name of the device")


def _check_rates(found: DeviceFile, where: str) -> None:
    """Its rates are those of its points: a number that no point comes near was not measured."""
    if not found.curves:
        raise InputError(f"{where}.curves", "there are none, so nothing was measured", "measuring the device again")
    every = (*found.curves, *found.checks)
    shortest = min(float(curve.seconds.min()) for curve in every)
    if found.floor_s > shortest * ROUNDED:
        why = f"{seconds(found.floor_s)}: no kernel takes less, but a point has {seconds(shortest)}"
        raise InputError(f"{where}.floor_s", why, f"{shortest:g}")
    for precision, rate in found.ceiling.items():
        products = [c for c in every if (c.family, c.precision) == ("product", precision)]
        best = max((float((_amounts(c)[0] / c.seconds).max()) for c in products), default=0.0)
        if rate > best * REACHED:
            said = f"{tflops(best)} is the highest rate of its products" if best else "it has no product of that kind"
            raise InputError(
                f"{where}.ceiling.{precision}", f"{tflops(rate)}, but {said}", "measuring the device again"
            )
    streams = [c for c in every if (c.family, c.variant) in STREAMS]
    best = max((float((_amounts(c)[1] / c.seconds).max()) for c in streams), default=0.0)
    if found.memory_rate > best * REACHED:
        said = f"{gb_per_s(best)} is the highest rate of its copies and sums" if best else "it has no copies or sums"
        why = f"{gb_per_s(found.memory_rate)}, but {said}"
        raise InputError(f"{where}.memory_rate", why, "measuring the device again")


def _amounts(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs and bytes of the points of a curve."""
    flops, moved = amounts(curve.family, curve.variant, curve.precision, curve.shapes.T.astype(float))
    return flops, moved


def _check_curve(curve: Curve, where: str, of: DeviceFile) -> None:
    _known(curve.family, VARIANTS, f"{where}.family", "family")
    _known(curve.variant, VARIANTS[curve.family], f"{where}.variant", f"variant of {curve.family}")
    _known(curve.precision, PRECISIONS, f"{where}.precision", "precision")
    size = DIMENSIONS[curve.family]
    if not curve.points:
        raise InputError(f"{where}.points", "a curve has at least one point", "leaving it out")
    for number, text in enumerate(curve.points):
        *sizes, last = text.split() or [""]
        if len(sizes) != size or not all(word.isdigit() and word != "0" for word in sizes):
            at, why = f"{where}.points[{number}]", f"{text!r}: {size} sizes and the seconds were expected"
            raise InputError(at, why, "1 64 64 64 2.3e-06")
        try:
            taken = float(last)
        except ValueError:
            why = f"{last!r} is not a number of seconds"
            raise InputError(f"{where}.points[{number}]", why, "2.3e-06") from None
        if not 0 < taken < inf:
            _positive(taken, f"{where}.points[{number}]")
    _check_points(curve, where, of)


def _check_points(curve: Curve, where: str, of: DeviceFile) -> None:
    """No point is faster than the device's arithmetic and memory allow."""
    flops, moved = _amounts(curve)

    def refuse(most: np.ndarray | float, rates: np.ndarray, what: str) -> None:
        if (rates > most).any():
            at = int(np.argmax(rates / most))
            limit = float(np.broadcast_to(most, rates.shape)[at])
            why = f"{curve.points[at]!r} has {percent(rates[at] / limit)} of {what}"
            raise InputError(f"{where}.points[{at}]", why, "measuring the device again")

    if curve.seconds.min() < SHORTEST_S:
        at = int(curve.seconds.argmin())
        why = f"{curve.points[at]!r}: calling an operator alone takes more than {SHORTEST_S:g} s"
        raise InputError(f"{where}.points[{at}]", why, "measuring the device again")
    ceiling = of.ceiling.get(curve.precision, max(of.ceiling.values()))
    if curve.family == "product":
        if curve.precision in of.ceiling:
            refuse(ceiling * ROUNDED, flops / curve.seconds, "the ceiling, which is the highest rate of any product")
    elif flops.any():
        what = f"{FEWER_FLOPS:g} times the ceiling of {tflops(ceiling)}"
        refuse(ceiling * FEWER_FLOPS, flops / curve.seconds, what)
    else:
        times = np.where(moved > BEYOND_CACHES * of.cache_bytes, FROM_MEMORY, FROM_CACHE)
        what = f"{FROM_MEMORY:g} times the memory, {gb_per_s(of.memory_rate)}, or {FROM_CACHE:g} times out of a cache"
        refuse(times * of.memory_rate, moved / curve.seconds, what)


def _positive(value: float, where: str) -> None:
    if not (isfinite(value) and value > 0):
        raise InputError(where, f"{value}: it must be above zero, and finite", "measuring the device again")


def _not_negative(value: float, where: str) -> None:
    if not (isfinite(value) and value >= 0):
        raise InputError(where, f"{value}: it must be zero or more, and finite", "measuring the device again")


def _known(word: str, known: Any, where: str, what: str) -> None:
    if word not in known:
        raise InputError(where, f"there is no such {what}", nearest(word, known))
