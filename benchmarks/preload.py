"""What loading the next batch ahead is worth: steps with preload=off and preload=on in turn, on the same processes.

    python benchmarks/preload.py --out benchmarks/data/preload.json
    python benchmarks/preload.py --devices cuda --model resnet50:imagenet --batch 128 --plans single "dataparallel dp=2"

A round trains some steps each way, in turn the one and the other first. A row has the medians of all rounds: a step
with either, the ratio of the two with a 95 % bootstrap interval, how long the load itself took, and where the time of a
step went by kind of operation, no moment counted twice (`report/exclusive.py`). Batches are made beforehand and, for a
GPU, lie in pinned memory: what is measured is bringing them to the device, not making them.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.bench.command import command
from trainplan.bench.limit import Limit, add_option
from trainplan.bench.pool import pool
from trainplan.engine.measurement import Measurement, measure, together
from trainplan.engine.trainer import Trainer, build
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief, parse
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import describe
from trainplan.report.exclusive import steps
from trainplan.solve.shape import shape
from trainplan.workload.batch import each_tensor
from trainplan.workload.load import load
from trainplan.workload.workload import Batch

WORDS = ("off", "on")
MODELS = {"cpu": ("mobilenetv2:cifar10", 16), "cuda": ("resnet18:imagenet", 128)}  # and the batch
WARM_UP = 2


@cache
def _batches(model: str, samples: int, pinned: bool) -> list[Batch]:
    made = [load(model).inputs(samples, seed) for seed in range(2)]
    return [each_tensor(batch, Tensor.pin_memory) for batch in made] if pinned else made


def race(
    rank: int, world: int, model: str, samples: int, plan: Plan, device: str, rounds: int, count: int
) -> list[list[Measurement]]:
    """On every rank: rounds of so many steps each way, in turn. A list for each word."""
    backend = "gloo" if device == "cpu" else "gloo-staged"
    if device == "cpu":
        torch.set_num_threads(1)
    trainers: dict[str, Trainer] = {
        word: build(replace(plan, preload=word), load(model), backend=backend, device=device) for word in WORDS
    }
    batches = _batches(model, samples, device != "cpu")
    data = [(batches[number % 2], None) for number in range(WARM_UP + count)]
    found: dict[str, list[Measurement]] = {word: [] for word in WORDS}
    for number in range(rounds + 1):
        for word in WORDS if number % 2 else WORDS[::-1]:
            if world > 1:
                dist.barrier()
            trainers[word].recorder.rows, trainers[word].recorder.arrived = [], []  # of the round before
            measured = measure(trainers[word], data, warm_up=WARM_UP)
            if number:  # the first round warms up
                found[word].append(measured)
    for trainer in trainers.values():
        trainer.close()
    return list(found.values())


def row(ranks: Sequence[list[list[Measurement]]], plan: Plan) -> dict[str, Any]:
    """What all ranks have measured of a plan."""
    medians: dict[str, list[float]] = {}
    kinds: dict[str, dict[str, float]] = {}
    loads: dict[str, float] = {}
    for place, word in enumerate(WORDS):
        results = [together(each, plan, WARM_UP) for each in zip(*(rank[place] for rank in ranks), strict=True)]
        medians[word] = [median(result.steady_seconds) for result in results]
        shares: dict[str, list[float]] = {}
        for step in (step for result in results for step in steps(result.timeline)):
            total: dict[str, float] = {}
            for share in step.shares:
                total[share.kind] = total.get(share.kind, 0.0) + share.seconds / plan.world
            for kind, value in total.items():
                shares.setdefault(kind, []).append(value)
        kinds[word] = {kind: median(values) for kind, values in shares.items()}
        events = [e for result in results for e in result.timeline.events if e.kind == "LOAD"]
        # Ahead, the first load of a timeline was made before it began.
        took = [e.end - e.start for e in events if word == "off" or "@" in e.name]
        loads[word] = median(took) if took else 0.0
    ratios = np.array(medians["on"]) / np.array(medians["off"])
    generator = np.random.default_rng(0)
    resampled = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = (float(np.quantile(resampled, q)) for q in (0.025, 0.975))
    return {
        "off_s": median(medians["off"]), "on_s": median(medians["on"]), "ratio": float(np.median(ratios)),
        "low": low, "high": high, "load_s": loads, "kinds_s": kinds, "rounds": len(ratios),
    }  # fmt: skip


def chosen(text: str, model: str, batch: int) -> Plan:
    """The plan of a line, on this model."""
    workload, request = load(model), replace(parse(text), preload=None)
    captured = capture(Skeleton(workload.build).model.train(), workload.inputs(2, 0), workload.loss, device="cpu")
    return shape(request, len(captured.blocks), (request.dp or 1) * (request.pp or 1), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=tuple(MODELS), help="by default those that are here")
    parser.add_argument("--model", help=f"by default {' and '.join(f'{m} on {d}' for d, (m, _) in MODELS.items())}")
    parser.add_argument("--batch", type=int, help="samples of a step, over all workers")
    parser.add_argument("--plans", nargs="+", default=["single", "dp=2", "dataparallel dp=2"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="of a round, each way")
    parser.add_argument("--out", type=Path)
    add_option(parser)
    options = parser.parse_args()
    limit, devices = Limit(options.limit), options.devices or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    known = {(row["device"], row["model"], row["batch"], row["asked"]) for row in rows}
    print(f"{'device':6} {'plan':32} {'off ms':>9} {'on ms':>9} {'load ms':>9} {'ratio':>7}   95 % interval")
    for device, text in itertools.product(devices, options.plans):
        model, batch = options.model or MODELS[device][0], options.batch or MODELS[device][1]
        if (device, model, batch, text) in known or limit.over():
            continue
        plan = chosen(text, model, batch)
        given = (model, batch, plan, device, options.rounds, options.steps)
        ranks = [race(0, 1, *given)] if plan.world == 1 else pool(plan.world).run(race, *given, timeout=3600)
        about = {"device": device, "model": model, "batch": batch, "asked": text, "plan": brief(plan)}
        found = {**about, **row(ranks, plan)}
        rows.append(found)
        print(
            f"{device:6} {found['plan']:32} {found['off_s'] * 1e3:9.2f} {found['on_s'] * 1e3:9.2f} "
            f"{found['load_s']['off'] * 1e3:9.2f} {found['ratio']:7.3f}   {found['low']:.3f} to {found['high']:.3f}",
            flush=True,
        )
        if options.out:  # after every row, so that a run that is cut short leaves what it has
            about = {
                "machine": ", ".join(describe(torch.device(name)) for name in devices), "torch": torch.__version__,
                "made": time.strftime("%Y-%m-%d", time.gmtime()), "command": command(),
            }  # fmt: skip
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    limit.leave()


if __name__ == "__main__":
    main()
