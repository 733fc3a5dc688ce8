"""How fast are predictions and the search, and is its answer that of simulating everything?

    python benchmarks/searches.py plans            1,000 plans of GPT-3 2.7B on 64 A100s, predicted one after the other
    python benchmarks/searches.py grow             the search for GPTs: 8 to 16,384 devices, 12 to 1,000 layers
    python benchmarks/searches.py whole            the command around it: from its start to its last line
    python benchmarks/searches.py brute --spaces 200 --rows 2000    random spaces, searched and simulated plan by plan
    python benchmarks/searches.py all --out benchmarks/data/search-2-cores.json    … and kept as data

Seconds are those of one core (CPU seconds of the process), so they say the same on a machine that is shared; numba has
compiled. Plans of the first part are drawn without replacement from all that the search would look at (tp, sequence,
dp, pp, every order of work, micro-batches, recomputation, zero), so hardly two of them share a program.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainplan.bench.command import command
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.search.answer import TOP
from trainplan.search.best_first import best_first
from trainplan.search.closer import Closer
from trainplan.search.columns import Space, space
from trainplan.search.floor import floors
from trainplan.situation import profile_for
from trainplan.solve.limits import limited
from trainplan.solve.resolve import draft

PLANS, PLANS_BATCH = 1000, 512
GROWN = "gpt:layers={layers},hidden=12288,heads=96,seq=2048,vocab=51200"
DEVICES, LAYERS = (8, 64, 512, 1024, 4096, 16384), (12, 96, 500, 1000)
GROWN_BATCH = 1536
WHOLE: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1024, ()), (1024, ("--predicted", "bf16")), (16384, ("--predicted", "bf16")),
)  # fmt: skip
CLUSTERS = (
    "4xA100-80", "8xA100-80", "2x4xA100-80", "2x8xA100-80", "3x4xV100-16", "4x2xA100-80", "6xT4", "2x8xH100-SXM",
)  # fmt: skip
Row = dict[str, Any]


def plans() -> list[Row]:
    """Milliseconds of a prediction."""
    there = cluster("8x8xA100-80")
    profile = profile_for("gpt:layers=24,hidden=2560,heads=32,seq=2048,vocab=51200", there, PLANS_BATCH)
    whole = space(profile, there, PLANS_BATCH, "bf16", predicted=True)
    everybody = whole.column("dp") * whole.column("tp") * whole.column("pp") == there.world
    drawn = random.Random(0).sample(np.flatnonzero(everybody).tolist(), PLANS + 20)
    known = floors(whole)
    cut = Closer(whole, known)
    made = [replace(whole.sketch(row), stages=cut(row)[1]) for row in drawn]
    for plan in made[PLANS:]:
        predict(plan, profile, there, PLANS_BATCH)  # numba compiles
    took = []
    for plan in made[:PLANS]:
        started = time.process_time()
        predict(plan, profile, there, PLANS_BATCH)
        took.append(time.process_time() - started)
    row = {"plans": PLANS, "of": len(whole), "seconds": sum(took), "median_ms": 1e3 * float(np.median(took)),
           "p90_ms": 1e3 * float(np.percentile(took, 90)), "a_second": PLANS / sum(took)}  # fmt: skip
    print(f"{PLANS} plans in {sum(took):.2f} s: {row['a_second']:.0f} a second, median {row['median_ms']:.1f} ms")
    return [row]


def grow() -> list[Row]:
    """Seconds of a search, by devices and by layers."""
    rows = []
    cases = [(devices, 96) for devices in DEVICES] + [(1024, layers) for layers in LAYERS if layers != 96]
    for devices, layers in cases:
        there = cluster(f"{devices // 8}x8xA100-80")
        profile = profile_for(GROWN.format(layers=layers), there, GROWN_BATCH)
        best_first(space(profile, there, GROWN_BATCH, "bf16", predicted=True), work=1)  # numba compiles
        started = time.process_time()
        whole = space(replace(profile), replace(there), GROWN_BATCH, "bf16", predicted=True)
        found = best_first(whole)
        took = time.process_time() - started
        rows.append({
            "devices": devices, "layers": layers, "plans": len(whole), "too_big": found.too_big,
            "simulated": found.standing.simulated, "left": found.left, "gap": found.gap, "seconds": took,
            "step_s": found.fitting[0].step_s if found.fitting else None,
        })  # fmt: skip
        row = rows[-1]
        print(f"{devices:6,} devices, {layers:4} layers: {len(whole):9,} plans, {row['simulated']:3} simulated, "
              f"{row['left']:6,} left, gap {100 * found.gap:4.1f} %, {took:.2f} s", flush=True)  # fmt: skip
    return rows


def whole() -> list[Row]:
    """Seconds of `trainplan recommend` as a process of its own, by devices: all of it, and the search for as many rows
    as it shows by itself. (The second time: whatever numba compiles, it has kept.)"""
    rows = []
    for devices, more in WHOLE:
        name, where = GROWN.format(layers=96), f"{devices // 8}x8xA100-80"
        asked = [name, "--cluster", where, "--batch", str(GROWN_BATCH), *more]
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            line = [sys.executable, "-m", "trainplan", "recommend", *asked, "--json"]
            answer = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        there = cluster(where)
        profile = profile_for(name, there, GROWN_BATCH)
        precision = {"precision": more[-1], "predicted": True} if more else {}
        best_first(space(profile, there, GROWN_BATCH, **precision), work=1)  # numba compiles
        started = time.process_time()
        best_first(space(replace(profile), replace(there), GROWN_BATCH, **precision), top=TOP)
        searched = time.process_time() - started
        took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append({"devices": devices, "options": " ".join(more), "shown": len(answer["plans"]),
                     "rejected": len(answer["rejected"]), "search_s": searched, "seconds": took})  # fmt: skip
        print(f"{devices:6,} devices {' '.join(more):16}: {took:.2f} s, of which the search {searched:.2f}", flush=True)
    return rows


def brute(spaces: int, most: int, seconds: float) -> list[Row]:
    """How many random spaces have the same answer when every plan is simulated, and how many plans that took."""
    rows, until = [], time.monotonic() + seconds
    for seed in range(spaces):
        if time.monotonic() > until:
            break
        found = drawn(seed, most)
        answer = best_first(found, work=float("inf"))
        cut = Closer(found, floors(found))
        simulated = [draft(found.sketch(r), found.cluster, found.batch, cut.tables(r)) for r in range(len(found))]
        best = min((p.step_s for p in simulated if p.fits), default=None)
        same = best == (answer.fitting[0].step_s if answer.fitting else None)
        count = answer.standing.simulated
        rows.append({"seed": seed, "plans": len(found), "simulated": count, "fits": best is not None, "same": same})
        print(f"{seed:4} {found.cluster.name:14} {len(found):5} plans, {count:4} simulated, "
              f"{'the same' if same else 'ANOTHER ANSWER'}", flush=True)  # fmt: skip
    return rows


def drawn(seed: int, most: int) -> Space:
    """Some of the plans for some GPT on some cluster, with some limit of memory."""
    rng = random.Random(seed)
    there = cluster(rng.choice(CLUSTERS))
    if rng.random() < 0.5:
        there = with_overrides(there, {"link": rng.choice(["1GB/s", "5GB/s", "50GB/s"])})
    batch, layers, hidden = rng.choice([7, 8, 16, 24, 32]), rng.choice([2, 3, 4, 6, 8]), rng.choice([128, 512, 1024])
    name = f"gpt:layers={layers},hidden={hidden},heads=8,seq={rng.choice([64, 128, 512])},vocab=1024"
    profile: Profile = profile_for(name, there, batch)
    memory = rng.choice([None, 2**29, 2**30, 2**31, 2**32])
    if memory is not None:
        there = limited(there, memory + there.device(0).context_bytes)
    whole = space(profile, there, batch, rng.choice(["fp32", "fp16"]), predicted=True)
    count = min(len(whole), int(np.exp(rng.uniform(np.log(20), np.log(most)))))
    return replace(whole, rows=whole.rows[sorted(rng.sample(range(len(whole)), count))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("plans", "grow", "whole", "brute", "all"))
    parser.add_argument("--spaces", type=int, default=200)
    parser.add_argument("--rows", type=int, default=2000, help="plans of a space at most")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="stops `brute` after so long")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    parts = {"plans": plans, "grow": grow, "whole": whole}
    parts["brute"] = lambda: brute(chosen.spaces, chosen.rows, chosen.seconds)
    found = {name: part() for name, part in parts.items() if chosen.part in (name, "all")}
    if chosen.out:
        import torch

        from trainplan.profile.machine import describe

        about = {"machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime())}
        kept = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
        chosen.out.write_text(json.dumps({**kept, **about, "command": command(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
