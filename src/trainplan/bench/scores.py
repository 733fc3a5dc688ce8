"""How good predictions and recommendations are, from results: errors by group, hits, and regret. No torch here.

A case is a question, and its candidates that ran are the answers that there could have been. *Regret* is how much
longer the candidate takes that was picked than the fastest; a *hit* is a pick within max(3 %, 2 × noise floor) of it,
the noise floor being the median of the case's candidates. Three ways to pick are judged beside each other:

    ours       the least predicted time of those that are predicted to fit
    thesis     the least by its equations 5.1, 6.1 and 6.2, of what it has an equation for and did not run out of memory
    constant   "always X; where that does not run, Y …": the order that is best over all these cases, known afterwards

Seconds are at the speed that the machine had when the profile was made, as its reference kernel tells: of candidates
that are held against each other by halves (`results.steadied`). Workers of
asynchronous servers do other training in a step, so they are in no contest; their errors are told like any other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from trainplan.bench.results import Outcome, Result, steadied
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import parse

NEAR = 0.03  # of the fastest: as good as it
_PREFERRED = ("horovod", "ddp", "gpipe")  # whose equations these are, where several candidates have the same


@dataclass(frozen=True)
class Errors:
    """Predictions of one group, against what was measured."""

    group: str
    count: int
    median: float  # of |error|
    worst: float  # by size, with its sign
    noise: float  # median noise floor


@dataclass(frozen=True)
class Pick:
    """What one way to pick came to in one case."""

    system: str  # "": it has nothing to propose
    plan: str
    regret: float | None  # time of the pick over that of the best, less 1; None: the pick did not run
    hit: bool


@dataclass(frozen=True)
class Judged:
    """A case, its best candidate, and what each way to pick came to."""

    name: str
    network: str
    dataset: str
    workers: int
    best: str
    best_s: float
    candidates: int  # that ran
    within: float  # of the best, that counts as a hit
    picks: dict[str, Pick]  # ours, thesis, constant


@dataclass(frozen=True)
class Summary:
    """One way to pick, over all cases that it has a proposal for."""

    way: str
    cases: int
    hits: int
    mean_regret: float | None
    worst_regret: float | None
    did_not_run: int


def errors(outcomes: Sequence[Outcome], group: Callable[[Outcome, Result], str]) -> list[Errors]:
    """By group, sorted by name."""
    found: dict[str, list[Result]] = {}
    for outcome in outcomes:
        for result in outcome.ran:
            found.setdefault(group(outcome, result), []).append(result)
    pairs = {name: [(r.row.error, r.row.noise_floor) for r in own if r.row] for name, own in found.items()}
    return [_errors(name, pairs[name]) for name in sorted(pairs)]


def _errors(name: str, pairs: Sequence[tuple[float, float]]) -> Errors:
    """Of errors, each with its noise floor."""
    off = [error for error, _ in pairs]
    return Errors(name, len(off), median(map(abs, off)), max(off, key=abs), median(floor for _, floor in pairs))


def by_operation(outcomes: Iterable[Outcome]) -> list[Errors]:
    """By kind of operation: of the seconds of a step that only it accounts for, where that is 1 % of the step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        for row in (result.row for result in outcome.ran if result.row):
            drift = row.drift or 1.0
            for kind, (expected, took) in row.by_kind.items():
                if took > 0.01 * row.measured_s:
                    found.setdefault(kind, []).append((expected * drift / took - 1, row.noise_floor))
    return [_errors(kind, found[kind]) for kind in sorted(found)]


# -- contests ----------------------------------------------------------------------------------------------------------


def judge(outcomes: Sequence[Outcome]) -> list[Judged]:
    """Every case in which at least two candidates ran."""
    order = rule_of(outcomes)
    return [_judged(outcome, results, order) for outcome, results in _contests(outcomes)]


def rule_of(outcomes: Sequence[Outcome]) -> list[str]:
    """The best constant rule over these cases."""
    return constant_rule([_times(results) for _, results in _contests(outcomes)])


