"""Sums of gradients beside backward, and ranks that wait for the slowest: as probed, and as seen in training.

    python benchmarks/beside.py --ranks 8 4 2 --out beside.json

For each number of ranks this machine is probed with as many, a model is trained under each exchange, and its measured
timeline says how many times as long sums took while ranks computed, and how far apart the ranks were
(`bench/beside.py`). The probe says the same from small pieces of work (`slowed`, `spread`), and predictions are made
from that: where the two are far apart, they cannot be right. About 35 s for each number of ranks.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from trainplan.bench.accuracy import run_plan
from trainplan.bench.beside import seen
from trainplan.bench.command import command
from trainplan.cluster.cluster import Cluster
from trainplan.engine.probe import probe
from trainplan.plan.plan import Plan, plan
from trainplan.predict.collectives import all_reduce
from trainplan.predict.contention import largest
from trainplan.predict.exchanges import in_rounds
from trainplan.profile import machine
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.units import parse_bytes
from trainplan.workload.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--model", default="vgg11:cifar10")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bucket", type=parse_bytes, default="4MiB")
    parser.add_argument("--exchanges", nargs="+", default=["all-reduce", "ring", "halving-doubling"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    blocks = len(capture(Skeleton(load(options.model).build).model, load(options.model).inputs(2, 0)).blocks)
    rows = []
    print(f"{'ranks':>5} {'exchange':18} {'slowed':>7} {'probed':>7} {'spread':>7} {'probed':>7} "
          f"{'slowest':>8} {'expected':>8} {'beside ms':>10} {'after ms':>9} {'alone ms':>9}")  # fmt: skip
    for ranks in options.ranks:
        cluster = probe(ranks, refresh=True)
        for word in options.exchanges:
            made = plan(dp=ranks, exchange=word, bucket=parse_bytes(options.bucket), blocks=blocks)
            rows.append(row(cluster, made, options.model, options.batch, options.steps))
            print(line(rows[-1]), flush=True)
    if options.out:
        about = {"machine": machine.describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime())}
        data = {**about, "command": command(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def row(cluster: Cluster, made: Plan, model: str, batch: int, steps: int) -> dict[str, float | str | None]:
    """One plan: as its timeline shows it, beside what the probe says."""
    members, by_us = tuple(range(made.dp)), made.exchange in BY_ROUNDS

    def alone(size: int) -> float:
        sums = in_rounds(cluster, made.exchange, members, size) if by_us else all_reduce(cluster, members, size)
        return sums.seconds

    found = seen(run_plan(model, made, batch, steps).timeline, alone)
    slowdown = cluster.slowdown
    return {
        "ranks": made.dp, "exchange": made.exchange, "slowed": found.slowed,
        "probed_slowed": slowdown.slowed_message if by_us else slowdown.slowed_collective,
        "spread": found.spread, "probed_spread": cluster.spread,
        "slowest": found.slowest, "expected_slowest": cluster.spread * largest(made.dp),
        "beside_s": found.beside_s, "after_s": found.after_s, "alone_s": found.alone_s,
    }  # fmt: skip


def line(row: dict[str, float | str | None]) -> str:
    """A row as text."""
    slowed = "?" if row["slowed"] is None else f"{row['slowed']:.2f}"
    milliseconds = [1e3 * float(row[name] or 0.0) for name in ("beside_s", "after_s", "alone_s")]
    return (
        f"{row['ranks']:5} {row['exchange']:18} {slowed:>7} {row['probed_slowed']:7.2f} {row['spread']:7.1%} "
        f"{row['probed_spread']:7.1%} {row['slowest']:8.1%} {row['expected_slowest']:8.1%} "
        "{:10.1f} {:9.1f} {:9.1f}".format(*milliseconds)
    )


if __name__ == "__main__":
    main()
