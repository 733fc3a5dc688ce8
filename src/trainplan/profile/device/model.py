"""A device as its file describes it, or as the file of another device does: seconds of any operator of any shape.

    seconds = ratio × (floor + the longer of: FLOPs in whole waves of tiles / ceiling, bytes / memory rate)

The part in brackets knows steps that no grid of shapes could resolve: a product is computed in tiles, the processors
take one each, and a last wave of few tiles takes as long as a full one. The ratio is what was measured over that, on a
surface through the measured points (`surface`). So at a measured point the model says what was measured, and no
operator is ever faster than the fastest product, or the fastest that was measured of its kind.

A device without a file is *scaled* from one that has it: its ceiling is the same share of the data sheet's peak, it has
its own number of processors, and an operator has the ratio of one of more rows or bytes that takes as long on the
measured device, since what makes small work slow is latencies, which are much the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, exp, log2
from statistics import median

import numpy as np

from trainplan.cluster.cluster import Device
from trainplan.profile.device.families import ARITHMETIC, VARIANTS, Place, place
from trainplan.profile.device.file import Curve, DeviceFile
from trainplan.profile.device.surface import Surface

# Rows and columns of a tile, and the share of a processor's speed at which it is computed: larger tiles use more of
# what they read. Only their steps matter, since the ratio takes up the rest.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
DEEP = 256  # a sum that is shared out among processors has at least so many terms each
# Precisions that stand for one that was not measured, the nearest first.
STAND_INS = {
    "fp16": ("bf16", "tf32", "fp32"), "bf16": ("fp16", "tf32", "fp32"), "tf32": ("bf16", "fp16", "fp32"),
    "fp32": ("tf32", "bf16", "fp16"),
}  # fmt: skip
# The share of their peak that products reach at best differs by so much among devices: A100 0.87, H100 0.80, B200 0.78
# (stas00/ml-engineering@744d01e, best of all shapes).
SCALED_ERROR = 0.09


@dataclass(frozen=True)
class Scale:
    """A device's rates over those of the device that was measured."""

    arithmetic: dict[str, float]
    memory: float
    processors: float


SAME = Scale({}, 1.0, 1.0)


class Model:
    """Seconds of operators on a device."""

    def __init__(self, file: DeviceFile, device: Device | None = None) -> None:
        self.file = file
        self.device = device.name if device is not None else file.device
        self.scaled = device is not None and not describes(file, device)
        self.scale = _scale(file, device) if device is not None and self.scaled else SAME
        self.processors = max(1, round(file.processors * self.scale.processors))
        self.stood_in: dict[str, str] = {}  # curves that were asked for and not there → what was taken
        self._surfaces: dict[tuple[str, bool], Surface] = {}
        self.seconds = lru_cache(maxsize=None)(self._seconds)

    # -- the device -------------------------------------------------------------------------------------------------

    def ceiling(self, precision: str) -> float:
        """The highest FLOP/s of products."""
        rate = next(self.file.ceiling[p] for p in (precision, *STAND_INS[precision]) if p in self.file.ceiling)
        return rate * self.scale.arithmetic.get(precision, 1.0)

    @property
    def memory_rate(self) -> float:
        return self.file.memory_rate * self.scale.memory

    def _seconds(self, at: Place) -> float:
        """Seconds of the work at a place."""
        curve = self._curve(at)
        if curve is None:  # nothing of its kind: as if it were as good as anything
            return self._expected(at, self.waves, own=True)
        surface = self._surface(curve, self.waves)
        ratio = exp(surface.at(self._where(at)[: surface.places.shape[1]]))
        taken = ratio * self._expected(at, self.waves, own=True)
        return max(taken, at.flops / max(self.ceiling(at.precision), self._fastest(curve))) if at.flops else taken

    def _curve(self, at: Place) -> Curve | None:
        """The measured curve that stands for a place, and a note where it is not its own."""
        variants = dict.fromkeys((at.variant, at.variant.split("-")[0], *VARIANTS[at.family]))
        for variant in variants:
            for precision in (at.precision, *STAND_INS[at.precision]):
                found = self.file.curve(at.family, variant, precision)
                if found is not None:
                    if (variant, precision) != (at.variant, at.precision):
                        self.stood_in[f"{at.family}.{at.variant}.{at.precision}"] = found.name
                    return found
        if at.family not in (*ARITHMETIC, "elementwise"):
            other = self._curve(place("elementwise", "add", at.precision, at.shape[:1]))
            if other is not None:
                self.stood_in[f"{at.family}.{at.variant}.{at.precision}"] = other.name
            return other
        self.stood_in[f"{at.family}.{at.variant}.{at.precision}"] = "the roofline alone"
        return None

    # -- curves -----------------------------------------------------------------------------------------------------

    def _surface(self, curve: Curve, waves: bool) -> Surface:
        """The logarithm of measured over expected, by where."""
        if (curve.name, waves) not in self._surfaces:
            at = [place(curve.family, curve.variant, curve.precision, shape) for shape in curve.shapes]
            ratios = curve.seconds / np.array([self._expected(a, waves, own=False) for a in at])
            self._surfaces[curve.name, waves] = Surface(np.array([coordinates(a) for a in at]), np.log(ratios))
        return self._surfaces[curve.name, waves]

    def _where(self, at: Place) -> np.ndarray:
        """Where on the measured device's surface a place of this one is."""
        where = coordinates(at)
        if at.family in ARITHMETIC:
            first = 1 if at.family == "product" else 0  # rows, samples × places, heads
            where[first] -= log2(self.scale.arithmetic.get(at.precision, 1.0))
        else:
            where[0] -= log2(self.scale.memory)
        return where

    def _fastest(self, curve: Curve) -> float:
        """The highest FLOP/s of a curve; above the products' where convolutions need fewer than are counted."""
        flops = [place(curve.family, curve.variant, curve.precision, shape).flops for shape in curve.shapes]
        return float(max(np.array(flops) / curve.seconds)) * self.scale.arithmetic.get(curve.precision, 1.0)

    def _expected(self, at: Place, waves: bool, own: bool) -> float:
        """Seconds by waves and bytes; `own`: on this device, else on the one that was measured."""
        ceiling = self.ceiling(at.precision)
        memory, processors = self.memory_rate, self.processors
        if not own:
            ceiling /= self.scale.arithmetic.get(at.precision, 1.0)
            memory, processors = self.file.memory_rate, self.file.processors
        arithmetic = at.flops / ceiling
        if waves and processors > 1 and (product := as_product(at)) is not None:
            arithmetic = tiled(*product, processors) / ceiling
        return max(arithmetic, at.bytes / memory) + self.file.floor_s

    # -- how good it is ---------------------------------------------------------------------------------------------

    @cached_property
    def waves(self) -> bool:
        """Whether counting waves brings the model nearer to the points that it was not made of."""
        with_waves, without = (self._errors(waves, ("product", "convolution")) for waves in (True, False))
        return not with_waves or median(with_waves) <= median(without)

    def _errors(self, waves: bool, families: tuple[str, ...]) -> list[float]:
        found = []
        for check in self.file.checks:
            curve = self.file.curve(check.family, check.variant, check.precision)
            if curve is None or check.family not in families:
                continue
            surface = self._surface(curve, waves)
            for shape, seconds in zip(check.shapes, check.seconds, strict=True):
                at = place(check.family, check.variant, check.precision, shape)
                said = exp(surface.at(coordinates(at))) * self._expected(at, waves, own=False)
                found.append(abs(said / float(seconds) - 1))
        return found

    def error_of(self, family: str) -> float | None:
        """Median error on points of one family that the model was not made of; None: there are none."""
        found = self._errors(self.waves, (family,))
        return median(found) if found else None

    @cached_property
    def error(self) -> float | None:
        """Median error on the points that the model was not made of; more where it is scaled; None: not known."""
        found = self._errors(self.waves, tuple(VARIANTS))
        return median(found) + (SCALED_ERROR if self.scaled else 0.0) if found else None


