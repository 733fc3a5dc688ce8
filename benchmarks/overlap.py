"""How much of an exchange is hidden: eight layers of 4 MiB that sleep instead of computing, on a slow link.

    python benchmarks/overlap.py --plans dp=2 "dp=2 zero=1" --out benchmarks/data/overlap.json       (needs root)

Two processes in two network namespaces with a link of 1 Gbit/s. A step sleeps 120 ms forward and 240 ms backward, and
nothing else takes time but the exchange; so what a step takes beyond 360 ms is what was not hidden. Our plans, and
torch's own means used by hand: DDP, ZeroRedundancyOptimizer, FSDP2. Steps of all of them in turn, medians.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.bench.by_hand import Step, Training, by_hand
from trainplan.bench.command import command
from trainplan.bench.pool import placed, pool
from trainplan.bench.slow_link import slow_link
from trainplan.cluster.probe.probe import probe
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import describe
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure
from trainplan.solve.resolve import solve
from trainplan.units import parse_rate, parse_seconds
from trainplan.workload.workload import Batch, Loss, Workload

LAYERS, WIDTH, SAMPLES = 8, 1024, 4  # a layer's weights are 4 MiB
FORWARD_S, BACKWARD_S = 0.015, 0.030  # of a layer
RATE = {"lr": 1e-6}
# What somebody writes by hand, and with how many MiB of gradients at a time.
BY_HAND: dict[str, tuple[str, float | None]] = {
    "ddp 4 MiB": ("ddp", 4),
    "ddp 25 MiB": ("ddp", 25),
    "zero-redundancy": ("zero-redundancy", 4),
    "fsdp2 zero-2": ("fsdp2-2", None),
    "fsdp2 zero-3": ("fsdp2-3", None),
}

_LIBRARY = torch.library.Library("trainplan_overlap", "DEF")
_LIBRARY.define("sleep(Tensor x) -> Tensor")
_LIBRARY.define("sleep_back(Tensor gradient) -> Tensor")


def _nap(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


_LIBRARY.impl("sleep", lambda x: _nap(x, FORWARD_S), "CPU")
_LIBRARY.impl("sleep_back", lambda x: _nap(x, BACKWARD_S), "CPU")
for _name in ("sleep", "sleep_back"):
    torch.library.register_fake(f"trainplan_overlap::{_name}", torch.empty_like)
torch.library.register_autograd(
    "trainplan_overlap::sleep", lambda _, gradient: torch.ops.trainplan_overlap.sleep_back(gradient)
)


class Layer(nn.Module):
    """Weights that a few samples pass through in no time, and a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.trainplan_overlap.sleep(F.linear(x, self.weight))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, WIDTH, generator=generator) for _ in range(2))
    return Batch(samples, (x,), {}, y)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **RATE)  # type: ignore[arg-type]


def workload() -> Workload:
    return Workload("naps", build, batch, Loss(F.mse_loss, lambda b: b.samples), sgd, SAMPLES, SAMPLES)


def profile() -> Profile:
    """The model as it is, with exactly the seconds that it sleeps, for any number of samples."""
    job = workload()
    shape = structure(capture(Skeleton(job.build).model, job.inputs(2, 0), job.loss, device="cpu"), job, batch(2, 0))
    nothing = (0.0, 0.0)
    blocks = tuple(
        replace(
            block, forward_s=(FORWARD_S,) * 2, backward_s=(BACKWARD_S,) * 2, forward_issue_s=nothing,
            backward_issue_s=nothing, saved_bytes=nothing, forward_workspace_bytes=nothing,
            backward_workspace_bytes=nothing,
        )
        for block in shape.blocks
    )  # fmt: skip
    return replace(shape, device="cpu", samples=(1, SAMPLES), blocks=blocks)


def ours(plan: Plan) -> Step:
    """A step under a plan."""
    job = workload()
    skeleton = Skeleton(job.build)
    captured = capture(skeleton.model, job.inputs(2, 0), job.loss, device="cpu")
    trainer = Trainer(plan, job, captured, lambda names: skeleton.materialise(names, 0))
    data = job.inputs(SAMPLES, 0)
    return lambda: trainer.step(data)


def by_torch(name: str, rank: int, world: int) -> Step:
    """A step with torch's own means."""
    how, mib = BY_HAND[name]
    data, own = batch(SAMPLES, 0), SAMPLES // world
    x, y = (whole[rank * own : (rank + 1) * own] for whole in (data.args[0], data.targets))
    return by_hand(how, Training(build(), F.mse_loss, x, y, torch.optim.SGD, RATE), mib)


def race(rank: int, world: int, plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of each, in turn: three steps at a time, since some hide an exchange in the next step."""
    runs = {line: ours(plan) for line, plan in plans.items()} | {n: by_torch(n, rank, world) for n in BY_HAND}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(3):
                run()
            dist.barrier()
            if number:  # the first round warms up: DDP makes its buckets in the second step
                found[name].append((time.perf_counter() - started) / 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["dp=2"])
    parser.add_argument("--link", type=parse_rate, default=125e6)
    parser.add_argument("--delay", type=parse_seconds, default=0.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with slow_link(options.link, options.delay) as link:
        cluster = probe(2, quick=True, place=link.place, timeout_s=300)
        predicted = {line: solve(parse(line), profile(), cluster, SAMPLES) for line in options.plans}
        with placed(link.place):
            found = pool(2).run(race, {line: p.plan for line, p in predicted.items()}, options.rounds)[0]
    compute = LAYERS * (FORWARD_S + BACKWARD_S)
    one = 4 * WIDTH * WIDTH / options.link  # a layer's sum on two ranks: each sends as many bytes as it has
    print(f"compute {compute * 1e3:.0f} ms, and the sum of one layer {one * 1e3:.1f}: all hidden but the last one "
          f"{(compute + one) * 1e3:.0f} ms, nothing hidden {(compute + LAYERS * one) * 1e3:.0f} ms")  # fmt: skip
    rows = [
        {"name": name, "seconds": median(times), "predicted_s": predicted[name].step_s if name in predicted else None}
        for name, times in found.items()
    ]
    for row in rows:
        ours_too = f"ours, predicted {row['predicted_s'] * 1e3:.1f} ms" if row["predicted_s"] else "torch, by hand"
        print(f"{row['name']:32} {row['seconds'] * 1e3:7.1f} ms   {ours_too}")
    if options.out:
        about = {
            "machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command(), "torch": torch.__version__, "link": options.link,
            "delay_s": options.delay, "compute_s": compute, "one_s": one, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
