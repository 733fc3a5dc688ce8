"""A plan on real processes, with what was predicted beside what happened."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median
from typing import Any

from trainplan.bench.kept_run import keep
from trainplan.cluster.cluster import Cluster
from trainplan.engine.agendas import check_again
from trainplan.engine.checkpoint_servers import refuse_asynchronous
from trainplan.engine.elastic import Change, train
from trainplan.engine.job import Job
from trainplan.engine.launch import check_data, fresh, torchrun
from trainplan.engine.launch import start as launch
from trainplan.engine.measurement import RunResult
from trainplan.engine.workers import Bounds, Workers
from trainplan.errors import InputError, PlanError
from trainplan.plan.plan import Plan, Request
from trainplan.plan.text import to_json
from trainplan.predict.predict import Prediction, predict
from trainplan.program.lower.backend import backend
from trainplan.report.joined import join
from trainplan.report.ran import Prepared, Ran, RanElsewhere
from trainplan.search.replan import Asked, Replanned, replan, request_of
from trainplan.situation import Situation, name_of, torch_device


def prepare(
    s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, start: dict[str, Any],
    fields: dict[str, Any],
) -> Prepared:  # fmt: skip
    """Write the job, and say how torchrun starts it."""
    check_again(plan, fields["again"], steps, out, start["nnodes"], bool(fields["resume"]))
    check_data(name_of(s), s.batch, **fields)
    device = "cpu" if s.profile.device == "cpu" else "cuda"
    folder = Path(out or "trainplan-run").resolve()
    job = Job(
        name_of(s), to_json(plan), s.batch, steps, str(folder), backend=there.backend, device=device,
        compiled=s.profile.compiled, verified=s.profile.provenance.verified, **fields,
    ).save()  # fmt: skip
    line = shlex.join(["torchrun", *torchrun(job, plan.world, **start)[3:]])  # after python -m torch.…run
    untested = backend(there.backend).untested(plan.world)
    return Prepared(predict(plan, s.profile, there, s.batch), str(job), line, untested, s.profile.notes)


def run_here(s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, **fields: Any) -> Ran:
    """Train on this machine, where the results are then."""
    answer = start(s, plan, there, steps, out, **fields)
    assert isinstance(answer, Ran)
    return answer


def start(s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, **fields: Any) -> Ran | RanElsewhere:
    """Train. On several machines the results are on one of them."""
    if steps < 1:
        raise PlanError(f"--steps {steps}", "a run has at least one step", "--steps 20")
    expected = predict(plan, s.profile, there, s.batch, keep=True)
    result = launch(
        name_of(s), plan, steps=steps, batch=s.batch, backend=there.backend, device=torch_device(s), out=out,
        compiled=s.profile.compiled, verified=s.profile.provenance.verified, **fields,
    )  # fmt: skip
    if not isinstance(result, RunResult):
        untested = backend(there.backend).untested(plan.world)
        return RanElsewhere(result.host, result.folder, untested, s.profile.notes)
    return _ran(s, expected, result, there)


def bounds_of(elastic: str, save_every: int, nnodes: str, dry_run: bool) -> Bounds | None:
    """How many workers there may be, refused where they cannot change; None: they are to stay as they are."""
    if not elastic:
        return None
    found, asked = Bounds.parse(elastic), f"--elastic {elastic}"
    if not save_every:
        why = "when workers come or go, training goes on from its last checkpoint, and none is saved"
        raise InputError(asked, why, f"{asked} --save-every 10")
    if nnodes != "1":
        why = f"one launcher must see all workers come and go, and --nnodes is {nnodes}"
        raise InputError(asked, why, "leaving --nnodes out, or --max-restarts, with which torchrun starts all again")
    if dry_run:
        raise InputError(f"{asked} --dry-run", "torchrun alone does not plan again", "one of the two")
    return found


def start_elastic(
    s: Situation, asked: Plan | Request, plan: Plan, bounds: Bounds, steps: int, out: str | None,
    max_restarts: int, **fields: Any,
) -> Ran:  # fmt: skip
    """Train, and go on under another plan when workers come or go."""
    if steps < 1:
        raise PlanError(f"--steps {steps}", "a run has at least one step", "--steps 20")
    refuse_asynchronous(plan)
    if fields.get("again"):
        why = "what was decided under one plan is of no use to the next, and --elastic plans again"
        raise InputError(f"--again {fields['again']}", why, "one of the two")
    workers = Workers(bounds, plan.world, s.cluster.world)
    check_data(name_of(s), s.batch, **fields)
    request = request_of(asked) if isinstance(asked, Plan) else asked
    wanted = Asked(request, s.profile, s.cluster, s.batch, plan.world)

    def again(change: Change) -> Replanned:
        return replan(wanted, change.plan, change.was, change.now, change.steps_lost, change.restart_s)

    device = torch_device(s)
    job = Job(
        name_of(s), to_json(plan), s.batch, steps, str(fresh(out).resolve()), backend=s.cluster.backend, device=device,
        compiled=s.profile.compiled, verified=s.profile.provenance.verified, **fields,
    )  # fmt: skip
    result, changes = train(job, workers, again, max_restarts=max_restarts)
    last, there = changes[-1].plan if changes else plan, wanted.on(workers.places)
    return _ran(s, predict(last, s.profile, there, s.batch, keep=True), result, there, tuple(changes))


def _ran(
    s: Situation, expected: Prediction, result: RunResult, there: Cluster, changes: tuple[Replanned, ...] = ()
) -> Ran:  # fmt: skip
    """What happened, beside what was expected of it."""
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
        changes=changes,
        lost=tuple(result.lost),
        untested=backend(there.backend).untested(expected.plan.world),
        notes=s.profile.notes,
    )
    keep(ran, result.timeline, name_of(s), s.profile, there)
    return ran
