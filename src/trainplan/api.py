"""The public functions, one for each command, with the same names and arguments.

What a function needs is imported when it is called: `import trainplan` stays instant, and whoever brings a saved
profile never waits for torch.

Everywhere: `model` is a workload (a name, an `nn.Module`, a `Workload`), or a profile (a file's name, a `Profile`);
`cluster` is a short form, a file's name, `local`, or a `Cluster`; `plan` is a line, a `Plan` or a `Request`; `set` are
changes to the cluster, as `["link=25GB/s"]` or `{"link": "25GB/s"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, PlanError, RunError

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.plan.plan import Plan, Request
    from trainplan.predict.predict import Prediction
    from trainplan.profile.profile import Profile
    from trainplan.report.answers import Compared, Described, Drawn, Predicted, Profiled, Ran, Recommended, Systems
    from trainplan.report.explain import Explanation

DEFAULT_WORKLOAD = "resnet18:cifar10,batch=32,lr=0.01"  # small enough for a laptop
Changes = Sequence[str] | Mapping[str, str]


# -- what is asked about ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """A model on a cluster, with its batch: what every question is about."""

    workload: str  # its name; "" where it has none that another process could load
    profile: Profile
    cluster: Cluster
    batch: int


def cluster_for(cluster: str | Cluster, set: Changes = (), refresh: bool = False) -> Cluster:
    """The cluster that is meant, with the changes that were asked for."""
    from trainplan.cluster.overrides import with_overrides
    from trainplan.cluster.parse import cluster as parse
    from trainplan.report.progress import progress

    if isinstance(cluster, str):
        with progress() as report:
            cluster = parse(cluster, progress=report, refresh=refresh)
    changes = dict(set) if isinstance(set, Mapping) else dict(_change(word) for word in set)
    return with_overrides(cluster, changes) if changes else cluster


def _change(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise InputError(f"--set {word}", "a change has the form KEY=VALUE", "--set link=25GB/s")
    return key.strip(), value.strip()


def profile_for(
    model: Any, cluster: Cluster, batch: int | None = None, *, compile: bool = False, refresh: bool = False
) -> Profile:
    """The profile of a model on a cluster's devices: measured if the device is here, estimated if not.

    A profile that was measured before on this machine with the same versions is taken from the cache.
    """
    from trainplan.report.progress import progress
    from trainplan.workload.load import load

    workload = load(model, **({"batch": batch} if batch else {}))
    names = {device.name for node in cluster.nodes for device in node.devices}
    if len(names) > 1:
        why = f"its devices are {', '.join(sorted(names))}, and plans for mixed devices are not there yet"
        raise PlanError(f"cluster {cluster.name}", why, f"the {sorted(names)[0]} alone")
    with progress() as report:
        here = _device_here(names.pop())
        if here is None:
            from trainplan.profile.estimate import estimate

            return estimate(workload, cluster.device(0), progress=report)
        from trainplan.profile.cache import measured

        return measured(workload, device=here, compile=compile, refresh=refresh, progress=report)


def _device_here(name: str) -> str | None:
    """The torch device of this machine that is of this kind, or None."""
    if name == "cpu":
        return "cpu"
    import torch

    from trainplan.profile.machine import name_of

    if torch.cuda.is_available() and name_of(torch.device("cuda", 0)) == name:
        return "cuda"
    return None


def _situation(
    model: Any, cluster: str | Cluster, batch: int | None, profile: str | Profile | None, set: Changes, compile: bool
) -> Situation:
    from trainplan.profile.profile import Profile

    if batch is not None and batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    there = cluster_for(cluster, set)
    known: Any = profile
    if known is None and (isinstance(model, Profile) or _is_profile(model)):
        known = model
    if known is not None:
        found = known if isinstance(known, Profile) else Profile.load(known)
        name = found.workload if known is model else str(model)
        return Situation(name, found, there, batch or found.batch)
    found = profile_for(model, there, batch, compile=compile)
    return Situation(found.workload, found, there, batch or found.batch)


def _is_profile(model: Any) -> bool:
    return isinstance(model, Path) or (isinstance(model, str) and model.endswith(".json") and ":" not in model)


def _plan(plan: str | Plan | Request, s: Situation) -> tuple[Plan, Cluster]:
    """The plan that is meant, and the cluster with the memory that it may use."""
    from trainplan.plan.plan import Plan
    from trainplan.plan.text import parse
    from trainplan.solve.limits import limited
    from trainplan.solve.resolve import resolve

    if isinstance(plan, Plan):
        return plan, s.cluster
    request = parse(plan) if isinstance(plan, str) else plan
    return resolve(request, s.profile, s.cluster, s.batch), limited(s.cluster, request.memory)


# -- the commands -----------------------------------------------------------------------------------------------------


def profile(
    model: Any,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    output: str | None = None,
    compile: bool = False,
    refresh: bool = False,
) -> Profiled:
    """Time and weigh every block of a model on the cluster's device, and save that."""
    from trainplan.report.answers import Profiled

    found = profile_for(model, cluster_for(cluster), batch, compile=compile, refresh=refresh)
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
    from trainplan.report.answers import Described

    if action not in ("show", "probe"):
        raise InputError(f"cluster {action}", "a cluster can be shown or probed", f"cluster show {action}")
    if action == "probe" and isinstance(name, str) and "local" not in name:
        raise InputError(f"cluster probe {name}", "only this machine can be probed", "cluster probe local")
    found = cluster_for(name, set, refresh=refresh or action == "probe")
    if output:
        found.save(output)
    return Described(found, output or "")


