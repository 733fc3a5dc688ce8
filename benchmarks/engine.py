"""Our engine against others: the same model, cut in the same places, on the same processes, step by step in turn.

    python benchmarks/engine.py --ranks 2 4 --pairs 60
    python benchmarks/engine.py --ranks 2 --systems torchgpipe        after: pip install torchgpipe

For each of DDP and torch's own pipelines: the ratio of our step to theirs, over interleaved pairs, with a 95 %
bootstrap interval of the median. "Not slower" means that its upper end is at most 1.05. torchgpipe, which is not
installed with the other tools, runs its stages in threads of one process: one a device, and both devices are the CPU.
What torch itself cannot run (ZB-V on gloo before 2.13: a rank sends to itself) is said, and has no row.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from trainplan.bench.pool import pool
from trainplan.engine.trainer import build
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import CHUNKED
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


# What torch calls the orders of work that both have.
TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "looped": schedules.ScheduleLoopedBFS,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage a rank
    "zb-v": schedules.ScheduleZBVZeroBubble,
}
SYSTEMS = ("ddp", *TORCH)
Step = Callable[[], object]


def chosen(system: str, world: int) -> Plan:
    """Our plan of the same thing."""
    if system == "ddp":
        return plan(dp=world, blocks=LAYERS)
    schedule, chunks = "gpipe" if system == "torchgpipe" else system, 2 if system in CHUNKED else 1
    size = LAYERS // (world * chunks)
    cuts = tuple(range(size, LAYERS, size))
    return plan(pp=world, micro=MICRO, schedule=schedule, chunks=chunks, stages=cuts, blocks=LAYERS)


def by_others(system: str, rank: int, world: int) -> Step:
    """One step on this rank, as somebody who uses torch (or torchgpipe) writes it by hand."""
    if system == "ddp":
        return _data_parallel(rank, world)
    if system == "torchgpipe":
        return _torchgpipe(rank, world)
    placed = chosen(system, world)
    held = [stage for stage in range(placed.depth) if placed.rank(0, stage) == rank]
    modules = nn.ModuleList(model()[slice(*placed.bounds[stage])] for stage in held)
    return _pipeline(system, placed.depth, held, modules)


def _data_parallel(rank: int, world: int) -> Step:
    data, part = batch(BATCH, 0), slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    whole = DistributedDataParallel(model())
    own = optimizer(whole.parameters())

    def step() -> None:
        loss = F.mse_loss(whole(data.args[0][part]), data.targets[part])
        loss.backward()
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def _pipeline(system: str, depth: int, held: list[int], modules: nn.ModuleList) -> Step:
    data, own = batch(BATCH, 0), optimizer(modules.parameters())
    stages = [PipelineStage(m, s, depth, torch.device("cpu")) for m, s in zip(modules, held, strict=True)]
    several = issubclass(TORCH[system], schedules.PipelineScheduleMulti)
    schedule = TORCH[system](stages if several else stages[0], MICRO, F.mse_loss)  # type: ignore[arg-type]
    inputs = data.args if 0 in held else ()
    last = {"target": data.targets, "losses": []} if depth - 1 in held else {}

    def step() -> None:
        schedule.step(*inputs, **last)
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def _torchgpipe(rank: int, world: int) -> Step:
    if rank:
        return lambda: None  # its ranks are threads of the first process
    from torchgpipe import GPipe  # type: ignore[import-not-found]

    # Whole batches are kept, as our plan does: by default torchgpipe recomputes.
    whole = GPipe(model(), [LAYERS // world] * world, devices=["cpu"] * world, chunks=MICRO, checkpoint="never")
    data, own = batch(BATCH, 0), optimizer(whole.parameters())

    def step() -> None:
        F.mse_loss(whole(*data.args), data.targets).backward()
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def race(rank: int, world: int, system: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of ours and of theirs, in turn."""
    warnings.simplefilter("ignore")
    theirs = by_others(system, rank, world)
    trainer = build(chosen(system, world), workload())
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
    parser.add_argument("--systems", nargs="+", choices=(*SYSTEMS, "torchgpipe"), default=SYSTEMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--assert", dest="check", action="store_true", help="exit 1 where ours is slower")
    options = parser.parse_args()
    rows, slower = [], False
    print(f"{'system':11} {'ranks':>5} {'ours ms':>9} {'theirs ms':>9} {'ratio':>7}   95 % interval")
    for world in options.ranks:
        for system in options.systems:
            try:
                pairs = np.array(pool(world).run(race, system, options.pairs)[0])
            except RunError as error:
                if "torch/distributed/pipelining" not in str(error):
                    raise
                print(f"{system:11} {world:5d} torch {torch.__version__} fails: {str(error).strip().splitlines()[-1]}")
                continue
            ratios = pairs[:, 0] / pairs[:, 1]
            low, high = interval(ratios)
            slower |= high > 1.05
            ours, theirs = np.median(pairs, axis=0) * 1e3
            print(
                f"{system:11} {world:5d} {ours:9.2f} {theirs:9.2f} {np.median(ratios):7.3f}   {low:.3f} to {high:.3f}",
                flush=True,
            )
            rows.append(
                {
                    "system": system, "ranks": world, "ours_s": ours / 1e3, "torch_s": theirs / 1e3,
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
