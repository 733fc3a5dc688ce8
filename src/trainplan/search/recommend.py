"""The best plans that fit, with reasons; and what does not fit, with the smallest change that would.

There is one search, for one device and for thousands: all plans that there are (`columns.py`), bounded at once
(`floor.py`), and simulated best first until no other can have a place in the table (`best_first.py`). What it leaves
open of a plan is chosen afterwards, for those that are shown: other cuts, other sizes of buckets, other exchanges of
gradients where communication is exposed, and how batches come to the devices (`solve/`); each by simulating it. Where
nothing fits, what passes save is offloaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError, nearest
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.predict.planned import planned
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.answer import TOP, Missed, Progress, Ranked, Recommendation
from trainplan.search.best_first import WORK, Outcome, best_first, cost
from trainplan.search.columns import of, space
from trainplan.search.distinct import HARDLY
from trainplan.search.likely import likely
from trainplan.search.objective import OBJECTIVES, objective_of
from trainplan.search.reasons import compared, one_device, reason
from trainplan.search.rejected import rejected
from trainplan.search.space import sent_away
from trainplan.search.wishes import Wishes
from trainplan.solve.limits import limited, usable
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.preload import brought
from trainplan.solve.resolve import NOTHING, draft, refine

MOST_OFFLOADED = 16  # plans that are tried so, where nothing fits
REFINED = 1000  # passes that a plan has at most whose cuts and buckets are tried out: for larger ones that takes long
FAR = 0.05  # behind the winner: from there on a gain must be as large as what is beyond it


def recommend(
    profile: Profile,
    cluster: Cluster,
    batch: int | None = None,
    memory: int | None = None,
    top: int = TOP,
    progress: Progress | None = None,
    predicted: str = "",
    wishes: Wishes | None = None,
    among: Sequence[Plan] = (),
) -> Recommendation:
    """The `top` best shapes of plan that fit on the cluster. `memory`: bytes of a device that may be used.
    `predicted`: among all plans that can be predicted, also those that are not yet run, in this precision.
    `among`: of these plans alone, and none that was not given; they are cut anew."""
    started = time.perf_counter()
    batch, wishes = batch or profile.batch, wishes or Wishes()
    if batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    if top < 1:
        raise PlanError(f"top {top}", "at least one plan must be asked for", "--top 5")
    if predicted:
        refuse(profile, cluster, predicted)
    wishes.check(cluster)
    cluster = limited(cluster, memory)
    precision = predicted or "fp32"
    if among:
        whole = of(among, profile, cluster, batch, precision)
    else:
        whole = space(profile, cluster, batch, precision, bool(predicted), wishes.devices)
    first = plan(blocks=len(profile.blocks), precision=precision)  # one device
    whole = wishes.allowed(whole)
    objective = objective_of(wishes.objective, whole)
    found = best_first(whole, top, WORK, objective, progress or _silent, wishes.meets)
    single = draft(first, cluster, batch, Tables(planned(first, profile, cluster)))
    ranked = _refined(found) or _offloaded(found)
    ranked = sorted(filter(wishes.meets, ranked), key=objective.value)
    runner_up = next((p for p in ranked if p.plan.world > 1), None)
    simulated = len(found.standing.rows)
    return Recommendation(
        ranked=tuple(_ranked(p, ranked[0], profile, cluster) for p in ranked),
        rejected=tuple(rejected(found, ranked[0].step_s if ranked else float("inf"))),
        single=single,
        note=one_device(single, ranked[0], runner_up) if ranked else "nothing fits",
        considered=len(whole),
        simulated=simulated,
        left=found.left,
        floor_s=found.bound if found.left and objective is OBJECTIVES["time"] else None,
        seconds=time.perf_counter() - started,
        batch=batch,
        profile=profile,
        cluster=cluster,
        sizes=whole.sizes,
        too_big=found.too_big,
        bound=found.bound if found.fitting else None,
        better=found.better,
        gap=found.gap if found.fitting else None,
        predicted=predicted,
        wishes=wishes,
        missed=tuple(Missed(p, wishes.misses(p)) for p in sorted(found.standing.missing, key=objective.value)[:1]),
    )


def _silent(words: str, share: float) -> None:
    pass


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


def _refined(found: Outcome) -> list[Prediction]:
    """The rows of the table, with their cuts, buckets, exchanges and loads as the clock likes them best."""
    cluster, batch = found.space.cluster, found.space.batch
    refined = list[Prediction]()
    for p in found.standing.shown():
        tables, chosen = found.tables(found.standing.rows[id(p)]), p
        if found.standing.objective.name == "memory":  # they would be tried out for time
            refined.append(p)
            continue
        if cost(p.plan) <= REFINED:
            # Behind the winner a gain must be worth a row, and what is far behind stays there.
            behind = (p.step_s / refined[0].step_s - 1) if refined else 0.0
            gain = max(HARDLY, behind - FAR) if refined else NOTHING
            chosen = refine(p, ("stages", "bucket", "exchange"), cluster, batch, tables, gain)
        refined.append(brought(chosen, cluster, batch, tables))
    return refined


def _offloaded(found: Outcome) -> list[Prediction]:
    """The last resort, where nothing fits: what passes save goes to the hosts, as far as need be."""
    space, known = found.space, found.known
    if found.standing.missing:
        return []
    states = np.array([each.weights.sum() + each.states.sum() for each in known.lasting])[known.variant]
    rows = np.flatnonzero(space.column("zero") == 0)
    rows = rows[np.argsort(likely(space, replace(known, seconds=_work(found)), rows), kind="stable")]
    left, standing = MOST_OFFLOADED, found.standing
    for row in rows.tolist():
        for away in sent_away(space.sketch(row)):
            least = states[row] / away.pp / (away.sharers if away.zero else 1)
            if left and least <= usable(space.cluster):
                left -= 1
                standing.add(draft(away, space.cluster, space.batch, found.tables(row)), row)
    return _refined(found)


def _work(found: Outcome) -> np.ndarray:
    """Seconds that plans take about, whether they fit or not."""
    space, parts = found.space, found.known.lasting
    samples = -(-space.batch // space.column("dp"))
    each = np.array([part.profile.total("forward_s", 0, len(part.profile.blocks), 1) for part in parts])
    return np.asarray(each[found.known.variant] * samples / space.column("pp"))
