"""The roofline of a model on a device: a table of its operators, and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainplan.errors import InputError
from trainplan.profile.bounds import Bound, Bounds
from trainplan.report.picture import blank, save
from trainplan.report.table import milliseconds, table
from trainplan.units import gb_per_s, percent, seconds, significant, tflops

SHOWN = 30


@dataclass(frozen=True)
class Roofline:
    """The answer of `roofline`."""

    bounds: Bounds
    path: str = ""

    def __str__(self) -> str:
        b = self.bounds
        rows = [self._row(row) for row in b.rows[:SHOWN]]
        headers = ["operator", "pass", "first in", "shape", ">×", ">GFLOP", ">MB", ">FLOP/B", "bound", ">ms", ">%"]
        lines = [
            f"{b.workload}, batch {b.batch}, {b.precision}, on {b.device} ({b.words})",
            _roofs(b),
            table(headers, rows, lines=True),
        ]
        if len(b.rows) > SHOWN:
            rest = sum(row.seconds for row in b.rows[SHOWN:])
            lines.append(f" … and {len(b.rows) - SHOWN} more, {percent(rest / b.run_s)} of the time (--json has all)")
        lines += ["", _sum(b)]
        if self.path:
            lines.append(f"picture  {self.path}")
        return "\n".join(lines)

    def _row(self, row: Bound) -> list[str]:
        return [
            row.name, row.passing, row.block, " × ".join(map(str, row.shape)), str(row.count),
            _amount(row.flops / 1e9), _amount(row.bytes / 1e6), _amount(row.intensity), row.bound,
            milliseconds(row.seconds), significant(100 * row.seconds / self.bounds.run_s),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        b = self.bounds
        rows = [asdict(row) | {"intensity": row.intensity} for row in b.rows]
        rest = {key: value for key, value in asdict(b).items() if key != "rows"}
        return rest | {"utilisation": utilisation(b), "rows": rows, "picture": self.path}


def _amount(value: float) -> str:
    """Three digits, but nothing that is too little to matter.

    >>> _amount(315.08), _amount(0.25), _amount(3e-9)
    ('315', '0.250', '0')
    """
    return significant(value) if value >= 1e-3 else "0"


def utilisation(b: Bounds) -> float | None:
    """The share of the peak that forward and backward reach; None where the peak is not known, or cannot be right."""
    taken = max(b.run_s, b.issue_s)
    share = b.ideal_s / taken if taken and b.peak_known else None
    return share if share is not None and share <= 1 else None


def _roofs(b: Bounds) -> str:
    """The corners of the roofs that the model's operators are under."""
    said = []
    for peak in sorted({row.peak for row in b.rows}, reverse=True):
        said.append(f"{tflops(peak)} from {significant(peak / b.memory_rate)} FLOP/B on")
    return f"roofs    {gb_per_s(b.memory_rate)}; {', '.join(said)}"


def _sum(b: Bounds) -> str:
    under = {bound: sum(row.seconds for row in b.rows if row.bound == bound) for bound in ("compute", "memory")}
    parts = ", ".join(f"{percent(share / b.run_s)} {bound}-bound" for bound, share in under.items() if share)
    words = f"step     forward and backward {seconds(b.run_s)} on the device ({parts})"
    if b.issue_s:
        words += f", {seconds(b.issue_s)} of the host to issue them"
        words += ": the host is what bounds it" if b.issue_s > b.run_s else ""
    share = utilisation(b)
    if share is not None:
        return f"{words}; {percent(share)} of the peak"
    return f"{words}; no share of the peak is given, because the peak is not known" if not b.peak_known else words


def draw(b: Bounds, path: str) -> None:
    """The picture: intensity to the right, FLOP/s upwards, both in logarithms; a dot is as large as its time."""
    figure = blank(9, 6)
    rows = [row for row in b.rows if row.flops and row.seconds and row.precision]  # counters are no arithmetic
    if not rows:
        why = f"{b.workload} has no operator that computes anything"
        raise InputError(f"--output {path}", why, "leaving --output out: the table has its bytes")
    axes = figure.subplots()
    low = min(0.05, *(row.intensity for row in rows)) / 2
    high = max(1000.0, *(row.intensity for row in rows)) * 2
    for peak in sorted({row.peak for row in rows}):
        corner = peak / b.memory_rate
        ends = (low, min(corner, high), high)
        axes.plot(ends, [min(peak, b.memory_rate * x) for x in ends], color="0.3", linewidth=1)
        axes.annotate(tflops(peak), (high, peak), ha="right", va="bottom", fontsize=8)
    axes.annotate(gb_per_s(b.memory_rate), (low, low * b.memory_rate), rotation=0, va="bottom", fontsize=8)
    longest = max(row.seconds for row in rows)
    for family in dict.fromkeys(row.family for row in rows):
        alike = [row for row in rows if row.family == family]
        axes.scatter(
            [row.intensity for row in alike],
            [row.count * row.flops / row.seconds for row in alike],
            s=[10 + 300 * row.seconds / longest for row in alike],
            alpha=0.6,
            label=family,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.set_title(f"{b.workload}, batch {b.batch}, {b.precision}, on {b.device}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    save(figure, path)
