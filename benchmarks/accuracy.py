"""Predicted against measured on this machine's CPU cores, or on slices of its GPU: the tables of docs/accuracy.md.

    python benchmarks/accuracy.py --ranks 2 --steps 5 --rounds 4 --out benchmarks/data/accuracy-here.json
    python benchmarks/accuracy.py --orders 4 --slices 4 --out benchmarks/data/orders-gpu.json
    python benchmarks/accuracy.py --exchanges 2 --link 1Gbit/s --delay 1ms --out benchmarks/data/slow-link.json

`--slices` cuts one GPU into so many equal parts with NVIDIA's Multi-Process Service (it is started here, which needs
root, and stopped at the end): every process, also the one that the profile is measured in, has one of them. `--link`
puts the ranks into two network namespaces with a slow link between them (needs root, too).

All plans of a workload are run in rounds, one after the other, so that a slow minute of the machine is not one plan's.
The rows are written after every round. Workloads that are in the file with all of their rounds are not measured again,
so it can be stopped and started. With `--keep FOLDER`, the
profiles and the probed cluster that the predictions were made from are kept beside them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from trainplan import files
from trainplan.bench.accuracy import Compared, Row, exchanges, orders, suite
from trainplan.bench.pool import placed, stop_pools
from trainplan.bench.slow_link import SlowLink, slow_link
from trainplan.cluster.probe.probe import probe
from trainplan.cluster.yaml_write import save_yaml
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
# Larger ones, so that a slice has something to do: kernels of a millisecond, not of ten microseconds.
GPU_WORKLOADS = {
    "gpt:layers=12,hidden=1024,heads=16,seq=512,vocab=8192": 32,
    "resnet50:imagenet": 64,
}


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
    parser.add_argument("--workloads", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing for each profile")
    parser.add_argument("--keep", type=Path, help="folder for the profiles and the cluster")
    parser.add_argument("--until", type=float, default=0.0, help="start no further round after so many seconds")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.slices:
            stack.enter_context(sliced(options.slices))
        link = stack.enter_context(slow_link(options.link, options.delay)) if options.link else None
        if link:
            stack.enter_context(placed(link.place))
        compare_all(options, link)


@contextmanager
def sliced(slices: int) -> Iterator[None]:
    """Give this process, and those that it starts, a share of the GPU's multiprocessors."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // slices)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            stop_pools()
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True, check=False)


def compare_all(options: argparse.Namespace, link: SlowLink | None) -> None:
    """Every workload under every plan."""
    started = time.monotonic()
    device = "cuda" if options.slices else "cpu"
    if device == "cpu":  # as the ranks have
        torch.set_num_threads(1)

    def say(what: str, *_: object) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {what}", file=sys.stderr, flush=True)

    here = machine.describe(torch.device(device)) + (f", {options.slices} slices" if options.slices else "")
    if link:
        here += f", two namespaces, {8 * link.rate / 1e9:g} Gbit/s, {1e3 * link.delay_s:g} ms late"
    lines = [line for ranks in options.orders for line in orders(ranks)]
    lines += [line for ranks in options.exchanges for line in exchanges(ranks)]
    lines = lines or options.plans or suite(options.ranks)
    ranks = max([*options.orders, *options.exchanges] or options.ranks)
    cluster = probe(ranks, device, refresh=True, progress=say, place=link.place if link else None)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        save_yaml(cluster, options.keep / "cluster.yaml")
    rows = (
        [files.from_json(Row, r) for r in files.read(options.out, "accuracy")["rows"]] if options.out.exists() else []
    )
    about = {
        "machine": here,
        "device": machine.name_of(torch.device(device)),
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "command": "python " + " ".join(sys.argv),
    }
    print(f"{'workload':24} {'plan':44} {'predicted':>10} {'measured':>10} {'error':>8} {'raw':>8} {'noise':>7}")
    for name in options.workloads or (GPU_WORKLOADS if options.slices else WORKLOADS):
        if any(row.workload == name and len(row.rounds) >= options.rounds for row in rows):
            continue
        rows = [row for row in rows if row.workload != name]
        batch = GPU_WORKLOADS[name] if options.slices else WORKLOADS[name]
        sizes = sorted({max(1, batch // k) for k in (1, 2, 4, 8, 16)})
        say(f"profile of {name}")
        profile = measure(load(name), device=device, samples=sizes, seconds=options.seconds)
        if options.keep:
            profile.save(options.keep / f"{name.partition(':')[0]}.profile.json")
        sliced_too = [f"pp={ranks} dp=1 schedule=terapipe slices=4 micro=2" for ranks in options.orders]
        asked = lines + (sliced_too if name.startswith("gpt:") else [])
        plans = [Compared(name, line, profile, cluster, batch) for line in asked]
        for each in range(options.rounds):
            say(f"{name}, round {each + 1}")
            if options.until and time.monotonic() - started > options.until:
                return
            for plan in plans:
                plan.run(options.steps)
            found = [plan.row() for plan in plans]
            files.write(options.out, "accuracy", {**about, "rows": files.to_json([*rows, *found])})
        rows += found
        for row in found:
            print(
                f"{name[:24]:24} {row.plan[:44]:44} {row.predicted_s * 1e3:8.1f}ms {row.measured_s * 1e3:8.1f}ms "
                f"{row.error:+8.1%} {row.raw_error:+8.1%} {row.noise_floor:7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
