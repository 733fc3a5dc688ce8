"""What a device file says, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainplan import files
from trainplan.cluster import catalogue
from trainplan.profile.device.families import VARIANTS
from trainplan.profile.device.file import Curve, DeviceFile
from trainplan.profile.device.model import Model
from trainplan.report.table import table
from trainplan.units import gb_per_s, gib, percent, seconds, significant, tflops


@dataclass(frozen=True)
class MeasuredDevice:
    """The answer of `device`: one file, with the model that it makes."""

    file: DeviceFile
    path: str = ""
    scaled_to: str = ""  # the device that was asked for, where it has no file of its own and is scaled from this one

    def __str__(self) -> str:
        f = self.file
        model = Model(f)
        lines = [
            *([_scaled(self.scaled_to, f)] if self.scaled_to else []),
            f"{f.device}: {f.machine}",
            f"measured {f.made} in {seconds(f.seconds)}, {_versions(f)}{'' if f.whole else ', cut short early'}",
            f"noise    {percent(f.noise)} between readings of a point, {percent(f.drift)} drift of the reference",
            f"device   {f.processors} processors, cache {gib(f.cache_bytes)}, {gb_per_s(f.memory_rate)}"
            + _of(f.memory_rate, f.memory_peak)
            + f", a kernel takes {seconds(f.floor_s)} at least",
        ]
        for precision, rate in f.ceiling.items():
            lines.append(f"{precision:<8} {tflops(rate)} at best{_of(rate, f.peak.get(precision, 0.0))}")
        rows = [row for family in VARIANTS if (row := _row(f, family, model.error_of(family)))]
        headers = ["family", ">points", ">error %", ">issue µs", ">backward µs", "variants"]
        lines.append(table(headers, rows, lines=True))
        if model.error is not None:
            count = sum(len(check.points) for check in f.checks)
            lines.append(f"error    {percent(model.error)} (median) at {count} shapes that it was not made of")
        lines += [f"missing  {name}: {why}" for name, why in f.missing.items()]
        if f.skipped:
            lines.append(f"skipped  {f.skipped:,} shapes, too large or out of time ({f.coverage})")
        if self.path:
            lines.append(f"file     {self.path}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        said = {"scaled_to": self.scaled_to} if self.scaled_to else {}
        return said | {"path": self.path, "error": Model(self.file).error, "file": files.to_json(self.file)}


def _scaled(name: str, f: DeviceFile) -> str:
    """How estimates of a device come out of the file of another."""
    model = Model(f, catalogue.device(name))
    rates = ", ".join(f"{tflops(model.ceiling(precision))} {precision}" for precision in f.ceiling)
    within = f", within {percent(model.error)} (median)" if model.error is not None else ""
    return (
        f"{name} has no file of its own, and is scaled from that of {f.device} by their data sheets{within}: "
        f"{gb_per_s(model.memory_rate)}; {rates} at best; {model.processors} processors. The file of {f.device}:"
    )


def _row(f: DeviceFile, family: str, error: float | None) -> list[str] | None:
    curves = [curve for curve in f.curves if curve.family == family]
    if not curves:
        return None
    issue = f.host.get(family)
    times = [significant(s * 1e6) for s in (issue.forward_s, issue.backward_s)] if issue else ["–", "–"]
    far = "–" if error is None else significant(100 * error)
    return [family, str(sum(len(curve.points) for curve in curves)), far, *times, _variants(curves)]


def _variants(curves: Sequence[Curve]) -> str:
    by_variant: dict[str, list[str]] = {}
    for curve in curves:
        by_variant.setdefault(curve.variant, []).append(curve.precision)
    return ", ".join(f"{variant} ({' '.join(found)})" for variant, found in by_variant.items())


def _of(rate: float, peak: float) -> str:
    return f" ({percent(rate / peak)} of the data sheet)" if peak else ""


def _versions(f: DeviceFile) -> str:
    return ", ".join(f"{name} {version}" for name, version in f.versions.items())
