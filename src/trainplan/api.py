"""The public functions, one for each command, with the same names and arguments.

What a function needs is imported when it is called: `import trainplan` stays instant, and whoever brings a saved
profile never waits for torch.

Everywhere: `model` is a workload (a name, an `nn.Module`, a `Workload`), or a profile (a file's name, a `Profile`);
`cluster` is a short form, a file's name, `local`, or a `Cluster`; `plan` is a line, a `Plan` or a `Request`; `set` are
changes to the cluster, as `["link=25GB/s"]` or `{"link": "25GB/s"}`. `inputs`, `loss` and `optimizer` belong to a model
from Python, as in `trainplan.workload.user`: a module needs the first two. `run` and `compare` start new processes,
which make the model anew by its name, so they take no bare module: give them a function in a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainplan.benches import bench_accuracy as bench_accuracy
from trainplan.benches import bench_published as bench_published
from trainplan.benches import bench_run as bench_run
from trainplan.benches import calibrate as calibrate
from trainplan.errors import InputError, TrainplanError, refuse_unheard
from trainplan.hardware import device as device
from trainplan.hardware import roofline as roofline
from trainplan.methods import check_method, choose
from trainplan.renting import budget as budget
from trainplan.situation import (
    Changes,
    can_run,
    cluster_for,
    made_in_python,
    name_of,
    parts,
    plan_for,
    profile_for,
    profile_here,
    ranks,
    runnable,
    situation,
    torch_device,
)
from trainplan.studies import study as study

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.engine.trainer import Trainer
    from trainplan.plan.plan import Plan, Request
    from trainplan.predict.predict import Prediction
    from trainplan.profile.profile import Profile
    from trainplan.report.answers import Compared, Described, Drawn, Predicted, Profiled, Recommended, Systems
    from trainplan.report.explain import Explanation
    from trainplan.report.methods import Chosen
    from trainplan.report.ran import Prepared, Ran, RanElsewhere

PLANNED = "--plan ddp, for a model's timeline; or leaving them out, for a saved one"
DEFAULT_WORKLOAD = "resnet18:cifar10,batch=32,lr=0.01"  # small enough for a laptop


def profile(
    model: Any,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    output: str | None = None,
    compile: bool = False,
    refresh: bool = False,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Profiled:
    """Time and weigh every block of a model on the cluster's device, and save that."""
    from trainplan.cluster.parse import local_device
    from trainplan.report.answers import Profiled

    made = made_in_python(model, parts(inputs, loss, optimizer)) or model
    here = local_device(cluster) if isinstance(cluster, str) else None
    if here is not None:  # what links this machine has does not matter to a profile: they are not probed
        found = profile_here(made, here, batch, compile=compile, refresh=refresh)
    else:
        found = profile_for(made, cluster_for(cluster), batch, compile=compile, refresh=refresh)
    if output:
        found.save(output)
    return Profiled(found, output or "")


def cluster(
    action: str = "show",
    name: str | Cluster = "local",
    set: Changes = (),
    output: str | None = None,
    refresh: bool = False,
) -> Described:
    """Show what is believed about a cluster, or probe this machine (`probe`: measure it again)."""
    from trainplan.cluster.yaml_write import check_name, save_as
    from trainplan.report.answers import Described

    if action not in ("show", "probe"):
        raise InputError(f"cluster {action}", "a cluster can be shown or probed", _meant(action))
    if action == "probe" and isinstance(name, str) and "local" not in name:
        raise InputError(f"cluster probe {name}", "only this machine can be probed", "cluster probe local")
    check_name(output)  # before anything is probed
    found = cluster_for(name, set, refresh=refresh or action == "probe")
    if output:
        save_as(found, output)
    return Described(found, output or "")


def _meant(action: str) -> str:
    """What may have been meant by an action that there is not: showing the cluster of that name, if it is one."""
    from trainplan.cluster.parse import cluster as parse

    try:
        if "local" not in action:  # which would be probed
            parse(action)
        return f"cluster show {action}"
    except TrainplanError:
        return "cluster show, or cluster probe"


