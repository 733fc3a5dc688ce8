"""Our engine against others: the same model, cut in the same places, on the same processes, step by step in turn.

    python benchmarks/engine.py --ranks 2 4 --pairs 60
    python benchmarks/engine.py --ranks 4 --slices 4 --systems ddp zero-1 zero-2 zero-3      on four slices of a GPU
    python benchmarks/engine.py --ranks 2 --link 1Gbit/s --systems ddp zero-1 zero-2 zero-3  two namespaces, as root
    python benchmarks/engine.py --ranks 2 --systems torchgpipe        after: pip install torchgpipe

For each of torch's means of data parallelism (DDP, ZeroRedundancyOptimizer, FSDP2: `trainplan/bench/by_hand.py`) and
its own pipelines: the ratio of our step to theirs, over interleaved pairs, with a 95 % bootstrap interval of the
median. "Not slower" means that its upper end is at most 1.05. Beside the seconds, those that the processors of all
ranks were busy, which other programs on the same cores change little. torchgpipe, which is not installed with the other
tools, runs its stages in threads of one process: one a device, and both devices are the CPU.

What torch itself cannot run (ZB-V on gloo before 2.13: a rank sends to itself; its pipelines between slices of a GPU:
gloo sends nothing from there) is said, and has no row. What is in the file already is not measured again, and
`--for SECONDS` stops it between two races.
"""

import argparse
import json
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from trainplan.bench import limit
from trainplan.bench.by_hand import Step, Training, by_hand
from trainplan.bench.command import command
from trainplan.bench.pool import placed, pool
from trainplan.bench.slices import sliced
from trainplan.bench.slow_link import slow_link
from trainplan.engine.trainer import build
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import CHUNKED
from trainplan.profile.machine import describe
from trainplan.units import MIB, parse_rate, parse_seconds
from trainplan.workload.batch import to_device
from trainplan.workload.workload import Batch, Loss, Workload

MICRO, BATCH, LAYERS = 8, 32, 8


@dataclass(frozen=True)
class Size:
    """Of a layer: its width, and the tokens of a sample."""

    width: int
    tokens: int

    @property
    def layer_mib(self) -> int:
        return 8 * self.width**2 * 4 // MIB


# A slice of a GPU has something to do, too: kernels of a millisecond.
SIZES = {"cpu": Size(256, 32), "cuda": Size(512, 512)}


class Layer(nn.Module):
    """A transformer's feed-forward layer: what passes between layers is one tensor, as torch's stages want it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(size.width) for _ in range(LAYERS)))


def batch(size: Size, samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, size.tokens, size.width, generator=generator) for _ in range(2))
    return Batch(samples, (x,), {}, y)


OPTIMIZER, OPTIONS = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}


def workload(size: Size) -> Workload:
    return Workload(
        "layers", lambda: model(size), lambda samples, seed: batch(size, samples, seed),
        Loss(F.mse_loss, lambda b: b.samples), lambda parameters: OPTIMIZER(parameters, **OPTIONS), BATCH, 1000,
    )  # fmt: skip


# What torch calls the orders of work that both have.
TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "looped": schedules.ScheduleLoopedBFS,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage a rank
    "zb-v": schedules.ScheduleZBVZeroBubble,
}
# What torch has for data parallelism, and with how many MiB of gradients at a time both do it: ZeRO-2 and -3 layer by
# layer, as one wraps them for FSDP2.
REPLICAS = {"ddp": "ddp", "zero-1": "zero-redundancy", "zero-2": "fsdp2-2", "zero-3": "fsdp2-3"}
ZERO_1_MIB = 4
SYSTEMS = (*REPLICAS, *TORCH)


def chosen(system: str, world: int, size: Size) -> Plan:
    """Our plan of the same thing."""
    if system in REPLICAS:
        zero = list(REPLICAS).index(system)
        mib = (25, ZERO_1_MIB, size.layer_mib, size.layer_mib)[zero]
        return plan(dp=world, blocks=LAYERS, zero=zero, bucket=mib * MIB)
    schedule, chunks = "gpipe" if system == "torchgpipe" else system, 2 if system in CHUNKED else 1
    held = LAYERS // (world * chunks)
    cuts = tuple(range(held, LAYERS, held))
    return plan(pp=world, micro=MICRO, schedule=schedule, chunks=chunks, stages=cuts, blocks=LAYERS)


def by_others(system: str, rank: int, world: int, device: str) -> Step:
    """One step on this rank, as somebody who uses torch (or torchgpipe) writes it by hand."""
    size = SIZES[device]
    if system in REPLICAS:
        data, part = batch(size, BATCH, 0), slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        inputs, targets = (whole[part].to(device) for whole in (data.args[0], data.targets))
        trained = Training(model(size).to(device), F.mse_loss, inputs, targets, OPTIMIZER, OPTIONS)
        return by_hand(REPLICAS[system], trained, ZERO_1_MIB if system == "zero-1" else None)
    if system == "torchgpipe":
        return _torchgpipe(rank, world, size)
    placed = chosen(system, world, size)
    held = [stage for stage in range(placed.depth) if placed.rank(0, stage) == rank]
    modules = nn.ModuleList(model(size)[slice(*placed.bounds[stage])] for stage in held)
    return _pipeline(system, placed.depth, held, modules, batch(size, BATCH, 0))


def _pipeline(system: str, depth: int, held: list[int], modules: nn.ModuleList, data: Batch) -> Step:
    own = OPTIMIZER(modules.parameters(), **OPTIONS)
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


def _torchgpipe(rank: int, world: int, size: Size) -> Step:
    if rank:
        return lambda: None  # its ranks are threads of the first process
    from torchgpipe import GPipe  # type: ignore[import-not-found]

    # Whole batches are kept, as our plan does: by default torchgpipe recomputes.
    whole = GPipe(model(size), [LAYERS // world] * world, devices=["cpu"] * world, chunks=MICRO, checkpoint="never")
    data, own = batch(size, BATCH, 0), OPTIMIZER(whole.parameters(), **OPTIONS)

    def step() -> None:
        F.mse_loss(whole(*data.args), data.targets).backward()
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def race(rank: int, world: int, system: str, pairs: int, device: str) -> list[tuple[float, float, float, float]]:
    """Seconds of ours and of theirs, in turn, and seconds that this rank's processors were busy with each."""
    warnings.simplefilter("ignore")
    theirs = by_others(system, rank, world, device)
    backend = "gloo" if device == "cpu" else "gloo-staged"
    trainer = build(chosen(system, world, SIZES[device]), workload(SIZES[device]), backend=backend, device=device)
    data = to_device(batch(SIZES[device], BATCH, 0), torch.device(device))  # as theirs is
    found = []
    for number in range(pairs + 3):
        seconds = []
        order = (lambda: trainer.step(data), theirs)
        for run in order if number % 2 else order[::-1]:
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            seconds.append((time.perf_counter() - start, time.process_time() - busy))
        if number >= 3:
            ours, others = seconds if number % 2 else seconds[::-1]
            found.append((ours[0], others[0], ours[1], others[1]))
    trainer.close()
    return found


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def compared(system: str, world: int, pairs: int, device: str) -> dict[str, object]:
    """One row: ours against theirs on so many ranks."""
    ranks = np.array(pool(world).run(race, system, pairs, device))  # rank, pair, what
    ratios = ranks[0, :, 0] / ranks[0, :, 1]
    low, high = interval(ratios)
    ours, theirs = np.median(ranks[0, :, :2], axis=0)
    ours_busy, theirs_busy = np.median(ranks[:, :, 2:].sum(axis=0), axis=0)
    return {
        "system": system, "ranks": world, "ours_s": ours, "torch_s": theirs, "ratio": float(np.median(ratios)),
        "low": low, "high": high, "pairs": pairs, "ours_busy_s": ours_busy, "torch_busy_s": theirs_busy,
    }  # fmt: skip


