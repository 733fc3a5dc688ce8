"""A device on paper: its true seconds are a formula, and a file holds them at the points of the grid."""

from dataclasses import replace

from trainplan.cluster.cluster import Device
from trainplan.profile.device.families import Place, place
from trainplan.profile.device.file import Curve, DeviceFile, Issue, point
from trainplan.profile.device.grid import Case, cases
from trainplan.profile.device.model import as_product, tiled

PAPER = Device("Paper", 2**36, {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14, "fp16": 8e14}, 4e12, processors=100)
CEILING = {"fp32": 4e13, "tf32": 3.2e14, "bf16": 6e14, "fp16": 6e14}
MEMORY, FLOOR = 3.6e12, 2e-6


def true_seconds(at: Place) -> float:
    """Waves of tiles at a speed that grows with the depth of the sum; bytes; and a floor."""
    if at.flops:
        product = as_product(at.family, at.variant, at.shape)
        arithmetic = (tiled(*product, 100) if product else 2 * at.flops) / CEILING[at.precision]
        deep = product[2] if product else 512
        arithmetic *= 1 + 64 / deep
    else:
        arithmetic = 0.0
    return max(arithmetic, 1.1 * at.bytes / MEMORY) + FLOOR


def paper(**changes: object) -> DeviceFile:
    """The file of the paper device."""
    # In bf16 and tf32 all points, and in fp32 a few; one that is near the ceiling is held back.
    every = [c for c in cases("cuda", ("bf16", "tf32")) if c.at.family != "convolution" or c.at.precision == "tf32"]
    every += [c for c in cases("cuda", ("fp32",), quick=True) if not c.check]
    every.append(Case(place("product", "nt", "fp32", (1, 8192, 8192, 8192)), check=True))
    curves: dict[bool, dict[tuple[str, str, str], list[str]]] = {False: {}, True: {}}
    for case in dict.fromkeys(every):
        key = (case.at.family, case.at.variant, case.at.precision)
        curves[case.check].setdefault(key, []).append(point(case.at.shape, true_seconds(case.at)))
    found = DeviceFile(
        device="Paper", machine="none", made="2026-01-02T03:04:05+00:00", command="none", versions={"torch": "2.11.0"},
        seconds=1.0, noise=0.01, drift=0.02, processors=100, cache_bytes=2**25, peak=dict(PAPER.flops),
        memory_peak=PAPER.memory_rate, ceiling={p: CEILING[p] for p in ("fp32", "tf32", "bf16")}, memory_rate=MEMORY,
        floor_s=FLOOR,
        host={"product": Issue(1e-5, 3e-5), "elementwise": Issue(5e-6, 1e-5)}, update_op_s=1e-5, update_tensor_s=1e-6,
        curves=tuple(Curve(*key, points=tuple(points)) for key, points in curves[False].items()),
        checks=tuple(Curve(*key, points=tuple(points)) for key, points in curves[True].items()),
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]
