"""The profile and the cluster that predictions of a case were made from, where they were kept beside its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainplan.bench.results import Outcome, Result
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.plan.text import parse
from trainplan.predict.by_equations import by_equations
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve


def believed(outcome: Outcome) -> tuple[Profile, Cluster] | None:
    """Both, or neither."""
    folder = Path(outcome.at).parent
    paths = folder / outcome.profile, folder / outcome.cluster
    if not outcome.at or not all(path.is_file() for path in paths):
        return None
    return Profile.load(paths[0]), cluster(str(paths[1]))


def with_equations(outcome: Outcome) -> Outcome:
    """With what the thesis's equations say of plans that ran, where only what they need was kept."""
    if all(result.published_s is not None for result in outcome.ran) or not (known := believed(outcome)):
        return outcome
    profile, there = known

    def told(result: Result) -> Result:
        if result.row is None or result.published_s is not None:
            return result
        plan = resolve(parse(result.plan), profile, there, outcome.batch)
        return replace(result, published_s=by_equations(plan, profile, there, outcome.batch))

    return replace(outcome, results=tuple(map(told, outcome.results)))
