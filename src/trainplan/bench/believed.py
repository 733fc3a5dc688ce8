"""The profile and the cluster that predictions of a case were made from, where they were kept beside its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainplan.bench.results import Outcome, Result
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import parse
from trainplan.predict.by_equations import by_equations
from trainplan.predict.predict import Prediction, predict
from trainplan.profile.profile import Profile
from trainplan.report.exclusive import steps
from trainplan.solve.resolve import resolve


def believed(outcome: Outcome) -> tuple[Profile, Cluster] | None:
    """Both, or neither."""
    folder = Path(outcome.at).parent
    paths = folder / outcome.profile, folder / outcome.cluster
    if not outcome.at or not all(path.is_file() for path in paths):
        return None
    return Profile.load(paths[0]), cluster(str(paths[1]))


def anew(outcome: Outcome) -> Outcome:
    """Predicted as this version does, where what predictions are made from was kept; else as it was.

    Plans are those that ran, with the buckets of then, and what was measured stays as it is.
    """
    if not (known := believed(outcome)):
        return outcome
    profile, there = known

    def told(result: Result) -> Result:
        if result.row is None:
            return result
        plan = resolve(parse(result.plan), profile, there, outcome.batch)
        found = predict(plan, profile, there, outcome.batch, keep=True)
        ratio, row = found.step_s / result.row.predicted_s, result.row
        kinds = _kinds(found)
        row = replace(
            row, predicted_s=found.step_s, error=(1 + row.error) * ratio - 1, raw_error=(1 + row.raw_error) * ratio - 1,
            by_kind={kind: (kinds.get(kind, 0.0), took) for kind, (_, took) in row.by_kind.items()},
        )  # fmt: skip
        return replace(result, row=row, predicted_s=found.step_s, fits=found.fits)

    return replace(outcome, results=tuple(map(told, outcome.results)))


def _kinds(found: Prediction) -> dict[str, float]:
    """Seconds of a step that only a kind of operation accounts for, of a mean rank; where ranks go on without each
    other, all that it takes."""
    world = found.plan.world
    if found.plan.exchange in ASYNCHRONOUS:
        return {kind: seconds / world for kind, seconds in found.seconds_by_kind.items()}
    total: dict[str, float] = {}
    for share in steps(found.timeline())[-1].shares:
        total[share.kind] = total.get(share.kind, 0.0) + share.seconds / world
    return total


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