def line(row: dict[str, object]) -> str:
    """A row of what is printed."""
    ms = [1e3 * row[name] for name in ("ours_s", "torch_s", "ours_busy_s", "torch_busy_s")]  # type: ignore[operator]
    return (
        f"{row['system']:11} {row['ranks']:5d} {ms[0]:9.2f} {ms[1]:9.2f} {row['ratio']:7.3f}   {row['low']:.3f} to "
        f"{row['high']:.3f} {ms[2]:9.1f} {ms[3]:9.1f}"
    )


def refused_by_torch(error: RunError, device: str) -> bool:
    """Whether a race failed in torch's own means, and not in ours; on slices of a GPU a process may end for good there
    (`DTensor` on gloo does that)."""
    places = ("distributed/pipelining", "distributed/fsdp", "distributed/_composable", "distributed/optim")
    gone = device == "cuda" and "ended without an answer" in str(error)
    return gone or any(f"torch/{place}" in str(error) for place in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--systems", nargs="+", choices=(*SYSTEMS, "torchgpipe"), default=[])
    parser.add_argument("--slices", type=int, default=0, help="of the GPU, a process each; 0: CPU cores")
    parser.add_argument("--link", type=parse_rate, help="between two halves of the ranks, such as 1Gbit/s")
    parser.add_argument("--delay", type=parse_seconds, default=0.0, help="of that link, one way, such as 1ms")
    parser.add_argument("--out", type=Path)
    limit.add_option(parser)
    parser.add_argument("--assert", dest="check", action="store_true", help="exit 1 where ours is slower")
    options = parser.parse_args()
    until = limit.Limit(options.limit)
    with ExitStack() as stack:
        if options.slices:
            stack.enter_context(sliced(options.slices))
        if options.link:
            stack.enter_context(placed(stack.enter_context(slow_link(options.link, options.delay)).place))
        rows = races(options, until)
    if options.check and any(row["high"] > 1.05 for row in rows):
        sys.exit("ours is slower")
    until.leave()


def races(options: argparse.Namespace, until: limit.Limit) -> list[dict[str, object]]:
    """All that was asked for and is not known yet."""
    device = "cuda" if options.slices else "cpu"
    known = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    rows = list(known)
    here = describe(torch.device(device)) + (f", {options.slices} slices" if options.slices else "")
    if options.link:
        here += f", two namespaces, {8 * options.link / 1e9:g} Gbit/s, {1e3 * options.delay:g} ms late"
    print(f"{'system':11} {'ranks':>5} {'ours ms':>9} {'theirs ms':>9} {'ratio':>7}   95 % interval    busy ms, theirs")
    for world in options.ranks:
        for system in options.systems or (REPLICAS if options.slices else SYSTEMS):
            if any((row["system"], row["ranks"]) == (system, world) for row in known):
                continue
            if until.over():
                return rows
            try:
                rows.append(compared(system, world, options.pairs, device))
            except RunError as error:
                if not refused_by_torch(error, device):
                    raise
                print(f"{system:11} {world:5d} torch {torch.__version__} fails: {str(error).strip().splitlines()[-1]}")
                continue
            print(line(rows[-1]), flush=True)
            if options.out:  # after every row, so that a run that is cut short leaves what it has
                about = {
                    "machine": here, "made": time.strftime("%Y-%m-%d", time.gmtime()),
                    "command": command(), "torch": torch.__version__, "rows": rows,
                }  # fmt: skip
                options.out.write_text(json.dumps(about, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