def _judged(outcome: Outcome, results: Sequence[Result], order: Sequence[str]) -> Judged:
    ran = [result for result in results if result.measured_s is not None]
    best = min(ran, key=lambda r: r.measured_s or 0.0)
    floor = median(result.row.noise_floor for result in ran if result.row)
    within = max(NEAR, 2 * floor)
    times = _times(results)
    chosen = next((system for system in order if system in times), "")
    by_system = {name: result for result in ran for name in names(result)}
    proposals = {"ours": _ours(results), "thesis": _thesis(results), "constant": by_system.get(chosen)}
    picks = {}
    for way, result in proposals.items():
        if result is None:
            picks[way] = Pick("", "", None, False)
            continue
        regret = result.measured_s / best.measured_s - 1 if result.measured_s and best.measured_s else None
        name = chosen if way == "constant" else result.system
        picks[way] = Pick(name, result.plan, regret, regret is not None and regret <= within)
    return Judged(
        outcome.name, outcome.network, outcome.dataset, outcome.workers, best.plan, best.measured_s or 0.0, len(ran),
        within, picks,
    )  # fmt: skip


def summaries(judged: Sequence[Judged]) -> list[Summary]:
    """Each way to pick, over its cases."""
    rows = []
    for way in ("ours", "thesis", "constant"):
        picks = [case.picks[way] for case in judged if case.picks[way].system]
        regrets = [pick.regret for pick in picks if pick.regret is not None]
        rows.append(
            Summary(
                way, len(picks), sum(pick.hit for pick in picks), mean(regrets) if regrets else None,
                max(regrets, default=None), len(picks) - len(regrets),
            )
        )  # fmt: skip
    return rows


def constant_rule(cases: Sequence[dict[str, float]]) -> list[str]:
    """The order of systems that, the first taken wherever it ran, the next where it did not, and so on, has the least
    mean regret. `cases`: seconds of every system that ran.

    >>> constant_rule([{"a": 1.0, "b": 1.1}, {"a": 2.0, "b": 1.0}, {"c": 1.0, "d": 3.0}])
    ['b', 'c']
    """
    known: dict[frozenset[int], tuple[float, tuple[str, ...]]] = {frozenset(): (0.0, ())}

    def least(left: frozenset[int]) -> tuple[float, tuple[str, ...]]:
        if left not in known:
            found = []
            for system in sorted({name for place in left for name in cases[place]}):
                here = [place for place in left if system in cases[place]]
                cost = sum(cases[place][system] / min(cases[place].values()) - 1 for place in here)
                more, then = least(left - frozenset(here))
                found.append((cost + more, (system, *then)))
            known[left] = min(found)
        return known[left]

    return list(least(frozenset(place for place, times in enumerate(cases) if times))[1])


def _contests(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, list[Result]]]:
    """Cases with their candidates that do the same training, where two of them ran."""
    found = []
    for outcome in map(steadied, outcomes):
        alike = [r for r in outcome.results if not r.plan or parse(r.plan).exchange not in ASYNCHRONOUS]
        if sum(result.measured_s is not None for result in alike) > 1:
            found.append((outcome, alike))
    return found


def names(result: Result) -> list[str]:
    """The keys of all systems that it is."""
    return [result.system, *(line.split()[0] for line in result.also)]


def _times(results: Iterable[Result]) -> dict[str, float]:
    """By system, the least seconds of those that ran. What our search proposes is no system to hold on to."""
    found: dict[str, float] = {}
    for result in results:
        for name in names(result):
            if result.measured_s is not None and name != "recommended":
                found[name] = min(found.get(name, result.measured_s), result.measured_s)
    return found


def _ours(results: Sequence[Result]) -> Result | None:
    fitting = [result for result in results if result.plan and result.fits]
    return min(fitting, key=lambda r: r.predicted_s, default=None)


def _thesis(results: Sequence[Result]) -> Result | None:
    """Its timing run tells whether memory is enough; of equal candidates, the one that the equation was made for."""
    known = [r for r in results if r.published_s is not None and not r.too_big]
    return min(known, key=lambda r: (r.published_s or 0.0, r.system not in _PREFERRED), default=None)
