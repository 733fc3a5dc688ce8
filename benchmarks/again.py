"""Predict again what was measured, without the machine: from the profiles and the cluster that were kept of it.

    python benchmarks/again.py benchmarks/data/exchanges-cores.json
    python benchmarks/again.py benchmarks/data/exchanges-cores.json --only exchange=tree

The rows of a file of `accuracy.py` have predictions that were made before they were measured. Whoever changes how time
is predicted sees here what that does to all of them: predicted then and now, both beside what was measured. What was
kept (`accuracy.py --keep FOLDER`) is in the folder of the same name, unless `--kept` names another. The error is at the
speed that the reference kernel showed while the row was measured.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainplan import files
from trainplan.bench.row import Row
from trainplan.cluster.parse import cluster as cluster_of
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve


@dataclass(frozen=True)
class Again:
    """A row, and what is predicted for it now."""

    row: Row
    predicted_s: float

    @property
    def error(self) -> float:
        return (1 + self.row.error) * self.predicted_s / self.row.predicted_s - 1


def again(measured: Path, kept: Path, only: str = "") -> Iterator[Again]:
    """The rows of a file whose workload or plan has these letters in it, predicted anew."""
    cluster = cluster_of(str(kept / "cluster.yaml"))
    profiles = {path.name.partition(".")[0]: Profile.load(path) for path in sorted(kept.glob("*.profile.json"))}
    for known in files.read(measured, "accuracy")["rows"]:
        row = files.from_json(Row, known)
        if only in f"{row.workload} {row.plan}":
            profile = profiles[row.workload.partition(":")[0]]
            plan = resolve(parse(row.plan), profile, cluster, row.batch)  # as it ran: its buckets are those of then
            yield Again(row, predict(plan, profile, cluster, row.batch).step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--kept", type=Path, help="folder of the profiles and the cluster")
    parser.add_argument("--only", default="", help="letters of a workload or a plan")
    options = parser.parse_args()
    found = []
    for one in again(options.measured, options.kept or options.measured.with_suffix(""), options.only):
        found.append(one)
        row, then, now = one.row, one.row.predicted_s * 1e3, one.predicted_s * 1e3
        print(f"{row.workload[:20]:20} {row.plan[:56]:56} {row.measured_s * 1e3:7.1f} ms measured, predicted ", end="")
        print(f"{then:7.1f} then and {now:7.1f} now: error {row.error:+6.1%} and {one.error:+6.1%}", flush=True)
    for when, errors in (("then", [one.row.error for one in found]), ("now", [one.error for one in found])):
        if errors:
            sizes = [abs(error) for error in errors]
            print(f"{when:4}  median {median(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)} rows")


if __name__ == "__main__":
    main()
