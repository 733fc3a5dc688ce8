"""The thesis's methods to recommend, beside ours (Jansen 2020 §8.3). `trainplan.api.recommend` calls this.

thesis     its equations 5.1, 6.1 and 6.2 from one device's seconds and the links (what it calls performance model)
benchmark  the case of the suite that is most like this one: speed-ups that were measured there
data       every candidate is run for a few batches on the real workers
hardware   one device's seconds, and a law of scaling for each system
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from trainplan.errors import InputError, PlanError, TrainplanError, nearest

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.predict.predict import Prediction
    from trainplan.report.methods import Chosen, Proposal
    from trainplan.situation import Situation

METHODS = ("model", "benchmark", "data", "hardware", "thesis")
OF_THE_THESIS = ("single", "horovod", "gpipe")  # what it has equations for
SCALING = ("single", "ddp", "naive", "gpipe", "dapple")  # what a law of scaling is assumed for


def check_method(
    method: str, results: Sequence[str], predicted: str, wishes: str = "", candidates: str = ""
) -> None:  # fmt: skip
    """Refused where the words do not go together, before anything is measured."""
    if method not in METHODS:
        raise InputError(f"--method {method}", f"the methods are {', '.join(METHODS)}", nearest(method, METHODS))
    if (method == "benchmark") != bool(results):
        why = "it reads results of the suite" if method == "benchmark" else f"{method} reads no results"
        instead = "--results FOLDER, which trainplan bench run wrote" if method == "benchmark" else "--method benchmark"
        raise InputError(f"--method {method} {'without' if not results else 'with'} --results", why, instead)
    if method == "model" and candidates:
        why = "our model searches all plans, not a list of systems"
        raise InputError(f"--candidates {candidates}", why, "--method thesis, or leaving it out")
    if method != "model" and predicted:
        why = "plans that are not run yet are known to our model only"
        raise InputError(f"--method {method} --predicted {predicted}", why, "--method model")
    if method != "model" and wishes:
        raise InputError(f"--method {method}, {wishes}", "only our model searches for what is asked", "--method model")


def choose(
    method: str, s: Situation, memory: str | int | None, results: Sequence[str], steps: int, candidates: str
) -> Chosen:
    """The candidates of a method, by its seconds."""
    from trainplan.report.methods import Chosen
    from trainplan.solve.limits import limited
    from trainplan.units import parse_bytes

    there = limited(s.cluster, parse_bytes(memory) if memory is not None else None)
    words = [word.strip() for word in candidates.split(",") if word.strip()]
    dropped: list[tuple[str, str]] = []
    if method == "thesis":
        found, how = _by_equations(s, there, words, dropped)
    elif method == "hardware":
        found, how = _by_scaling(s, there, words, dropped)
    elif method == "benchmark":
        found, how = _by_benchmark(s, there, words, results, dropped)
    else:
        found, how = _by_running(s, there, words, steps, dropped)
    if not found:
        whys = "; ".join(dict.fromkeys(why for _, why in dropped))
        raise PlanError(f"--method {method} for {s.workload}", f"no candidate is left: {whys}", "--method model")
    ranked = tuple(sorted(found, key=lambda proposal: proposal.step_s))
    return Chosen(method, how, s.workload or s.profile.workload, s.cluster.name, s.batch, ranked, tuple(dropped))


def _solved(
    s: Situation, there: Cluster, words: Collection[str], dropped: list[tuple[str, str]]
) -> Iterator[tuple[str, Prediction]]:
    """The candidates' keys, each with its plan on all devices; those that are not legal or do not fit are dropped."""
    from trainplan.bench.cases import candidates
    from trainplan.plan.served import ASYNCHRONOUS
    from trainplan.plan.text import parse
    from trainplan.search.answer import overfull
    from trainplan.solve.resolve import solve

    for line, key in candidates(there.world, words).items():
        request = parse(line)
        if request.exchange in ASYNCHRONOUS:
            continue
        try:
            found = solve(request, s.profile, there, s.batch)
        except TrainplanError as error:
            dropped.append((line, str(error)))
            continue
        if found.fits:
            yield key, found
        else:
            dropped.append((line, overfull(found)))


def _proposal(found: Prediction, seconds: float, why: str) -> Proposal:
    from trainplan.plan.text import text
    from trainplan.report.methods import Proposal

    return Proposal(text(found.plan), seconds, found.step_s, why)


