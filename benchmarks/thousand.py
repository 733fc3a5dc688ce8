"""How long do 1,000 plans of an estimated profile take to be predicted, and what of that is lowering?

    python benchmarks/thousand.py                  a table
    python benchmarks/thousand.py --out FILE       … and kept as data
    python benchmarks/thousand.py --plans 40       fewer of them

The plans are drawn without replacement from those with which the search would have all 16 A100s of two nodes train a
GPT of 24 layers: dp × tp × pp, sequence, every order of work, micro-batches, recomputation, zero. Seconds of parts are
those of one core (CPU seconds of the process), so they say nearly the same on a machine that is shared; numba has
compiled. What plans share (rows of stages, orders of work, profiles of ranks that share blocks) is not known before the
first of them. Then the same plans on all cores at once (`predict/many.py`): seconds that pass, which others on the same
cores make more of, and CPU seconds of all processes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainplan.bench.command import command
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.cluster.probe.machine import cores
from trainplan.plan.plan import Plan
from trainplan.predict import predict as steps
from trainplan.predict.many import predictions
from trainplan.profile.profile import Profile
from trainplan.search.best_first import Closer
from trainplan.search.columns import space
from trainplan.search.floor import floors
from trainplan.situation import profile_for
from trainplan.uninterrupted import uninterrupted

MODEL = "gpt:layers={layers},hidden=2048,heads=16,seq=1024,vocab=51200"
THERE, BATCH, LAYERS, PLANS, WARM_UP = "2x8xA100-80", 64, 24, 1000, 20
# Functions that a prediction goes through, by the part of the work that they are.
PARTS = {
    "lower": "lowering", "wire": "checking", "check": "checking", "priced": "pricing",
    "flows_of": "pricing", "play": "playing", "peaks": "memory", "host_peaks": "memory",
}  # fmt: skip


def drawn(count: int, layers: int = LAYERS) -> tuple[list[Plan], Profile, Cluster]:
    """Plans that the search would look at, cut as it would cut them."""
    there = cluster(THERE)
    profile = profile_for(MODEL.format(layers=layers), there, BATCH)
    whole = space(profile, there, BATCH, "bf16", predicted=True)
    everybody = whole.column("dp") * whole.column("tp") * whole.column("pp") == there.world
    rows = random.Random(0).sample(np.flatnonzero(everybody).tolist(), count)
    cut = Closer(whole, floors(whole))
    return [replace(whole.sketch(row), stages=cut(row)[1]) for row in rows], profile, there


def measure(plans: list[Plan], profile: Profile, there: Cluster, count: int) -> dict[str, Any]:
    """CPU seconds of the first so many predictions, in all and by part, and how often each part was gone through."""
    for plan in plans[count:]:
        steps.predict(plan, profile, there, BATCH)  # numba compiles
    profile = replace(profile)  # which forgets what was worked out of it
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    known = {name: getattr(steps, name) for name in PARTS}
    for name, part in PARTS.items():
        setattr(steps, name, _timed(known[name], part, seconds, calls))
    took = []
    try:
        with uninterrupted():  # as the search does
            for plan in plans[:count]:
                started = time.process_time()
                steps.predict(plan, profile, there, BATCH)
                took.append(time.process_time() - started)
    finally:
        for name, function in known.items():
            setattr(steps, name, function)
    parts = {part: seconds[part] for part in dict.fromkeys(PARTS.values())}
    return {
        "plans": count, "seconds": sum(took), "mean_ms": 1e3 * float(np.mean(took)),
        "median_ms": 1e3 * float(np.median(took)), "p90_ms": 1e3 * float(np.percentile(took, 90)),
        "parts": {**parts, "the rest": sum(took) - sum(parts.values())}, "calls": dict(calls),
    }  # fmt: skip


def at_once(plans: list[Plan], profile: Profile, there: Cluster, count: int) -> dict[str, Any]:
    """Seconds of the first so many predictions on all cores, none of which knows anything of these plans before."""
    profile = replace(profile)
    started, own, others = time.perf_counter(), time.process_time(), _of_children()
    predictions(plans[:count], profile, there, BATCH)
    passed = time.perf_counter() - started
    return {"cores": cores(), "passed_s": passed, "cpu_s": time.process_time() - own + _of_children() - others}


def _of_children() -> float:
    """CPU seconds of processes that were started here, and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(
    function: Callable[..., Any], part: str, seconds: Counter[str], calls: Counter[str]
) -> Callable[..., Any]:  # fmt: skip
    def timed(*arguments: Any, **choices: Any) -> Any:
        calls[function.__name__] += 1
        started = time.process_time()
        try:
            return function(*arguments, **choices)
        finally:
            seconds[part] += time.process_time() - started  # type: ignore[assignment]

    return timed


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    some = drawn(chosen.plans + WARM_UP, chosen.layers)
    found = measure(*some, chosen.plans)
    found["at_once"] = together = at_once(*some, chosen.plans)
    print(f"{chosen.plans} plans on {THERE}: {found['seconds']:.2f} s of one core, mean {found['mean_ms']:.2f} ms, "
          f"median {found['median_ms']:.2f}, nine of ten below {found['p90_ms']:.2f}")  # fmt: skip
    for part, seconds in found["parts"].items():
        print(f"  {part:10}{1e3 * seconds / chosen.plans:8.2f} ms a plan")
    print(f"at once on {together['cores']} cores: {together['passed_s']:.2f} s passed, "
          f"{together['cpu_s']:.2f} s of all cores together")  # fmt: skip
    if chosen.out:
        import torch

        from trainplan.profile.machine import describe

        about = {"machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime())}
        chosen.out.write_text(json.dumps({**about, "command": command(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
