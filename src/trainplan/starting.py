"""A plan on real processes, with what was predicted beside what happened."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median
from typing import Any

from trainplan.bench.kept_run import keep
from trainplan.cluster.cluster import Cluster
from trainplan.engine.job import Job
from trainplan.engine.launch import check_data, torchrun
from trainplan.engine.launch import start as launch
from trainplan.engine.measurement import RunResult
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.plan.text import to_json
from trainplan.predict.predict import predict
from trainplan.report.joined import join
from trainplan.report.ran import Prepared, Ran, RanElsewhere
from trainplan.situation import Situation, name_of, torch_device


def prepare(
    s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, compile: bool, start: dict[str, Any],
    fields: dict[str, Any],
) -> Prepared:  # fmt: skip
    """Write the job, and say how torchrun starts it."""
    check_data(name_of(s), s.batch, **fields)
    device = "cpu" if s.profile.device == "cpu" else "cuda"
    folder = Path(out or "trainplan-run").resolve()
    job = Job(
        name_of(s), to_json(plan), s.batch, steps, str(folder), backend=there.backend, device=device,
        compiled=compile or s.profile.compiled, **fields,
    ).save()  # fmt: skip
    line = shlex.join(["torchrun", *torchrun(job, plan.world, **start)[3:]])  # after python -m torch.…run
    return Prepared(predict(plan, s.profile, there, s.batch), str(job), line)


def run_here(
    s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, compile: bool, **fields: Any
) -> Ran:
    """Train on this machine, where the results are then."""
    answer = start(s, plan, there, steps, out, compile, **fields)
    assert isinstance(answer, Ran)
    return answer


def start(
    s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, compile: bool, **fields: Any
) -> Ran | RanElsewhere:
    """Train. On several machines the results are on one of them."""
    if steps < 1:
        raise PlanError(f"--steps {steps}", "a run has at least one step", "--steps 20")
    expected = predict(plan, s.profile, there, s.batch, keep=True)
    result = launch(
        name_of(s), plan, steps=steps, batch=s.batch, backend=there.backend, device=torch_device(s), out=out,
        compiled=compile or s.profile.compiled, **fields,
    )  # fmt: skip
    if not isinstance(result, RunResult):
        return RanElsewhere(result.host, result.folder)
    then = s.profile.provenance.reference_s
    ran = Ran(
        prediction=expected,
        step_seconds=tuple(result.steady_seconds),
        losses=tuple(result.losses),
        peak_bytes=tuple(result.peak_bytes),
        out=result.out,
        drift=median(result.references) / then if result.references and then else 0.0,
        joined=join(expected.timeline(), result.timeline) if result.timeline.events else None,
        warm_up=result.warm_up,
    )
    keep(ran, result.timeline, name_of(s), s.profile, there)
    return ran
