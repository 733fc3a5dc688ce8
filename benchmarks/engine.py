"""Our engine against torch's own: the same model, cut in the same places, on the same processes, step by step in turn.

    python benchmarks/engine.py --ranks 2 4 --pairs 60

For each of DDP, ScheduleGPipe and Schedule1F1B: the ratio of our step to torch's, over interleaved pairs, with a 95 %
bootstrap interval of the median. "Not slower" means that its upper end is at most 1.05.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from trainplan.bench.pool import pool
from trainplan.engine.trainer import build
from trainplan.plan.plan import Plan, plan
from trainplan.profile.machine import describe
from trainplan.workload.workload import Batch, Loss, Workload

MICRO, BATCH, WIDTH, TOKENS, LAYERS = 8, 32, 256, 32, 8


class Layer(nn.Module):
    """A transformer's feed-forward layer: what passes between layers is one tensor, as torch's stages want it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, TOKENS, WIDTH, generator=generator) for _ in range(2))
    return Batch(samples, (x,), {}, y)


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


def workload() -> Workload:
    return Workload("layers", model, batch, Loss(F.mse_loss, lambda b: b.samples), optimizer, BATCH, 1000)


def by_torch(kind: str, rank: int, world: int):
    """A function that does one step as torch does it, by hand."""
    data = batch(BATCH, 0)
    if kind == "ddp":
        whole = DistributedDataParallel(model())
        own = optimizer(whole.parameters())
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)

        def step() -> None:
            loss = F.mse_loss(whole(data.args[0][part]), data.targets[part])
            loss.backward()
            own.step()
            own.zero_grad(set_to_none=True)

        return step
    size = LAYERS // world
    module = model()[rank * size : (rank + 1) * size]
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, MICRO, F.mse_loss)
    own = optimizer(module.parameters())

    def step() -> None:
        if rank == 0:
            schedule.step(*data.args)
        elif rank == world - 1:
            schedule.step(target=data.targets, losses=[])
        else:
            schedule.step()
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def chosen(kind: str, world: int) -> Plan:
    if kind == "ddp":
        return plan(dp=world, blocks=LAYERS)
    size = LAYERS // world
    return plan(pp=world, micro=MICRO, schedule=kind, stages=tuple(range(size, LAYERS, size)), blocks=LAYERS)


def race(rank: int, world: int, kind: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of ours and of torch's, in turn."""
    warnings.simplefilter("ignore")
    theirs = by_torch(kind, rank, world)
    trainer = build(chosen(kind, world), workload())
    data = batch(BATCH, 0)
    found = []
    for number in range(pairs + 3):
        seconds = []
        order = (lambda: trainer.step(data), theirs)
        for run in order if number % 2 else order[::-1]:
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        if number >= 3:
            found.append(tuple(seconds if number % 2 else seconds[::-1]))
    trainer.close()
    return found  # type: ignore[return-value]


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--assert", dest="check", action="store_true", help="exit 1 where ours is slower")
    options = parser.parse_args()
    rows, slower = [], False
    print(f"{'system':8} {'ranks':>5} {'ours ms':>9} {'torch ms':>9} {'ratio':>7}   95 % interval")
    for world in options.ranks:
        for kind in ("ddp", "gpipe", "1f1b"):
            pairs = np.array(pool(world).run(race, kind, options.pairs)[0])
            ratios = pairs[:, 0] / pairs[:, 1]
            low, high = interval(ratios)
            slower |= high > 1.05
            ours, theirs = np.median(pairs, axis=0) * 1e3
            print(
                f"{kind:8} {world:5d} {ours:9.2f} {theirs:9.2f} {np.median(ratios):7.3f}   {low:.3f} to {high:.3f}",
                flush=True,
            )
            rows.append(
                {
                    "system": kind, "ranks": world, "ours_s": ours / 1e3, "torch_s": theirs / 1e3,
                    "ratio": float(np.median(ratios)), "low": low, "high": high, "pairs": options.pairs,
                }
            )  # fmt: skip
            if options.out:  # after every row, so that a run that is cut short leaves what it has
                about = {
                    "machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime()),
                    "command": "python " + " ".join(sys.argv), "torch": torch.__version__, "rows": rows,
                }  # fmt: skip
                options.out.write_text(json.dumps(about, indent=1) + "\n")
    if options.check and slower:
        sys.exit("ours is slower")


if __name__ == "__main__":
    main()
