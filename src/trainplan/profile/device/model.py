"""A device as its file describes it, or as the file of another device does: seconds of any operator of any shape.

    seconds = ratio × (floor + FLOPs / ceiling × waves + bytes / memory rate)

The part in brackets is what an operator would take if nothing overlapped and nothing were lost; the ratio is what was
measured over that, on a surface near the measured points (`surface`, `coordinates`), one for each family. So at a
measured point the model says what was measured, and no operator is ever faster than the fastest product, or the fastest
that was measured of its kind.

`waves` are steps that no grid of shapes could resolve: a product is computed in tiles, the processors take one each,
and a last wave of few tiles takes as long as a full one. Some devices show these steps, on others the libraries share
out the last wave. Which it is, whole, half or not at all, is told by the points that the surface was not made of.

A device without a file is *scaled* from one that has it: its ceiling is the same share of the data sheet's peak, it has
its own number of processors, and an operator has the ratio of one of more rows or bytes that takes as long on the
measured device, since what makes small work slow is latencies, which are much the same everywhere.

A device that is hot is slower, and its curves were measured between rests. What makes it hot is what it does over many
milliseconds, of which one operator is a small part; so it is known of a pass with all its operators only (`slowed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import ceil, exp, log, prod, sqrt
from statistics import median

import numpy as np

from trainplan.cluster.cluster import Device
from trainplan.profile.device.coordinates import coordinates
from trainplan.profile.device.families import ARITHMETIC, DIMENSIONS, VARIANTS, Place, amounts, place
from trainplan.profile.device.file import Curve, DeviceFile
from trainplan.profile.device.surface import Surface

# Rows and columns of a tile, and the share of a processor's speed at which it is computed: larger tiles use more of
# what they read. Only their steps matter, since the ratio takes up the rest.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
SHARES = (0.0, 0.5, 1.0)  # of the steps of waves that a device may show
DEEP = 256  # a sum that is shared out among processors has at least so many terms each
# Precisions that stand for one that was not measured, the nearest first.
STAND_INS = {
    "fp16": ("bf16", "tf32", "fp32"), "bf16": ("fp16", "tf32", "fp32"), "tf32": ("bf16", "fp16", "fp32"),
    "fp32": ("tf32", "bf16", "fp16"),
}  # fmt: skip
# How much more the error is of a device that is scaled: what the fastest products of three devices differ by when all
# are scaled by their peaks (A100, H100, B200: 2.5 % in the mean, 3.7 % at most), and a tenth for every factor of e
# between its rates and those that were measured. The tenth is chosen to cover what published tables of such devices
# showed: an A100's steps (17 % in the median), an RTX 3090's networks (13 %, with channels last 25 %). It is of
# operators: steps are off by more than these, also where a device is near (`bench/published/elsewhere.py`).
SCALED_ERROR, APART_ERROR = 0.03, 0.1


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
        self.distance = apart(file, device) if device is not None and self.scaled else 0.0
        self.processors = max(1, round(file.processors * self.scale.processors))
        self.stood_in: dict[str, str] = {}  # curves that were asked for and not there → what was taken
        self._surfaces: dict[tuple[str, float], Surface] = {}
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        self._fastest = cache(self._find_fastest)

    # -- the device -------------------------------------------------------------------------------------------------

    def ceiling(self, precision: str) -> float:
        """The highest FLOP/s of products."""
        return self._measured_ceiling(precision) * self.scale.arithmetic.get(precision, 1.0)

    def _measured_ceiling(self, precision: str) -> float:
        return next(self.file.ceiling[p] for p in (precision, *STAND_INS[precision]) if p in self.file.ceiling)

    @property
    def memory_rate(self) -> float:
        return self.file.memory_rate * self.scale.memory

    def _seconds(self, at: Place) -> float:
        """Seconds of the work at a place."""
        if at.variant == "strided" and self.file.curve(at.family, at.variant, at.precision) is None:
            return self._halfway(at)
        expected = self._expected(at, self.waves)
        curve = self._curve(at)
        if curve is None:  # nothing of its kind: as if it were as good as anything
            return expected
        shape = np.array([at.shape[: DIMENSIONS[curve.family]]])
        where = coordinates(curve.family, curve.variant, curve.precision, shape, self.scale.processors)
        taken = self._carried(at, expected, exp(self._surface(curve.family, self.waves).at(where)[0]))
        if not at.flops:
            return taken
        return max(taken, at.flops / max(self.ceiling(at.precision), self._fastest(curve.family, curve.precision)))

    def _halfway(self, at: Place) -> float:
        """Of copies in pieces, where these were not measured: between those of all at once, and number by number."""
        ways = ("contiguous", "transposed")
        self.stood_in[f"{at.family}.{at.variant}.{at.precision}"] = " and ".join(f"{at.family}.{way}" for way in ways)
        return sqrt(prod(self.seconds(place(at.family, way, at.precision, at.shape)) for way in ways))

    def use(self, at: Place) -> float:
        """The share of its units that the work at a place keeps busy."""
        return min(1.0, at.flops / self.seconds(at) / self.ceiling(at.precision)) if at.flops else 0.0

    def slowed(self, precision: str, use: float) -> float:
        """By how much an operator that uses all units takes longer in work that uses a share of them, on average."""
        if precision not in self.file.sustained:
            return 0.0
        known = self.file.warms_from
        below = next((known[p] for p in (precision, *STAND_INS[precision]) if p in known), 0.0)
        return max(0.0, (use - below) / (1 - below)) * (1 / self.file.sustained[precision] - 1)

    def _carried(self, at: Place, expected: float, ratio: float) -> float:
        """Seconds of what took `ratio` times as long as expected where it was measured.

        On another device only arithmetic and bytes go by the rates of data sheets. What takes longer than these has
        processors that cannot keep up: few of them have work, or each has much to do for a byte. And devices differ
        in how many processors they have, but little in how fast one of them is.
        """
        if not self.scaled or ratio <= 1:
            return expected * ratio
        busy = at.shape[1] if at.variant.startswith("batch_norm") else self.file.processors  # a channel has one
        fewer = min(busy, self.file.processors) / min(busy, self.processors)
        return expected + (ratio - 1) * Model(self.file)._expected(at, self.waves) * fewer

    def _curve(self, at: Place) -> Curve | None:
        """The measured curve that stands for a place, and a note where it is not its own."""
        near = at.variant.split("-")[0], at.variant.removesuffix("_backward")
        variants = dict.fromkeys((at.variant, *near, *VARIANTS[at.family]))
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

    def _surface(self, family: str, waves: float) -> Surface:
        """The logarithm of measured over expected, by where, of all curves of a family."""
        if (family, waves) not in self._surfaces:
            curves = [curve for curve in self.file.curves if curve.family == family]
            where = np.concatenate([coordinates(family, c.variant, c.precision, c.shapes) for c in curves])
            ratios = np.concatenate([curve.seconds / self._measured_expected(curve, waves) for curve in curves])
            self._surfaces[family, waves] = Surface(where, np.log(ratios))
        return self._surfaces[family, waves]

    def _find_fastest(self, family: str, precision: str) -> float:
        """The highest FLOP/s of a family; above the products' where convolutions need fewer than are counted."""
        rates = [
            (amounts(family, curve.variant, precision, curve.shapes.T.astype(float))[0] / curve.seconds).max()
            for curve in self.file.curves
            if (curve.family, curve.precision) == (family, precision)
        ]
        return float(max(rates)) * self.scale.arithmetic.get(precision, 1.0)

    def _expected(self, at: Place, waves: float) -> float:
        """Seconds by arithmetic and bytes."""
        arithmetic = at.flops / self.ceiling(at.precision)
        if waves and (product := as_product(at.family, at.variant, at.shape)) is not None:
            arithmetic *= _wasted(product, self.processors) ** waves
        return arithmetic + at.bytes / self.memory_rate + self.file.floor_s

    def _measured_expected(self, curve: Curve, waves: float) -> np.ndarray:
        """The same of a curve's points on the device that was measured."""
        flops, moved = amounts(curve.family, curve.variant, curve.precision, curve.shapes.T.astype(float))
        arithmetic = flops / self._measured_ceiling(curve.precision) if flops.any() else flops
        if waves:
            products = [as_product(curve.family, curve.variant, shape) for shape in curve.shapes.tolist()]
            wasted = [1.0 if one is None else _wasted(one, self.file.processors) for one in products]
            arithmetic = arithmetic * np.array(wasted) ** waves
        expected: np.ndarray = arithmetic + moved / self.file.memory_rate + self.file.floor_s
        return expected

    # -- how good it is ---------------------------------------------------------------------------------------------

    @cached_property
    def waves(self) -> float:
        """The share of the steps of waves that brings the model nearest to the points that it was not made of."""
        if self._found:
            return self._found["waves"]
        checks = [check for check in self.file.checks if check.family == "product"]
        errors = {share: self._errors(share, checks) for share in SHARES} if checks else {}
        return min(errors, key=lambda share: median(errors[share])) if errors and errors[0.0] else 1.0

    def _errors(self, waves: float, checks: Sequence[Curve]) -> list[float]:
        found = []
        for check in checks:
            if self.file.curve(check.family, check.variant, check.precision) is None:
                continue
            where = coordinates(check.family, check.variant, check.precision, check.shapes)
            said = np.exp(self._surface(check.family, waves).at(where)) * self._measured_expected(check, waves)
            found += np.abs(said / check.seconds - 1).tolist()
        return found

    def error_of(self, family: str) -> float | None:
        """Median error on points of one family that the model was not made of; None: there are none."""
        found = self._errors(self.waves, [check for check in self.file.checks if check.family == family])
        return median(found) if found else None

    @cached_property
    def error(self) -> float | None:
        """Median error on the points that the model was not made of; more where it is scaled; None: not known."""
        more = SCALED_ERROR + APART_ERROR * self.distance if self.scaled else 0.0
        if self._found:
            return self._found["error"] + more
        found = self._errors(self.waves, self.file.checks)
        return median(found) + more if found else None

    @cached_property
    def _found(self) -> dict[str, float]:
        """What the file knows of these; nothing where it is of other points."""
        return self.file.found if self.file.found.get("mark") == self.file.mark else {}


