"""The case of the suite that is most like a question, and what its measurements say of it.

Alike is what has as much arithmetic and as many parameters, on as many workers: the distance of two cases is the sum of
the logarithms (to base 2) of the ratios of the three. What carries over are speed-ups: a system that was so many times
faster than one device there is taken to be so here. Where the numbers of workers differ, speed-ups that systems lose or
gain by it are taken to be in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2

from trainplan.bench.believed import believed
from trainplan.bench.results import Outcome, Result
from trainplan.bench.scores import names
from trainplan.errors import InputError
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse
from trainplan.predict.accuracy import plan_kind
from trainplan.profile.profile import Profile


@dataclass(frozen=True)
class Nearest:
    """A case, and how far it is from the question."""

    outcome: Outcome
    single_s: float  # one device there
    work: float  # FLOP of a sample there over here
    size: float  # the same of parameters
    distance: float

    def alike(self, key: str, plan: Plan) -> Result | None:
        """What ran there of the kind of a plan: the same system, or else the fastest."""
        kind = plan_kind(plan)
        same = [result for result in self.outcome.ran if plan_kind(parse(result.plan)) == kind]
        return next((result for result in same if key in names(result)), same[0] if same else None)

    def speedup(self, result: Result, workers: int) -> float:
        """Of a system on so many workers over one device."""
        there = self.single_s / (result.measured_s or inf)
        return there if parse(result.plan).dp == 1 == parse(result.plan).pp else there * workers / self.outcome.workers

    @property
    def words(self) -> str:
        """What it is, and how like the question."""
        told = f"{self.outcome.name} on {self.outcome.machine}"
        if self.distance == 0:
            return f"{told}, which is the same workload on as many workers"
        return f"{told}, with {self.work:.2g} × the arithmetic and {self.size:.2g} × the parameters"


def nearest(outcomes: Sequence[Outcome], profile: Profile, workers: int) -> Nearest:
    """The case that is most like this workload on so many workers, of those with one device among their candidates."""
    found = [near for outcome in outcomes if (near := _near(outcome, profile, workers))]
    if not found:
        why = "none of these cases has one device among what was measured, and a profile to compare models by"
        raise InputError("--method benchmark", why, "trainplan bench run, and --results with its folder")
    return min(found, key=lambda near: near.distance)


def _near(outcome: Outcome, profile: Profile, workers: int) -> Nearest | None:
    single = next((r for r in outcome.ran if r.row and r.row.ranks == 1), None)
    if single is None or single.measured_s is None:
        return None
    far = abs(log2(outcome.workers / workers))
    if outcome.workload.partition(",batch")[0] == profile.workload.partition(",batch")[0]:
        return Nearest(outcome, single.measured_s, 1.0, 1.0, far)
    known = believed(outcome)
    if known is None:
        return None
    work, size = known[0].flops / profile.flops, known[0].parameter_count / profile.parameter_count
    return Nearest(outcome, single.measured_s, work, size, far + abs(log2(work)) + abs(log2(size)))
