"""Predicted against measured on this machine's CPU cores, or on slices of its GPU: the tables of docs/exchanges.md.

    python benchmarks/accuracy.py --ranks 2 --steps 5 --rounds 4 --out benchmarks/data/accuracy-here.json
    python benchmarks/accuracy.py --orders 4 --slices 4 --out benchmarks/data/orders-gpu.json
    python benchmarks/accuracy.py --exchanges 2 --link 1Gbit/s --delay 1ms --out benchmarks/data/slow-link.json

`--slices` cuts one GPU into so many equal parts with NVIDIA's Multi-Process Service (it is started here, which needs
root, and stopped at the end): every process, also the one that the profile is measured in, has one of them. `--link`
puts the ranks into two network namespaces with a slow link between them (needs root, too).

All plans of a workload are run in rounds, one after the other, so that a slow minute of the machine is not one plan's.
The rows are written after every plan. Plans that are in the file with all of their rounds are not measured again, so it
can be stopped (or told to stop, `--for 280`) and started again. With `--keep FOLDER`, the profiles and the probed
cluster that the predictions were made from are kept beside them.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainplan import files
from trainplan.bench import limit
from trainplan.bench.accuracy import Compared
from trainplan.bench.command import command
from trainplan.bench.pool import placed
from trainplan.bench.row import Row
from trainplan.bench.slices import sliced
from trainplan.bench.slow_link import SlowLink, slow_link
from trainplan.bench.suites import exchanges, orders, suite
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.yaml_write import save_yaml
from trainplan.engine.probe import probe
from trainplan.errors import PlanError, RunError, TrainplanError
from trainplan.profile import machine
from trainplan.profile.measure import measure
from trainplan.units import parse_rate, parse_seconds
from trainplan.workload.load import load

WORKLOADS = {
    "resnet18:cifar10": 16,
    "vgg11:cifar10": 32,
    "mobilenetv2:cifar10": 16,
    "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=1024": 16,
}
# Where exchanges are compared: many bytes for little work, little of both, and a transformer.
EXCHANGED = [name for name in WORKLOADS if not name.startswith("resnet")]
# Larger ones, so that a slice has something to do: kernels of a millisecond, not of ten microseconds.
GPU_WORKLOADS = {
    "gpt:layers=12,hidden=1024,heads=16,seq=512,vocab=8192": 32,
    "resnet50:imagenet": 64,
}
# Gradients of 0.1, 0.5 and 0.01 GB: slices of a GPU exchange them through the host.
GPU_EXCHANGED = {
    "gpt:layers=6,hidden=512,heads=8,seq=256,vocab=8192": 32,
    "vgg11:imagenet": 64,
    "mobilenetv2:imagenet": 64,
}
BATCHES = WORKLOADS | GPU_WORKLOADS | GPU_EXCHANGED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--orders", type=int, nargs="*", default=[], help="ranks for every order of work, instead")
    parser.add_argument("--exchanges", type=int, nargs="*", default=[], help="ranks for every exchange, instead")
    parser.add_argument("--plans", nargs="+", default=[], help="these plans, on the largest of --ranks, instead")
    parser.add_argument("--link", type=parse_rate, help="between two halves of the ranks, such as 1Gbit/s")
    parser.add_argument("--delay", type=parse_seconds, default=0.0, help="of that link, one way, such as 1ms")
    parser.add_argument("--slices", type=int, default=0, help="of the GPU, a process each; 0: CPU cores")
    parser.add_argument("--steps", type=int, default=5, help="of a plan in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", default=[], choices=sorted(BATCHES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing for each profile")
    parser.add_argument("--keep", type=Path, help="folder for the profiles and the cluster")
    limit.add_option(parser)
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.slices:
            stack.enter_context(sliced(options.slices))
        link = stack.enter_context(slow_link(options.link, options.delay)) if options.link else None
        if link:
            stack.enter_context(placed(link.place))
        compare_all(options, link)


@dataclass
class File:
    """The rows that are known, on disk."""

    path: Path
    about: dict[str, Any]
    rounds: int  # that a row needs to be whole
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)  # by workload and request
    failures: dict[tuple[str, str], str] = field(default_factory=dict)  # what failed, and why: it is not tried again

    def read(self) -> None:
        if self.path.exists():
            data = files.read(self.path, "accuracy")
            rows = [files.from_json(Row, row) for row in data["rows"]]
            self.rows = {(row.workload, row.asked): row for row in rows}
            self.failures = {(workload, asked): why for workload, asked, why in data.get("failures", [])}

    def lacks(self, workload: str, asked: str) -> bool:
        known = self.rows.get((workload, asked))
        return (workload, asked) not in self.failures and (known is None or len(known.rounds) < self.rounds)

    def put(self, row: Row) -> None:
        self.rows[row.workload, row.asked] = row
        self._write()

    def fail(self, workload: str, asked: str, error: TrainplanError) -> None:
        """A plan that fails has no row, and the others go on."""
        self.failures[workload, asked] = why = str(error).strip().splitlines()[-1]
        print(f"{workload[:24]:24} {asked[:44]:44} fails: {why}", flush=True)
        self._write()

    def _write(self) -> None:
        data = {**self.about, "rows": files.to_json(list(self.rows.values()))}
        if self.failures:
            data["failures"] = [[*key, why] for key, why in self.failures.items()]
        files.write(self.path, "accuracy", data)


def compare_all(options: argparse.Namespace, link: SlowLink | None) -> None:
    """Every workload under every plan that is not known yet."""
    started, until = time.monotonic(), limit.Limit(options.limit)
    device = "cuda" if options.slices else "cpu"
    if device == "cpu":  # as the ranks have
        torch.set_num_threads(1)

    def say(what: str, *_: object) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {what}", file=sys.stderr, flush=True)

    here = machine.describe(torch.device(device)) + (f", {options.slices} slices" if options.slices else "")
    if link:
        here += f", two namespaces, {8 * link.rate / 1e9:g} Gbit/s, {1e3 * link.delay_s:g} ms late"
    about = {
        "machine": here,
        "device": machine.name_of(torch.device(device)),
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "command": command(),
    }
    file = File(options.out, about, options.rounds)
    file.read()
    left = {name: [line for line in lines_of(options, name) if file.lacks(name, line)] for name in names_of(options)}
    if not any(left.values()):
        return
    ranks = max([*options.orders, *options.exchanges] or options.ranks)
    cluster = probe(ranks, device, refresh=True, progress=say, place=link.place if link else None)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        save_yaml(cluster, options.keep / "cluster.yaml")
    print(f"{'workload':24} {'plan':44} {'predicted':>10} {'measured':>10} {'error':>8} {'raw':>8} {'noise':>7}")
    for name, lines in left.items():
        if not lines or until.over():
            continue
        say(f"profile of {name}")
        plans = compared(options, name, lines, cluster, device, file)
        for number in range(options.rounds):
            say(f"{name}, round {number + 1}")
            for plan in (plan for plan in plans if (name, plan.asked) not in file.failures):
                if until.over():
                    break
                try:
                    plan.run(options.steps)
                except RunError as error:
                    file.fail(name, plan.asked, error)
                else:
                    file.put(plan.row())
        for row in (plan.row() for plan in plans if plan.runs):
            print(
                f"{name[:24]:24} {row.plan[:44]:44} {row.predicted_s * 1e3:8.1f}ms {row.measured_s * 1e3:8.1f}ms "
                f"{row.error:+8.1%} {row.raw_error:+8.1%} {row.noise_floor:7.1%}",
                flush=True,
            )
    until.leave()


def names_of(options: argparse.Namespace) -> list[str]:
    """The workloads."""
    every, exchanged = (GPU_WORKLOADS, GPU_EXCHANGED) if options.slices else (WORKLOADS, EXCHANGED)
    return options.workloads or list(exchanged if options.exchanges else every)


def lines_of(options: argparse.Namespace, workload: str) -> list[str]:
    """The plans that are asked for a workload."""
    lines = [line for ranks in options.orders for line in orders(ranks)]
    if workload.startswith("gpt:"):
        lines += [f"pp={ranks} dp=1 schedule=terapipe slices=4 micro=2" for ranks in options.orders]
    lines += [line for ranks in options.exchanges for line in exchanges(ranks)]
    return lines or options.plans or suite(options.ranks)


def compared(
    options: argparse.Namespace, name: str, lines: list[str], cluster: Cluster, device: str, file: File
) -> list[Compared]:  # fmt: skip
    """The plans of a workload, predicted from a profile that is measured now."""
    batch = BATCHES[name]
    sizes = sorted({max(1, batch // k) for k in (1, 2, 4, 8, 16)})
    profile = measure(load(name), device=device, samples=sizes, seconds=options.seconds)
    if options.keep:
        profile.save(options.keep / f"{name.partition(':')[0]}.profile.json")
    plans = []
    for line in lines:
        try:
            plans.append(Compared(name, line, profile, cluster, batch, rated_link=options.link is not None))
        except PlanError as error:
            file.fail(name, line, error)
    return plans


if __name__ == "__main__":
    main()