def looked_up(file: DeviceFile) -> DeviceFile:
    """The file with what the model makes of it written down."""
    model = Model(replace(file, found={}))
    if model.error is None:
        return model.file
    return replace(file, found={"mark": file.mark, "waves": model.waves, "error": model.error})


def describes(file: DeviceFile, device: Device) -> bool:
    """Whether a file is of this very device: not of another one, nor of what it would be with other rates."""
    if device.file:  # which names it: then these are its rates, if nobody has changed them
        return device.flops == file.ceiling | file.peak and device.memory_rate == (file.memory_peak or file.memory_rate)
    if file.device != device.name:
        return False
    rates = ("memory_rate", *(f"flops.{precision}" for precision in device.flops))
    measured = any(device.sources.get(key, "").startswith("measured") for key in rates)
    same = all(file.peak.get(precision, rate) == rate for precision, rate in device.flops.items())
    return measured or (same and file.memory_peak in (0.0, device.memory_rate))


def apart(file: DeviceFile, device: Device) -> float:
    """How far the rates of two devices are apart, in logarithms: arithmetic in the mean of its kinds, and memory."""
    rates = [abs(log(device.flops[p] / file.peak[p])) for p in file.peak if p in device.flops]
    memory = abs(log(device.memory_rate / file.memory_peak)) if file.memory_peak else 0.0
    return (sum(rates) / max(1, len(rates)) + memory) / 2