def _by_equations(
    s: Situation, there: Cluster, words: Collection[str], dropped: list[tuple[str, str]]
) -> tuple[list[Proposal], str]:
    from trainplan.predict.by_equations import by_equations

    proposals = []
    for key, found in _solved(s, there, words or OF_THE_THESIS, dropped):
        seconds = by_equations(found.plan, s.profile, there, s.batch)
        timed = f"one device, {'timed' if s.profile.kind == 'measured' else 'estimated'}"
        equation = timed if found.plan.world == 1 else "5.1" if found.plan.pp == 1 else "6.1 + 6.2"
        if seconds is None:
            dropped.append((key, "the thesis has no equation for it"))
        else:
            proposals.append(_proposal(found, seconds, equation))
    how = (
        "equations 5.1 (a ring of replicas), 6.1 and 6.2 (a pipeline that computes and exchanges in turn) as published"
    )
    return proposals, f"{how}, from one device's seconds and the links; what does not fit is left out"


def _by_scaling(
    s: Situation, there: Cluster, words: Collection[str], dropped: list[tuple[str, str]]
) -> tuple[list[Proposal], str]:
    from trainplan.predict.by_equations import one_device
    from trainplan.predict.thesis import compute_seconds

    alone, proposals, as_known = one_device(s.profile, s.batch), [], f"as {s.profile.kind}"
    for key, found in _solved(s, there, words or SCALING, dropped):
        plan = found.plan
        if plan.world == 1:
            proposals.append(_proposal(found, alone, as_known))
        elif plan.pp == 1:
            proposals.append(_proposal(found, alone / plan.dp, f"1 / {plan.dp} of one device"))
        elif plan.dp > 1 or plan.chunks > 1 or plan.schedule not in ("naive", "gpipe", "1f1b"):
            dropped.append((key, "no law of scaling is assumed for it"))
        else:
            naive = plan.schedule == "naive"
            seconds = alone if naive else compute_seconds(alone, plan.pp, plan.micro)
            law = "one stage works at a time" if naive else f"{plan.micro} micro-batches fill {plan.pp} stages"
            proposals.append(_proposal(found, seconds, law))
    if not any(p.why == as_known for p in proposals) and any(asked == "single" for asked, _ in dropped):
        why = "it extrapolates from a batch on one device, and there it does not fit"
        raise PlanError(f"--method hardware for {s.workload}", why, "--method model")
    how = "the seconds of one device, and a law of scaling for each system; nothing that is communicated is counted"
    return proposals, how


def _by_benchmark(
    s: Situation, there: Cluster, words: Collection[str], results: Sequence[str], dropped: list[tuple[str, str]]
) -> tuple[list[Proposal], str]:
    from trainplan.bench.nearest import nearest as most_like
    from trainplan.bench.results import read
    from trainplan.predict.by_equations import one_device

    near = most_like(read(results), s.profile, there.world)
    alone, proposals = one_device(s.profile, s.batch), []
    for key, found in _solved(s, there, words, dropped):
        result = near.alike(key, found.plan)
        if result is None:
            dropped.append((key, "nothing of its kind ran in that case"))
            continue
        speedup = near.speedup(result, there.world)
        proposals.append(_proposal(found, alone / speedup, f"{speedup:.2f} × one device there"))
    return proposals, f"speed-ups over one device that were measured in the nearest case, {near.words}"


def _by_running(
    s: Situation, there: Cluster, words: Collection[str], steps: int, dropped: list[tuple[str, str]]
) -> tuple[list[Proposal], str]:
    from trainplan.report.progress import progress
    from trainplan.situation import device_here
    from trainplan.starting import run_here

    if device_here(s.profile.device) is None:
        why = f"it runs every candidate on {s.profile.device}, and this machine has none"
        raise InputError(
            f"--method data on {s.cluster.name}", why, "--cluster local, --method thesis or --method model"
        )
    proposals, solved = [], list(_solved(s, there, words, dropped))
    with progress() as report:
        for number, (key, found) in enumerate(solved):
            report(f"running {key}, {number + 1} of {len(solved)}", number / len(solved))
            try:
                ran = run_here(s, found.plan, there, steps, None, show=False)
            except TrainplanError as error:
                dropped.append((key, (error.why or str(error)).strip().splitlines()[-1]))
                continue
            if ran.step_s is None:
                raise InputError(f"--steps {steps}", "all of them are warm-up", f"--steps {steps + ran.warm_up + 1}")
            proposals.append(_proposal(found, ran.step_s, f"median of {len(ran.step_seconds)} steps"))
    return proposals, f"every candidate was run for {steps} steps on the real workers, one after the other"
