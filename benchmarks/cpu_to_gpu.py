"""Does a measurement on a CPU make the prediction for a GPU better?

    python benchmarks/cpu_to_gpu.py measure --out benchmarks/data/cpu-to-gpu.json [--rounds 4]
    python benchmarks/cpu_to_gpu.py show --out benchmarks/data/cpu-to-gpu.json --gpu benchmarks/data/estimates-gpu.json

`measure` trains each network for a step on one core, in rounds over all of them, so that whatever else the machine
does meets all alike; the shortest step counts. Beside it stands what is estimated for that core. `show` joins this with
steps that were estimated and measured on a GPU (`benchmarks/estimates.py`), the largest batch of each network, and once
more with the blind list's, as far as that has the same networks: the estimates of the first list are of a model that
was mended by it. It asks of every network, with all constants from the *others*:

* **CPU alone**: its seconds on the core for a sample, times one constant: a ratio of peaks;
* **estimate alone**, times one constant;
* **corrected**: the estimate times how much longer than estimated the core took;
* **corrected in part**: the same to a power that is found on the others (0: no correction, 1: all of it);
* **corrected by family**: times the mean error of the other networks of its kind on the core.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from trainplan.cluster import catalogue
from trainplan.cluster.probe.machine import processor, versions
from trainplan.profile.estimate import estimate
from trainplan.profile.gap import two_lanes
from trainplan.workload.load import load

ZOO = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
USER = "benchmarks/networks.py:"
CASES = (
    *((f"{network}:cifar10", 8) for network in ZOO),
    *((f"{network}:imagenet", 1) for network in ZOO),
    *((f"{USER}{name}", 1) for name in ("vit", "convnext", "densenet", "bert", "t5")),
    ("gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50257", 1),
)
BLIND = Path("benchmarks/data/estimates-blind.json")  # which the model of the GPU was not mended by
LEAST = 5  # networks on both, to find constants on all but one of them
CONVOLUTIONS = ("resnet", "vgg", "mobilenet", "convnext", "densenet")


@dataclass(frozen=True)
class Row:
    """A network's step on a core."""

    workload: str
    samples: int
    measured_s: float
    estimated_s: float


@dataclass(frozen=True)
class Joined:
    """The same network on both."""

    workload: str
    cpu_s: float  # for a sample
    slower: float  # on the core than estimated
    gpu_estimated_s: float  # for a sample
    gpu_measured_s: float

    @property
    def family(self) -> str:
        return "convolutions" if any(word in self.workload for word in CONVOLUTIONS) else "attention"


def measure(rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Steps of all networks, in turns."""
    torch.set_num_threads(1)
    shortest: dict[str, float] = {}
    for number in range(rounds):
        for name, samples in CASES:
            taken = _steps(name, samples)
            shortest[name] = min(taken, shortest.get(name, taken))
            say(f"round {number + 1}: {name} {taken:.3f} s")
    rows = []
    for name, samples in CASES:
        rows.append(Row(name, samples, shortest[name], _estimated(name, samples)))
        say(f"{name}: estimated {rows[-1].estimated_s:.3f} s, measured {rows[-1].measured_s:.3f} s")
    return rows


def _steps(name: str, samples: int) -> float:
    """The shorter of two training steps, after one to warm up."""
    workload = load(name)
    model = workload.build().train()
    optimizer = workload.optimizer(list(model.named_parameters()))
    batch = workload.inputs(samples, 0)
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        loss = workload.loss.function(model(*batch.args, **batch.kwargs), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def _estimated(name: str, samples: int) -> float:
    profile = estimate(load(name), catalogue.device("cpu"), samples=[samples])
    passes = [(b.forward_s[0] + b.backward_s[0] + b.update_s, 0.0) for b in profile.blocks]
    return two_lanes(passes)


def joined(rows: Sequence[Row], gpu: Sequence[dict[str, object]]) -> list[Joined]:
    """Networks that are on both, with the largest batch of the GPU, where its arithmetic counts and not its host."""
    found = []
    for row in rows:
        own = [case for case in gpu if case["workload"] == row.workload and case["measured_s"] and case["estimated_s"]]
        if own:
            case = max(own, key=lambda case: case["samples"])  # type: ignore[arg-type, return-value]
            each = float(case["samples"])  # type: ignore[arg-type]
            there = [float(case[key]) / each for key in ("estimated_s", "measured_s")]  # type: ignore[arg-type]
            found.append(Joined(row.workload, row.measured_s / row.samples, row.measured_s / row.estimated_s, *there))
    return found


def _with_constant(row: Joined, others: Sequence[Joined], say: Callable[[Joined], float]) -> float:
    """What `say` predicts, times the constant that fits the others."""
    return say(row) * exp(mean(log(o.gpu_measured_s / say(o)) for o in others))


def _in_part(row: Joined, others: Sequence[Joined]) -> float:
    off = np.array([log(o.gpu_measured_s / o.gpu_estimated_s) for o in others])
    slower = np.array([log(o.slower) for o in others])
    power = float(np.clip(np.polyfit(slower, off, 1)[0], 0, 1))
    return _with_constant(row, others, lambda o: o.gpu_estimated_s * o.slower**power)


def _by_family(row: Joined, others: Sequence[Joined]) -> float:
    def slower(o: Joined) -> float:
        alike = [x.slower for x in [*others, row] if x.family == o.family and x is not o]
        return exp(mean(map(log, alike)))

    return _with_constant(row, others, lambda o: o.gpu_estimated_s * slower(o))


WAYS: dict[str, Callable[[Joined, Sequence[Joined]], float]] = {
    "CPU alone": lambda row, others: _with_constant(row, others, lambda o: o.cpu_s),
    "estimate alone": lambda row, others: _with_constant(row, others, lambda o: o.gpu_estimated_s),
    "corrected": lambda row, others: _with_constant(row, others, lambda o: o.gpu_estimated_s * o.slower),
    "corrected in part": _in_part,
    "corrected by family": _by_family,
}


def scores(rows: Sequence[Joined]) -> dict[str, dict[str, float]]:
    """Errors of each way, every network by constants of the others."""
    found = {}
    for name, way in WAYS.items():
        off = [abs(way(row, [o for o in rows if o is not row]) / row.gpu_measured_s - 1) for row in rows]
        found[name] = {"networks": len(rows), "mean": mean(off), "median": median(off), "worst": max(off)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "show"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", type=Path, default=Path("benchmarks/data/estimates-gpu.json"))
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    if asked.action == "measure":
        rows = measure(asked.rounds, lambda line: print(line, flush=True))
        head = {"machine": processor(), "versions": versions(), "made": time.strftime("%Y-%m-%d")}
        made = f"python benchmarks/cpu_to_gpu.py measure --out {asked.out} --rounds {asked.rounds}"
        data = {**head, "command": made, "rows": [asdict(row) for row in rows]}
    else:
        data = json.loads(asked.out.read_text(encoding="utf-8"))
        gpu = json.loads(asked.gpu.read_text(encoding="utf-8"))["data"]
        both = joined([Row(**row) for row in data["rows"]], gpu)
        if len(both) < LEAST:
            raise SystemExit(f"{asked.gpu} has measured steps of {len(both)} of these networks; {LEAST} are needed")
        blind = joined([Row(**row) for row in data["rows"]], json.loads(BLIND.read_text(encoding="utf-8"))["data"])
        data |= {"joined": [asdict(row) for row in both], "scores": scores(both), "blind": scores(blind)}
        print(json.dumps({key: data[key] for key in ("scores", "blind")}, indent=1))
    asked.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
