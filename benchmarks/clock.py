"""How fast is the simulator? 64 stages × 512 micro-batches are lowered, checked and played, for every schedule.

    python benchmarks/clock.py             a table
    python benchmarks/clock.py --assert    … and exit code 1 where a goal is missed
    python benchmarks/clock.py --out FILE  … and kept as data

Goals, on one core: a program from plan to times in 0.15 s, and 10 million operations played a second. Everything is
warm (numba has compiled, the allocator has its memory), and each number is the median of several rounds. Seconds are
CPU seconds of the process, which others on the same cores lengthen by what they take of caches, but not by their turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from trainplan.bench.command import command
from trainplan.plan.plan import plan
from trainplan.plan.rules import CHUNKED, SLICED
from trainplan.predict.clock import play
from trainplan.profile.machine import describe
from trainplan.profile.profile import Block, Crossing, Parameter, Profile
from trainplan.profile.provenance import Provenance
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import COMPUTES, SENDS
from trainplan.program.schedules import SCHEDULES
from trainplan.program.wiring import wire

STAGES, MICRO_BATCHES = 64, 512
MOST_SECONDS, LEAST_RATE = 0.15, 10e6
PARTS = ("lower", "wire", "check", "play")
WARM_UP = 2
SLICES = (4, 4, 3, 3, 2, 2, 2, 2)  # tokens of each, where sequences are cut


def profile(blocks: int) -> Profile:
    """A chain of equal blocks."""
    none = (0.0,)
    block = Block("block", 1e9, (1e-3,), (2e-3,), 0.0, 0.0, none, none, 0.0, (1e6,), none, none)
    return Profile(
        "benchmark", "sample", sum(SLICES), MICRO_BATCHES, MICRO_BATCHES, "cpu", "estimated", False, "fp32", "sgd", 0.0,
        (1,), (block,) * blocks, tuple(Crossing(f"h{i}", i, (i + 1,), 1e5) for i in range(blocks - 1)),
        tuple(Parameter(f"w{i}", (i,), 1000, 4000) for i in reversed(range(blocks))), 0.0, Provenance("", ""),
        whole_sequences=None,
    )  # fmt: skip


def measure(schedule: str, rounds: int) -> tuple[dict[str, float], int, int]:
    """Median seconds of each part and of all together, the number of operations, and of their entries in lists (a
    collective has one for each member)."""
    model = profile(STAGES)
    cuts = tuple(range(1, STAGES))
    chunks = 2 if schedule in CHUNKED else 1
    slices = SLICES if schedule == SLICED else ()
    micro = MICRO_BATCHES // max(1, len(slices))  # slices of fewer micro-batches: as many passes as elsewhere
    choices = plan(
        pp=STAGES // chunks, micro=micro, schedule=schedule, chunks=chunks, stages=cuts, blocks=STAGES, slices=slices
    )
    found = []
    for _ in range(rounds + WARM_UP):
        marks = [time.process_time()]
        program = lower(choices, model, MICRO_BATCHES)
        marks.append(time.process_time())
        wiring = wire(program)
        marks.append(time.process_time())
        check(program, wiring)
        marks.append(time.process_time())
        run = np.isin(program.kind, COMPUTES) * 1e-3 + np.isin(program.kind, SENDS) * 1e-4
        start = time.process_time()
        play(program, run, None, None, wiring)
        parts = [*np.diff(marks), time.process_time() - start]
        found.append([*parts, sum(parts)])
    medians = np.median(found[WARM_UP:], axis=0)
    return dict(zip((*PARTS, "total"), medians.tolist(), strict=True)), len(program), len(program.lists.items)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and say whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assert", dest="strict", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--slack", type=float, default=1.0, help="so many times slower is still good enough")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=SCHEDULES, help="one schedule instead of all")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    print(f"{STAGES} stages × {MICRO_BATCHES} micro-batches, milliseconds, median of {chosen.rounds}")
    print(f"{'schedule':16}{'ops':>9}" + "".join(f"{part:>8}" for part in (*PARTS, "total")) + f"{'Mops/s':>9}")
    missed, rows = [], []
    for schedule in [chosen.only] if chosen.only else SCHEDULES:
        found, count, entries = measure(schedule, chosen.rounds)
        rate = entries / found["play"]
        cells = "".join(f"{found[part] * 1e3:8.1f}" for part in (*PARTS, "total"))
        print(f"{schedule:16}{count:9,}{cells}{rate / 1e6:9.1f}")
        rows.append({"schedule": schedule, "operations": count, **found})
        if found["total"] > MOST_SECONDS * chosen.slack:
            missed.append(f"{schedule}: {found['total']:.3f} s, and the goal is {MOST_SECONDS} s")
        if rate < LEAST_RATE / chosen.slack:
            missed.append(f"{schedule}: {rate / 1e6:.1f} million operations a second, and the goal is 10 million")
    for line in missed:
        print(line)
    if chosen.out:
        about = {
            "machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command(), "torch": torch.__version__, "rows": rows,
        }  # fmt: skip
        chosen.out.write_text(json.dumps(about, indent=1) + "\n")
    return int(chosen.strict and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
