"""Sums, gatherings and scatterings that others have timed with NCCL, by the catalogue alone: nothing is fitted here.

* `vtrain_nccl_allreduce_lut_subset.csv`: sums over 2 to 8 ranks of one node.
* `nccl_collectives_published.csv`: nccl-tests of several machines, with one and with four nodes.

(Of both, A100's curves are among those that NCCL's lead and its share of a link were taken from: `predict/nccl.py`.)
Told are collectives from a megabyte on, and apart from these those from 64 MiB on, where only the rate counts. What
somebody forced NCCL to do is left out, as are machines that the catalogue does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from trainplan.bench.published.one_device import Say, table
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.predict.collectives import Talk, all_gather, all_reduce, reduce_scatter
from trainplan.units import MIB

VTRAIN, NCCL = "vtrain_nccl_allreduce_lut_subset.csv", "nccl_collectives_published.csv"
SOME, MUCH = MIB, 64 * MIB
PLACES = {
    "A100 (single node, NVLink; exact node not stated)": "A100-80",
    "V100 (single node, NVLink; exact node not stated)": "V100-32",
    "A100-SXM": "A100-80",
    "H100-SXM": "H100-SXM",
    "H200-SXM": "H200",
    "H200-SXM (p5en)": "H200",
    "B200-SXM (p6-b200)": "B200",
}
OPS: dict[str, Callable[[Cluster, tuple[int, ...], int], Talk]] = {
    "all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter,
}  # fmt: skip
FORCED = ("ENABLE=0", "forced", "peak")


@dataclass(frozen=True)
class Timed:
    """One collective, and how long it took."""

    accelerator: str
    op: str
    ranks: int
    nodes: int
    bytes: int
    seconds: float

    @property
    def curve(self) -> str:
        """What differs from it in bytes alone."""
        many = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{PLACES[self.accelerator]}, {self.op} of {self.ranks}{many}"

    @property
    def error(self) -> float:
        name = PLACES[self.accelerator]
        place = cluster(f"{self.nodes}x8x{name}" if self.nodes > 1 else f"8x{name}")
        return OPS[self.op](place, tuple(range(self.ranks)), self.bytes).seconds / self.seconds - 1


def vtrain_sums(folder: Path, say: Say) -> dict[str, Any]:
    """Sums inside a node, by accelerator and number of ranks."""
    rows = (
        Timed(r["accel"], r["collective"], int(r["n_accel"]), 1, int(r["size_bytes"]), float(r["out_of_place_time_s"]))
        for r in table(folder, VTRAIN)
    )
    return _scored(rows, [], say)


def nccl_tests(folder: Path, say: Say) -> dict[str, Any]:
    """What machines of the catalogue were found to do, by themselves."""
    left_out: list[str] = []

    def known() -> Iterator[Timed]:
        for r in table(folder, NCCL):
            own = r["accel"] in PLACES and r["collective"] in OPS
            if not own or not r["time_s"] or not r["size_bytes"] or any(word in r["algorithm"] for word in FORCED):
                left_out.append(f"{r['accel']} {r['collective']}, {r['algorithm'] or 'not told how'}")
                continue
            sizes = int(r["n_accel"]), int(r["n_nodes"]), int(r["size_bytes"])
            yield Timed(r["accel"], r["collective"], *sizes, float(r["time_s"]))

    return _scored(known(), left_out, say)


def _scored(rows: Iterator[Timed], left_out: list[str], say: Say) -> dict[str, Any]:
    curves: dict[str, list[Timed]] = {}
    for row in rows:
        if row.bytes >= SOME:
            curves.setdefault(row.curve, []).append(row)
    found: dict[str, Any] = {}
    for name, own in curves.items():
        errors = {row.bytes: row.error for row in own}
        worst = max(errors, key=lambda size: abs(errors[size]))
        large = [abs(error) for size, error in errors.items() if size >= MUCH]
        found[name] = {
            "rows": len(own), "mean": mean(map(abs, errors.values())), "median": median(map(abs, errors.values())),
            "worst": abs(errors[worst]), "worst_is": f"{worst / MIB:g} MiB", "large": mean(large) if large else None,
            "left_out": sorted(set(left_out)),
        }  # fmt: skip
        say(name)
    return found