def _scale(file: DeviceFile, device: Device) -> Scale:
    arithmetic = {}
    for precision, peak in device.flops.items():
        of = file.peak.get(precision) or file.ceiling.get(precision)
        if of:
            arithmetic[precision] = peak / of
    processors = device.processors / file.processors if device.processors else 1.0
    return Scale(arithmetic, device.memory_rate / (file.memory_peak or file.memory_rate), processors)


def as_product(family: str, variant: str, shape: Sequence[int]) -> tuple[int, int, int, int] | None:
    """(batch, rows, inner, columns) of the product that a product or convolution is computed as; None: none.

    >>> as_product("convolution", "forward", (32, 64, 128, 784, 9, 1, 1))
    (1, 25088, 576, 128)
    """
    if family == "product":
        batch, rows, inner, columns = shape
        return batch, rows, inner, columns
    if family != "convolution" or shape[6] > 1:  # by groups there are kernels of another kind
        return None
    samples, ins, outs, places, kernel, stride, _ = shape
    if variant == "forward":
        return 1, samples * places, ins * kernel, outs
    if variant == "input":
        return 1, samples * places * stride**2, max(1, outs * kernel // stride**2), ins
    return 1, outs, samples * places, ins * kernel


def _wasted(product: tuple[int, int, int, int], processors: int) -> float:
    """How much more a product takes because tiles and waves are whole."""
    batch, rows, inner, columns = product
    return tiled(*product, processors) / (2.0 * batch * rows * inner * columns) if processors > 1 else 1.0


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
