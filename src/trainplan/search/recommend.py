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
from functools import partial

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.optimizers import shares
from trainplan.plan.plan import Plan, plan
from trainplan.predict.planned import planned
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.accuracy import asynchronous
from trainplan.search.answer import TOP, Missed, Progress, Ranked, Recommendation, Rejected, overfull
from trainplan.search.best_first import WORK, Outcome, best_first, cost
from trainplan.search.changes import more_memory
from trainplan.search.columns import Space, of, space
from trainplan.search.distinct import HARDLY
from trainplan.search.likely import likely
from trainplan.search.objective import MEMORY, MONEY, TIME
from trainplan.search.predicted import refuse
from trainplan.search.reasons import compared, one_device, reason
from trainplan.search.rejected import rejected
from trainplan.search.space import sent_away
from trainplan.search.wishes import Wishes
from trainplan.solve.limits import limited, usable
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.preload import brought
from trainplan.solve.resolve import NOTHING, draft, refine
from trainplan.units import percent, seconds, significant

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
    objective, report = wishes.best, progress or _silent
    left = whole
    while True:
        found = best_first(left, top, WORK, objective, report, wishes.meets, wishes.possible)
        if wishes.study is not None and not wishes.synchronous:
            for p in asynchronous(wishes.study, profile, cluster, batch, wishes.devices or cluster.world):
                found.standing.add(p)
        ranked, without_room = _refined(found)
        keep = ~np.isin(np.arange(len(left)), list(without_room))
        if keep.all() or not keep.any():
            break
        left = left.only(keep)  # the next is taken, as if the others were not there
    single = draft(first, cluster, batch, Tables(planned(first, profile, cluster)))
    missed = [] if ranked else _nearest(whole, wishes, report)
    if not ranked and not missed:
        ranked = _offloaded(found)
    ranked = sorted(filter(wishes.meets, ranked), key=objective.value)
    turned_down = rejected(found, ranked[0].step_s if ranked else float("inf"))
    if not ranked and not turned_down:
        turned_down = [Rejected(p, overfull(p), more_memory(p)) for p in without_room.values()]
    return Recommendation(
        ranked=tuple(_ranked(p, ranked[0], profile, cluster, wishes) for p in ranked),
        rejected=tuple(turned_down) if not missed else (),
        single=single,
        note=_note(single, ranked, wishes, found.left),
        considered=len(whole),
        simulated=found.standing.simulated + len(whole) - len(left),
        left=found.left,
        floor_s=found.bound if found.left and objective is TIME else None,
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
        missed=tuple(Missed(p, wishes.misses(p)) for p in missed),
    )


def _nearest(whole: Space, wishes: Wishes, progress: Progress) -> list[Prediction]:
    """Where nothing keeps to what was asked for, that which comes nearest: the fastest, and the cheapest."""
    asked = [TIME] if wishes.deadline is not None else []
    asked += [MONEY] if wishes.budget is not None else []
    near = [best_first(whole, 1, WORK / 4, objective, progress).fitting[:1] for objective in asked]
    return list({p.plan: p for one in near for p in one}.values())


def _silent(words: str, share: float) -> None:
    pass


def _ranked(p: Prediction, winner: Prediction, profile: Profile, cluster: Cluster, wishes: Wishes) -> Ranked:
    own, objective = planned(p.plan, profile, cluster), wishes.best
    if objective is TIME:
        return Ranked(p, reason(p, own, cluster) if p is winner else compared(p, winner, own, cluster))
    words = objective.shown(p)
    if p is not winner:
        words = f"{percent(objective.value(p) / objective.value(winner) - 1)} {objective.worse}: {words}"
        words += f", {significant(winner.step_s / p.step_s)} × as fast a step"
    return Ranked(p, f"{words}; {reason(p, own, cluster)}")


def _note(single: Prediction, ranked: list[Prediction], wishes: Wishes, left: int) -> str:
    """Whether distributing is worth it."""
    if not ranked:
        return "nothing fits" if not left else f"nothing was found that fits, and {left:,} plans were left"
    if wishes.best is TIME:
        return one_device(single, ranked[0], next((p for p in ranked if p.plan.world > 1), None))
    if not single.fits:
        return ""
    missed, alone = wishes.misses(single), wishes.best.shown(single)
    return f"it fits on one device: {alone}, {seconds(single.step_s)} a step" + (f", but {missed}" if missed else "")


def _refined(found: Outcome) -> tuple[list[Prediction], dict[int, Prediction]]:
    """The rows of the table, with their cuts, buckets, exchanges and loads as the clock likes them best; and, by row of
    the space, those that have no room for their batches, however these come."""
    cluster, batch = found.space.cluster, found.space.batch
    refined, without_room = list[Prediction](), dict[int, Prediction]()
    for p in found.standing.shown():
        row, chosen = found.standing.rows[id(p)], p
        tables = found.tables(row)
        # For the least memory they would be tried out in vain; what was not searched for (servers) is whole.
        if row < 0 or found.standing.objective is MEMORY:
            refined.append(p)
            continue
        if cost(p.plan) <= REFINED:
            # Behind the winner a gain must be worth a row, and what is far behind stays there.
            behind = (p.step_s / refined[0].step_s - 1) if refined else 0.0
            gain = max(HARDLY, behind - FAR) if refined else NOTHING
            # (What is offloaded may have its states shared out as well, unlike the row that it is made of.)
            least = partial(found.in_order, row) if p.plan.offload == "none" else None
            chosen = refine(p, ("stages", "bucket", "exchange"), cluster, batch, tables, gain, least=least)
        ready = brought(chosen, cluster, batch, tables)
        if not ready.fits and chosen is not p:  # what is refined may be fuller
            ready = brought(p, cluster, batch, tables)
        if ready.fits:
            refined.append(ready)
        else:
            without_room[row] = ready
    return refined, without_room


def _offloaded(found: Outcome) -> list[Prediction]:
    """The last resort, where nothing fits: what passes save goes to the hosts, as far as need be."""
    space, known = found.space, found.known
    states = np.array([each.weights.sum() + each.states.sum() for each in known.lasting])[known.variant]
    rows = np.flatnonzero(space.column("zero") == 0)
    rows = rows[np.argsort(likely(space, replace(known, seconds=_work(found)), rows), kind="stable")]
    left, standing = MOST_OFFLOADED, found.standing
    for row in rows.tolist():
        for away in sent_away(space.sketch(row)):
            least = states[row] / away.pp / (away.sharers if away.zero else 1)
            if left and least <= usable(space.cluster) and (shares(space.profile.optimizer) or not away.zero):
                left -= 1
                standing.add(draft(away, space.cluster, space.batch, found.tables(row)), row)
    return _refined(found)[0]


def _work(found: Outcome) -> np.ndarray:
    """Seconds that plans take about, whether they fit or not."""
    space, parts = found.space, found.known.lasting
    samples = -(-space.batch // space.column("dp"))
    each = np.array([part.profile.total("forward_s", 0, len(part.profile.blocks), 1) for part in parts])
    return np.asarray(each[found.known.variant] * samples / space.column("pp"))