def predict(
    model: Any,
    plan: str | Plan | Request,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    profile: str | Profile | None = None,
    set: Changes = (),
    compile: bool = False,
    trace: str | None = None,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Predicted:
    """Time and memory of one plan."""
    from trainplan.predict.predict import predict as simulate
    from trainplan.report.answers import Predicted
    from trainplan.report.trace import write

    s = situation(model, cluster, batch, profile, set, compile, parts(inputs, loss, optimizer))
    chosen, there = plan_for(plan, s)
    found = simulate(chosen, s.profile, there, s.batch, keep=trace is not None)
    if trace:
        write(trace, [found.timeline()])
    return Predicted(found, s.profile, there, trace or "")


def recommend(
    model: Any = DEFAULT_WORKLOAD,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    memory: str | int | None = None,
    top: int = 8,
    profile: str | Profile | None = None,
    set: Changes = (),
    compile: bool = False,
    run: bool = False,
    steps: int = 12,
    predicted: str = "",
    method: str = "model",
    results: Sequence[str] = (),
    candidates: str = "",
    objective: str = "time",
    deadline: str | float | None = None,
    budget: float | None = None,
    epochs: float = 1.0,
    devices: int | None = None,
    synchronous: bool = False,
    framework: str = "",
    study: str = "",
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Recommended | Chosen:
    """The best plans that fit, with reasons. `run`: train with the best one, and on one device, to see.
    `predicted`: a precision; then also plans that are predicted in it, and not yet run. `method`: another one than ours
    (`trainplan.methods`), of these `candidates`; `results` are the suite's, for `benchmark`.

    `objective`: time, money, memory, or accuracy, for which a `study` of staleness says how many epochs it takes.
    `deadline` (such as 12h) and `budget` (USD) are for so many `epochs`. Only plans on so many `devices`, only what a
    `framework` runs (fsdp, deepspeed, megatron, torchtitan, lightning)."""
    from trainplan.search.wishes import wishes_of

    wishes = wishes_of(objective, deadline, budget, epochs, devices, synchronous, framework, study)
    check_method(method, results, predicted, wishes.words, candidates)
    if method != "model":
        why, instead = "it shows all of its candidates, and trains with none that it chose", "--method model"
        refuse_unheard(recommend, locals(), ("run", "top"), f"--method {method}", why, f"{instead}, or --candidates")
        s = situation(model, cluster, batch, profile, set, compile, parts(inputs, loss, optimizer), method == "data")
        return choose(method, s, memory, results, steps, candidates)
    from trainplan.report.answers import Recommended
    from trainplan.report.lines import command
    from trainplan.report.progress import progress
    from trainplan.search.recommend import recommend as search
    from trainplan.units import parse_bytes

    s = situation(model, cluster, batch, profile, set, compile, parts(inputs, loss, optimizer), runs=run)
    limit = parse_bytes(memory) if memory is not None else None
    with progress() as report:
        found = search(s.profile, s.cluster, s.batch, limit, top, report, predicted, wishes)
    runs: list[Ran] = []
    if run:
        from trainplan.starting import run_here

        others = [row.prediction for row in found.ranked if row.prediction.plan.world > 1]
        chosen = [found.best, found.single if found.best.plan.world > 1 else (others or [found.best])[0]]
        runs = [run_here(s, p, found.cluster, steps, None) for p in dict.fromkeys(p.plan for p in chosen)]
    following: list[str] = []
    if found.ranked and can_run(s):  # else there is no command line that means this model
        from trainplan.plan.text import text

        asked = model if isinstance(model, str) else s.workload or "MODEL"
        where = cluster if isinstance(cluster, str) else s.cluster.name
        words = {"plan": text(found.best.plan), "cluster": where, "batch": s.batch, "profile": profile}
        words["compile"] = s.profile.compiled
        changes = [f"{key}={value}" for key, value in set.items()] if isinstance(set, Mapping) else list(set)
        verb = "predict" if predicted else "run"
        following = [command(verb, asked, **words), command("explain", asked, **words, set=changes)]
        following.append(command("timeline", asked, **words, set=changes, trace="plan.json.gz"))
    return Recommended(found, tuple(following), tuple(runs))


def explain(
    model: Any,
    plan: str | Plan | Request,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    profile: str | Profile | None = None,
    set: Changes = (),
    compile: bool = False,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Explanation:
    """A plan in plain words: what sits where, what moves when, where time and memory go."""
    from trainplan.predict.predict import predict as simulate
    from trainplan.report.explain import explain as words

    s = situation(model, cluster, batch, profile, set, compile, parts(inputs, loss, optimizer))
    chosen, there = plan_for(plan, s)
    return words(simulate(chosen, s.profile, there, s.batch, keep=True), s.profile, there)


def run(
    model: Any,
    plan: str | Plan | Request,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    steps: int = 20,
    profile: str | Profile | None = None,
    out: str | None = None,
    compile: bool = False,
    data: str = "",
    samples: int = 0,
    resume: str = "",
    save_every: int = 0,
    seed: int = 0,
    nnodes: str = "1",
    endpoint: str = "",
    max_restarts: int = 0,
    dry_run: bool = False,
    elastic: str = "",
    again: str = "",
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Ran | Prepared | RanElsewhere:
    """Train under a plan on real processes, and put what happened beside what was predicted.

    `resume` is a checkpoint, of any plan, from which `steps` more are trained, with its seed and from its place in the
    data. `max_restarts`: how often all ranks are started again when one fails, from the last checkpoint of the run
    (`save_every`). `dry_run`: only write the job, and say how torchrun starts it. `elastic`: MIN:MAX workers; when some
    are lost, or another number of them is written to the file `workers` in `out`, it goes on under the best plan for
    those that there are then. `again`: a run's folder; what was decided in it while running is repeated, not decided.

    On several machines (`nnodes`), every one runs the same command with the same `endpoint`. They need not share a
    folder: the results are gathered on one of them, and the others' answer says which.
    """
    from trainplan.engine.launch import check_request
    from trainplan.starting import bounds_of, prepare, start_elastic
    from trainplan.starting import start as begin

    fields: dict[str, Any] = {"data": data, "samples": samples, "resume": resume, "seed": seed}
    fields |= {"save_every": save_every, "again": again}
    plan = runnable(plan)
    check_request(out, **fields)  # before a profile is measured, which takes its time
    bounds = bounds_of(elastic, save_every, nnodes, dry_run)
    s = situation(model, cluster, batch, profile, (), compile, parts(inputs, loss, optimizer), runs=True)
    chosen, there = plan_for(plan, s)
    start: dict[str, Any] = {"nnodes": nnodes, "endpoint": endpoint, "max_restarts": max_restarts}
    if bounds is not None:
        return start_elastic(s, plan, chosen, bounds, steps, out, max_restarts, **fields)
    if dry_run:
        return prepare(s, chosen, there, steps, out, start, fields)
    return begin(s, chosen, there, steps, out, **start, **fields)


def compare(
    model: Any,
    plan: str | Plan | Request,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    steps: int = 3,
    timed_steps: int = 10,
    profile: str | Profile | None = None,
    out: str | None = None,
    seed: int = 0,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Compared:
    """Train a few steps under a plan, and the same pieces in one process: how far they are apart. In float64, or where
    the model does not run in that, in its own types."""
    from trainplan.engine.compare import compare as hold
    from trainplan.engine.launch import check_request
    from trainplan.report.answers import Compared
    from trainplan.report.progress import progress
    from trainplan.starting import run_here
    from trainplan.units import some

    plan = runnable(plan)
    check_request(out, steps=steps, timed_steps=timed_steps)
    s = situation(model, cluster, batch, profile, (), None, parts(inputs, loss, optimizer), runs=True)
    chosen, there = plan_for(plan, s)
    with progress(lines=True) as report:  # starting Python and torch on every rank takes seconds, twice
        found = hold(
            name_of(s), chosen, steps=steps, batch=s.batch, seed=seed, backend=there.backend, device=torch_device(s),
            progress=report,
        )  # fmt: skip
        report(f"timing {some(timed_steps, 'step')} on {some(chosen.world, 'new process')}", 0.7)
        timed = run_here(s, chosen, there, timed_steps, out, seed=seed, show=False)
    return Compared(found, timed)


def systems(keys: Sequence[str] = ()) -> Systems:
    """Every system that is named in the literature here, what it needs, and what is there of it."""
    from trainplan.report.systems import systems as rows

    return rows(keys)


def timeline(
    model: Any,
    plan: str | Plan | Request | None = None,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    profile: str | Profile | None = None,
    set: Changes = (),
    compile: bool = False,
    measured: str | None = None,
    step: int | None = None,
    steps: int = 1,
    width: int = 100,
    trace: str | None = None,
    csv: str | None = None,
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Drawn:
    """Draw a plan's predicted timeline, or a saved one; with `measured`, both, joined.

    Drawn are so many `steps` from `step` on, which is the first where nothing is said. `csv`: a file for what each rank
    of a replica computes, in torch's format. The answer has the plan line that takes it back; a plan that a file cannot
    say is refused.
    """
    from trainplan.files import write_text
    from trainplan.predict.predict import predict as simulate
    from trainplan.program.timeline import Timeline
    from trainplan.report.answers import Drawn
    from trainplan.report.joined import join
    from trainplan.report.order import written
    from trainplan.report.trace import write

    if csv is not None and (plan is None or not csv.endswith(".csv")):
        why = "a plan has an order of work, and none is given" if plan is None else "its name does not end in .csv"
        raise InputError(f"--csv {csv}", why, "--plan 'pp=2 schedule=1f1b'" if plan is None else f"--csv {csv}.csv")
    order = again = ""
    if plan is None:
        names, why = ("cluster", "batch", "profile", "set", "compile"), "a timeline that was saved is drawn as it is"
        refuse_unheard(timeline, locals(), (*names, "inputs", "loss", "optimizer"), "no --plan with", why, PLANNED)
        shown = [model if isinstance(model, Timeline) else Timeline.load(model)]
    else:
        s = situation(model, cluster, batch, profile, set, compile, parts(inputs, loss, optimizer))
        chosen, there = plan_for(plan, s)
        expected: Prediction = simulate(chosen, s.profile, there, s.batch, keep=True)
        shown = [expected.timeline()]
        order, again = written(chosen, csv) if csv else ("", "")
    if measured:
        shown.append(Timeline.load(measured))
    joined = join(*shown) if len(shown) == 2 else None
    if csv:  # files last: what is refused leaves none
        write_text(csv, order)
    if trace:
        write(trace, shown)
    return Drawn(tuple(shown), width, step, steps, joined, trace or "", csv or "", again)


# -- in one's own loop ------------------------------------------------------------------------------------------------


def build(
    plan: str | Plan | Request,
    model: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    inputs: Any = None,
    batch: int | None = None,
    backend: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    compiled: bool = False,
    **fields: Any,
) -> Trainer:
    """A trainer for this rank, in a loop of your own; every rank that torchrun started calls this.

    `model` is a module with its values (those of rank 0 count), or a workload or its name. For a module, `loss` and
    `inputs` (an example batch, or a function of samples and seed) are needed, as in `trainplan.workload.user`. What a
    plan in one line leaves open is chosen by the model's estimated times on this rank's kind of device, which must be
    the same on every rank. `backend` is gloo for CPUs; for GPUs nccl (a GPU for each rank), or gloo-staged, which goes
    through host memory and lets ranks share one. Before anything is trained, the model's capture is held against the
    model on one batch.
    """
    from torch import nn

    from trainplan.cluster.parse import cluster as parse_cluster
    from trainplan.engine.trainer import build as assemble
    from trainplan.engine.world import carrying, join
    from trainplan.plan.plan import Plan
    from trainplan.profile.estimate import estimate
    from trainplan.solve.resolve import resolve
    from trainplan.workload.load import load

    plan, backend = runnable(plan), carrying(backend, device)
    given = {"loss": loss, "optimizer": optimizer, "inputs": inputs, "batch": batch, **fields}
    workload = load(model, **{key: value for key, value in given.items() if value is not None})
    world = join(backend, until_exit=True)[1] if "WORLD_SIZE" in os.environ else 1
    if not isinstance(plan, Plan):
        place = parse_cluster(ranks(plan, world, device))
        plan = resolve(plan, estimate(workload, place.device(0)), place, workload.batch)
    own = model if isinstance(model, nn.Module) else None
    return assemble(
        plan, workload, backend=backend, device=device, seed=seed, compiled=compiled, model=own, verified=False
    )
