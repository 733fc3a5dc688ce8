"""Recommending among all choices that can be predicted, also those that are not yet run: very many plans.

They are bounded all at once (`floor.py`), and simulated best first until no other can be faster (`best_first.py`). A
table shows the fastest of those that were simulated: of the first it is certain that there is none faster in the space
(or it is said how much faster one may be), of the others only that they are what was met on the way.
"""

from __future__ import annotations

import time

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError, nearest
from trainplan.plan.plan import WORDS
from trainplan.plan.text import brief
from trainplan.predict.planned import planned
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.answer import REJECTED, Progress, Ranked, Recommendation, Rejected, overfull
from trainplan.search.best_first import Outcome, best_first
from trainplan.search.columns import space
from trainplan.search.reasons import compared, one_device, reason
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import draft
from trainplan.units import gib

MOST_SIMULATED = 24  # plans, before it stops and says so: they are large


def recommend_predicted(
    profile: Profile, cluster: Cluster, batch: int, top: int, precision: str, progress: Progress
) -> Recommendation:  # fmt: skip
    """The fastest plan of all that can be predicted in a precision, and what was met on the way."""
    started = time.perf_counter()
    refuse(profile, cluster, precision)
    found = best_first(space(profile, cluster, batch, precision, predicted=True), MOST_SIMULATED, progress)
    first = found.space.sketch(0)  # one device
    single = draft(first, cluster, batch, Tables(planned(first, profile, cluster)))
    ranked = found.fitting[:top]
    runner_up = next((p for p in ranked if p.plan.world > 1), None)
    return Recommendation(
        ranked=tuple(_ranked(p, ranked[0], profile, cluster) for p in ranked),
        rejected=tuple(_rejected(p, found) for p in (found.over or ((single,) if not ranked else ()))[:REJECTED]),
        single=single,
        note=one_device(single, ranked[0], runner_up) if ranked else "nothing fits",
        considered=len(found.space),
        simulated=len(found.fitting) + len(found.over),
        left=found.left,
        floor_s=found.bound_s if found.left else None,
        seconds=time.perf_counter() - started,
        batch=batch,
        profile=profile,
        cluster=cluster,
        sizes=found.space.sizes,
        too_big=found.too_big,
        bound_s=found.bound_s if ranked else None,
    )


def refuse(profile: Profile, cluster: Cluster, precision: str) -> None:
    """Refused where plans are to be run: what is only predicted would be of no use."""
    asked = f"predicted={precision} for {profile.workload} on {cluster.name}"
    if precision not in WORDS["precision"]:
        why = f"it is the precision that all plans have, one of {', '.join(WORDS['precision'])}"
        raise PlanError(asked, why, f"predicted={nearest(precision, WORDS['precision'], 1)}")
    if cluster.source.startswith("probed") or cluster.contention:
        why = "the cluster was probed, so plans for it are to be run, and tp, sequence, precision and selective are not"
        raise PlanError(asked, why, "leaving it out, or a cluster of the catalogue, such as 8x8xA100-80")


def _ranked(p: Prediction, winner: Prediction, profile: Profile, cluster: Cluster) -> Ranked:
    own = planned(p.plan, profile, cluster)
    return Ranked(p, reason(p, own, cluster) if p is winner else compared(p, winner, own, cluster))


def _rejected(p: Prediction, found: Outcome) -> Rejected:
    if found.fitting:
        return Rejected(p, overfull(p), brief(found.fitting[0].plan))
    return Rejected(p, overfull(p), f"devices with {gib(p.peak_bytes - p.limit_bytes)} more memory, or more of them")