def describes(file: DeviceFile, device: Device) -> bool:
    """Whether a file is of this very device: not of another one, nor of what it would be with other rates."""
    if file.device != device.name:
        return False
    measured = any(source.startswith("measured") for source in device.sources.values())
    same = all(file.peak.get(precision, rate) == rate for precision, rate in device.flops.items())
    return measured or (same and file.memory_peak in (0.0, device.memory_rate))


def _scale(file: DeviceFile, device: Device) -> Scale:
    arithmetic = {}
    for precision, peak in device.flops.items():
        of = file.peak.get(precision) or file.ceiling.get(precision)
        if of:
            arithmetic[precision] = peak / of
    processors = device.processors / file.processors if device.processors else 1.0
    return Scale(arithmetic, device.memory_rate / (file.memory_peak or file.memory_rate), processors)


def coordinates(at: Place) -> np.ndarray:
    """Logarithms of what the efficiency depends on; those that change the kernel count more.

    >>> coordinates(place("product", "nt", "fp32", (1, 64, 256, 1024))).tolist()
    [0.0, 6.0, 8.0, 10.0]
    """
    if at.family == "convolution":
        samples, ins, outs, places, kernel, stride, groups = at.shape
        return np.array(
            [
                log2(samples * places), log2(ins / groups), log2(outs / groups), 0.5 * log2(places),
                2 * log2(kernel), 4 * log2(stride), 4 * min(1.0, log2(groups)), 0.5 * log2(groups),
            ]
        )  # fmt: skip
    return np.log2(np.array(at.shape, dtype=float))


def as_product(at: Place) -> tuple[int, int, int, int] | None:
    """(batch, rows, inner, columns) of the product that a product or convolution is computed as; None: none.

    >>> as_product(place("convolution", "forward", "fp32", (32, 64, 128, 784, 9, 1, 1)))
    (1, 25088, 576, 128)
    """
    if at.family == "product":
        batch, rows, inner, columns = at.shape
        return batch, rows, inner, columns
    if at.family != "convolution" or at.shape[6] > 1:  # by groups there are kernels of another kind
        return None
    samples, ins, outs, places, kernel, stride, _ = at.shape
    if at.variant == "forward":
        return 1, samples * places, ins * kernel, outs
    if at.variant == "input":
        return 1, samples * places * stride**2, max(1, outs * kernel // stride**2), ins
    return 1, outs, samples * places, ins * kernel


def tiled(batch: int, rows: int, inner: int, columns: int, processors: int) -> float:
    """FLOPs that a product takes with whole tiles in whole waves, at the best choice of tiles.

    >>> tiled(1, 4096, 1024, 128 * 33, 132) / (2.0 * 4096 * 1024 * 128 * 33)
    1.0
    >>> round(tiled(1, 4096, 1024, 128 * 33 + 1, 132) / (2.0 * 4096 * 1024 * 128 * 33), 2)  # one column more
    1.18
    """
    best = float("inf")
    for high, wide, share in TILES:
        tiles = batch * ceil(rows / high) * ceil(columns / wide)
        split = max(1, min(processors // tiles, inner // DEEP))
        waves = ceil(tiles * split / processors)
        best = min(best, waves * processors * 2.0 * high * wide * inner / split / share)
    return best
