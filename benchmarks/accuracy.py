"""Predicted against measured on this machine's CPU cores: the table of docs/accuracy.md.

    python benchmarks/accuracy.py --ranks 2 --steps 20 --out benchmarks/data/accuracy-here.json

Rows that are in the file already are not measured again, so it can be stopped and started. With `--keep FOLDER`, the
profiles and the probed cluster that the predictions were made from are kept beside them.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from trainplan import files
from trainplan.bench.accuracy import Row, compare, orders, suite
from trainplan.cluster.probe.probe import probe
from trainplan.cluster.yaml_write import save_yaml
from trainplan.profile import machine
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.workload.load import load

WORKLOADS = {
    "resnet18:cifar10": 16,
    "vgg11:cifar10": 32,
    "mobilenetv2:cifar10": 16,
    "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=1024": 16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--orders", type=int, nargs="*", default=[], help="ranks for every order of work, instead")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing for each profile")
    parser.add_argument("--keep", type=Path, help="folder for the profiles and the cluster")
    parser.add_argument("--until", type=float, default=0.0, help="stop starting new plans after so many seconds")
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)
    lines = [line for ranks in options.orders for line in orders(ranks)] or suite(options.ranks)
    cluster = probe(max(options.orders or options.ranks), refresh=True, progress=lambda *_: None)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        save_yaml(cluster, options.keep / "cluster.yaml")
    rows = (
        [files.from_json(Row, r) for r in files.read(options.out, "accuracy")["rows"]] if options.out.exists() else []
    )
    print(f"{'workload':24} {'plan':44} {'predicted':>10} {'measured':>10} {'error':>8} {'raw':>8} {'noise':>7}")
    for name in options.workloads:
        batch = WORKLOADS[name]
        profile: Profile | None = None
        for line in lines:
            if options.until and time.monotonic() - started > options.until:
                return
            if any(row.workload == name and row.asked == line for row in rows):
                continue
            if profile is None:
                sizes = sorted({max(1, batch // k) for k in (1, 2, 4, 8, 16)})
                profile = measure(load(name), samples=sizes, seconds=options.seconds)
                if options.keep:
                    profile.save(options.keep / f"{name.partition(':')[0]}.profile.json")
            row = compare(name, line, profile, cluster, batch, options.steps)
            rows.append(row)
            print(
                f"{name[:24]:24} {row.plan[:44]:44} {row.predicted_s * 1e3:8.1f}ms {row.measured_s * 1e3:8.1f}ms "
                f"{row.error:+8.1%} {row.raw_error:+8.1%} {row.noise_floor:7.1%}",
                flush=True,
            )
            about = {
                "machine": machine.describe(torch.device("cpu")),
                "made": time.strftime("%Y-%m-%d", time.gmtime()),
                "torch": torch.__version__,
                "command": "python " + " ".join(sys.argv),
                "rows": files.to_json(rows),
            }
            files.write(options.out, "accuracy", about)


if __name__ == "__main__":
    main()