def predict(
    model: Any,
    plan: str | Plan | Request,
    cluster: str | Cluster = "local",
    batch: int | None = None,
    profile: str | Profile | None = None,
    set: Changes = (),
    compile: bool = False,
    trace: str | None = None,
) -> Predicted:
    """Time and memory of one plan."""
    from trainplan.predict.predict import predict as simulate
    from trainplan.report.answers import Predicted
    from trainplan.report.trace import write

    s = _situation(model, cluster, batch, profile, set, compile)
    chosen, there = _plan(plan, s)
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
) -> Recommended:
    """The fastest plans that fit, with reasons. `run`: train with the best one, and on one device, to see."""
    from trainplan.report.answers import Recommended
    from trainplan.report.lines import command
    from trainplan.report.progress import progress
    from trainplan.search.recommend import recommend as search
    from trainplan.units import parse_bytes

    s = _situation(model, cluster, batch, profile, set, compile)
    limit = parse_bytes(memory) if memory is not None else None
    with progress() as report:
        found = search(s.profile, s.cluster, s.batch, limit, top, progress=report)
    runs: list[Ran] = []
    if run:
        others = [row.prediction for row in found.ranked if row.prediction.plan.world > 1]
        chosen = [found.best, found.single if found.best.plan.world > 1 else (others or [found.best])[0]]
        runs = [_run(s, p, found.cluster, steps, None, compile) for p in dict.fromkeys(p.plan for p in chosen)]
    following: list[str] = []
    if found.ranked:
        from trainplan.plan.text import text

        asked = model if isinstance(model, str) else s.workload or "MODEL"
        where = cluster if isinstance(cluster, str) else s.cluster.name
        words = {"plan": text(found.best.plan), "cluster": where, "batch": s.batch, "profile": profile}
        changes = [f"{key}={value}" for key, value in set.items()] if isinstance(set, Mapping) else list(set)
        following = [command("run", asked, **words), command("explain", asked, **words, set=changes)]
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
) -> Explanation:
    """A plan in plain words: what sits where, what moves when, where time and memory go."""
    from trainplan.predict.predict import predict as simulate
    from trainplan.report.explain import explain as words

    s = _situation(model, cluster, batch, profile, set, compile)
    chosen, there = _plan(plan, s)
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
) -> Ran:
    """Train under a plan on real processes, and put what happened beside what was predicted."""
    s = _situation(model, cluster, batch, profile, (), compile)
    chosen, there = _plan(plan, s)
    fields = {"data": data, "samples": samples, "resume": resume, "save_every": save_every, "seed": seed}
    return _run(s, chosen, there, steps, out, compile, nnodes=nnodes, endpoint=endpoint, **fields)


def _run(s: Situation, plan: Plan, there: Cluster, steps: int, out: str | None, compile: bool, **fields: Any) -> Ran:
    from statistics import median

    from trainplan.engine.launch import run as launch
    from trainplan.predict.predict import predict as simulate
    from trainplan.report.answers import Ran
    from trainplan.report.joined import join

    if steps < 1:
        raise PlanError(f"--steps {steps}", "a run has at least one step", "--steps 20")
    expected = simulate(plan, s.profile, there, s.batch, keep=True)
    result = launch(
        _name(s), plan, steps=steps, batch=s.batch, backend=there.backend, device=_torch_device(s), out=out,
        compiled=compile or s.profile.compiled, **fields,
    )  # fmt: skip
    then = s.profile.provenance.reference_s
    return Ran(
        prediction=expected,
        step_seconds=tuple(result.steady_seconds or result.step_seconds),
        losses=tuple(result.losses),
        peak_bytes=tuple(result.peak_bytes),
        out=result.out,
        drift=median(result.references) / then if result.references and then else 0.0,
        joined=join(expected.timeline(), result.timeline) if result.timeline.events else None,
    )


def _name(s: Situation) -> str:
    if not s.workload or s.workload.startswith("module"):
        raise RunError(
            "running a model that was made in Python",
            "the processes of a run load it by its name, and it has none",
            "path/file.py:function, or trainplan.build in your own training loop",
        )
    return s.workload


def _torch_device(s: Situation) -> str:
    here = _device_here(s.profile.device)
    if here is None:
        why = f"the plan is for {s.profile.device}, and this machine has none"
        raise RunError(f"running on {s.cluster.name}", why, "--cluster local")
    return here


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
) -> Compared:
    """Train a few steps under a plan, and the same pieces in one process, in float64: how far they are apart."""
    from trainplan.engine.compare import compare as hold
    from trainplan.report.answers import Compared

    s = _situation(model, cluster, batch, profile, (), False)
    chosen, there = _plan(plan, s)
    found = hold(
        _name(s), chosen, steps=steps, batch=s.batch, seed=seed, backend=there.backend, device=_torch_device(s)
    )
    timed = _run(s, chosen, there, timed_steps, out, False, seed=seed, show=False)
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
    width: int = 100,
    trace: str | None = None,
) -> Drawn:
    """Draw a plan's predicted timeline, or a saved one; with `measured`, both, joined."""
    from trainplan.predict.predict import predict as simulate
    from trainplan.program.timeline import Timeline
    from trainplan.report.answers import Drawn
    from trainplan.report.joined import join
    from trainplan.report.trace import write

    if plan is None:
        shown = [model if isinstance(model, Timeline) else Timeline.load(model)]
    else:
        s = _situation(model, cluster, batch, profile, set, compile)
        chosen, there = _plan(plan, s)
        expected: Prediction = simulate(chosen, s.profile, there, s.batch, keep=True)
        shown = [expected.timeline()]
    if measured:
        shown.append(Timeline.load(measured))
    if trace:
        write(trace, shown)
    joined = join(*shown) if len(shown) == 2 else None
    return Drawn(tuple(shown), width, step, joined, trace or "")
