"""The fastest plans that fit, with reasons; and what does not fit, with the smallest change that would.

Every sketch in the space has a bound that it cannot beat (`bound.py`). Sketches are simulated in the order in which
they are likely to be fast, but for those that cannot come among the first `top` any more; so the answer is that of
simulating all. Where bounds say little (ranks that slow each other down), it stops after so many, and says so: how many
plans were left, and what none of them can beat.
(Very many micro-batches are tried only where fewer do not fit.) Of shapes that differ in hardly more than the number of
their devices one is shown (`distinct.py`). The best are then refined (other cuts, other bucket
sizes, other exchanges of gradients where communication is exposed) and ranked.
Replicas that share out their states come in where memory asks for it, or where the clock says that it is faster; where
nothing fits, what passes save is offloaded; and how batches come to the devices is chosen last (`solve/preload.py`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.answer import REJECTED, TOP, Progress, Ranked, Recommendation, Rejected, overfull
from trainplan.search.bound import Bounds
from trainplan.search.changes import smallest_change
from trainplan.search.distinct import HARDLY, groups, shown
from trainplan.search.reasons import compared, one_device, reason
from trainplan.search.space import Shape, for_memory, sent_away, shape_of, shared_out, sketches
from trainplan.search.wide import recommend_predicted
from trainplan.solve.limits import limited, usable
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.preload import brought
from trainplan.solve.resolve import NOTHING, draft, refine

SHARED = 3  # plans for which it is tried to share out their optimizer's states though they fit
MOST_SHARED = 24  # predictions of plans that do not fit otherwise
MOST_OFFLOADED = 16  # of those that do not fit shared out either
MOST_SIMULATED = 320  # plans, before it stops
FAR = 0.05  # behind the winner: from there on a gain must be as large as what is beyond it


def recommend(
    profile: Profile,
    cluster: Cluster,
    batch: int | None = None,
    memory: int | None = None,
    top: int = TOP,
    progress: Progress | None = None,
    predicted: str = "",
) -> Recommendation:
    """The `top` fastest shapes of plan that fit on the cluster. `memory`: bytes of a device that may be used.
    `predicted`: among all plans that can be predicted, also those that are not yet run, in this precision."""
    started = time.perf_counter()
    batch = batch or profile.batch
    if batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    if top < 1:
        raise PlanError(f"top {top}", "at least one plan must be asked for", "--top 5")
    cluster = limited(cluster, memory)
    if predicted:
        return recommend_predicted(profile, cluster, batch, top, predicted, progress or (lambda what, share: None))
    search = _Search(profile, cluster, batch, top)
    search.run(progress or (lambda what, share: None))
    ranked = search.ranked()
    rejected = search.rejected(ranked[0].step_s if ranked else float("inf"))
    runner_up = next((p for p in ranked if p.plan.world > 1), None)
    return Recommendation(
        ranked=tuple(
            Ranked(p, compared(p, ranked[0], profile, cluster) if place else reason(p, profile, cluster))
            for place, p in enumerate(ranked)
        ),
        rejected=tuple(rejected),
        single=search.single,
        note=one_device(search.single, ranked[0], runner_up) if ranked else "nothing fits",
        considered=search.considered,
        simulated=search.simulated,
        left=len(search.left),
        floor_s=min(map(search.bounds.seconds, search.left), default=None),
        seconds=time.perf_counter() - started,
        batch=batch,
        profile=profile,
        cluster=cluster,
    )


class _Search:
    """The state of one search: what was simulated, and the best of every shape."""

    def __init__(self, profile: Profile, cluster: Cluster, batch: int, top: int) -> None:
        self.profile, self.cluster, self.batch, self.top = profile, cluster, batch, top
        self.tables = Tables(profile)
        self.bounds = Bounds(self.tables, cluster, batch)
        self.limit = usable(cluster)
        self.known: dict[tuple[Plan, int], Prediction] = {}  # (sketch, batch) → what was predicted for it
        self.best: dict[Shape, Prediction] = {}  # that fits
        self.worst: dict[Shape, Prediction] = {}  # of shapes that do not: the least over
        self.too_big: dict[Shape, Plan] = {}  # not simulated: their bytes alone are beyond the limit
        self.last: float | None = None  # seconds of the last place in the table; None: to be worked out again
        self.considered = 0
        self.left: list[Plan] = []  # that might have been among the best when the search stopped

    def run(self, progress: Progress) -> None:
        plans = list(sketches(len(self.profile.blocks), self.cluster, self.batch, self.profile.has_halves))
        self.considered = len(plans)
        order = sorted((for_memory(p), self.bounds.likely(p), place) for place, p in enumerate(plans))
        self.single = self.predict(plans[0])
        # A shape that gets faster may join a group, and then there is room for one that was passed over: look again.
        while self._simulate(plans, order, progress):
            pass
        self._share_out()
        self._offload()
        self.simulated = len(self.known)

    def _simulate(self, plans: list[Plan], order: list[tuple[bool, float, int]], progress: Progress) -> bool:
        """Whether there were any that may still come among the first."""
        before, self.left = len(self.known), []
        for count, (saving, _, place) in enumerate(order):
            sketch = plans[place]
            beaten = self._beaten(sketch)
            if (sketch, self.batch) in self.known or (saving and shape_of(sketch) in self.best):
                continue
            if self.bounds.seconds(sketch) >= beaten:
                continue
            if self.bounds.bytes(sketch) > self.limit:
                self._file_too_big(sketch)
                continue
            if self.bounds.when_cut(sketch) >= beaten:
                continue
            if len(self.known) >= MOST_SIMULATED:
                self.left.append(sketch)
                continue
            self.predict(sketch)
            progress(f"{len(self.known)} plans simulated", count / len(order))
        return len(self.known) > before

    def _share_out(self) -> None:
        """Where memory asks for it, replicas share out their states, by as little as fits; and those that would be the
        fastest if they gained all that there is to gain, where stepping a share of the weights may be faster."""
        over = [*self.too_big.values(), *(replace(p.plan, stages=()) for p in self.worst.values())]
        left = MOST_SHARED
        for sketch in sorted((s for s in over if shape_of(s) not in self.best), key=self.bounds.likely):
            for shared in shared_out(sketch):
                if self.bounds.bytes(shared) > self.limit or self.bounds.likely(shared) >= self._beaten(shared):
                    continue
                left -= 1
                if left < 0 or self.predict(shared).fits:
                    break
        update = self.profile.update_s(0, len(self.profile.blocks))
        gains = [(update * (1 - 1 / p.plan.dp) / p.plan.pp, p) for p in self._standing() if not p.plan.zero]
        likely = sorted((p.step_s - most, place) for place, (most, p) in enumerate(gains) if most > HARDLY * p.step_s)
        for p in [gains[place][1] for _, place in likely[:SHARED]]:
            for shared in shared_out(replace(p.plan, stages=(), exchange="all-reduce", node=0), (1,)):
                self.predict(shared)

    def _offload(self) -> None:
        """The last resort, where nothing fits: what passes save goes to the hosts, as far as need be."""
        if self.best:
            return
        over = [*self.too_big.values(), *(replace(p.plan, stages=()) for p in self.worst.values())]
        left = MOST_OFFLOADED
        for sketch in sorted(over, key=self.bounds.likely):
            for away in sent_away(sketch):
                if self.bounds.bytes(away) > self.limit:
                    continue
                left -= 1
                if left < 0 or self.predict(away).fits:
                    break

    def predict(self, sketch: Plan, batch: int | None = None) -> Prediction:
        batch = batch or self.batch
        key = (sketch, batch)
        if key not in self.known:
            found = self.known[key] = draft(sketch, self.cluster, batch, self.tables)
            if batch == self.batch:
                self._file(found)
        return self.known[key]

    def _file(self, found: Prediction) -> None:
        shape = shape_of(found.plan)
        if found.fits:
            if shape not in self.best or found.step_s < self.best[shape].step_s:
                self.best[shape], self.last = found, None
        elif shape not in self.worst or found.peak_bytes < self.worst[shape].peak_bytes:
            self.worst[shape] = found

    def _file_too_big(self, sketch: Plan) -> None:
        """Of those that need not be simulated, the one nearest to fitting stands for its shape."""
        known = self.too_big.setdefault(shape_of(sketch), sketch)
        if not for_memory(sketch) and self.bounds.bytes(sketch) < self.bounds.bytes(known):
            self.too_big[shape_of(sketch)] = sketch

    def _standing(self) -> list[Prediction]:
        """The best of every shape, fastest first; with recomputation only where that is not slower than without."""
        found = []
        for (dp, pp, schedule, recompute), p in self.best.items():
            plain = self.best.get((dp, pp, schedule, "none"))
            if recompute == "none" or plain is None or p.step_s < plain.step_s:
                found.append(p)
        return sorted(found, key=lambda p: p.step_s)

    def _beaten(self, sketch: Plan) -> float:
        """A plan that takes as long is of no interest: its shape has a better one, or `top` others are faster."""
        dp, pp, schedule, recompute = shape_of(sketch)
        own = [self.best.get((dp, pp, schedule, recompute)), self.best.get((dp, pp, schedule, "none"))]
        times = [p.step_s for p in own if p is not None]
        if self.last is None:
            last = groups(self._standing(), self.cluster.world)[self.top - 1 : self.top]
            # One that is hardly slower than the first of the last group may stand for it.
            self.last = last[0][0].step_s * (1 + HARDLY) if last else float("inf")
        return min([*times, self.last])

    def ranked(self) -> list[Prediction]:
        """The best of the best shapes that differ in kind, refined."""
        left = ("stages", "bucket", "exchange")
        best = shown(groups(self._standing(), self.cluster.world))[: self.top]
        refined = list[Prediction]()
        for p in best:
            # Behind the winner a gain must be worth a row, and what is far behind stays there.
            behind = (p.step_s / refined[0].step_s - 1) if refined else 0.0
            gain = max(HARDLY, behind - FAR) if refined else NOTHING
            chosen = refine(p, left, self.cluster, self.batch, self.tables, gain)
            refined.append(brought(chosen, self.cluster, self.batch, self.tables))
        return sorted(refined, key=lambda p: p.step_s)

    def rejected(self, fastest: float) -> list[Rejected]:
        """What does not fit, a row for each number of stages and order of work, on as many devices as there are.

        One stage (what everybody tries first) is always among them. Those that would have been faster than the winner
        come first, then those that are least over.
        """
        sketches_of: dict[tuple[int, str], list[Plan]] = {}
        for shape in (self.worst.keys() | self.too_big.keys()) - self.best.keys():
            sketch = self.worst[shape].plan if shape in self.worst else self.too_big[shape]
            sketches_of.setdefault((sketch.pp, sketch.schedule), []).append(sketch)
        plainest = [
            max(group, key=lambda p: (not p.zero, p.recompute == "none", p.dp)) for group in sketches_of.values()
        ]
        plainest.sort(
            key=lambda p: (p.pp > 1, self.bounds.seconds(p) >= fastest, self.bounds.bytes(p), p.pp, p.schedule)
        )
        shown = [self.worst.get(shape_of(p)) or self.predict(p) for p in plainest[:REJECTED]]
        shown.sort(key=lambda p: (p.step_s >= fastest, p.peak_bytes / p.limit_bytes))
        return [self._reject(p) for p in shown]

    def _reject(self, p: Prediction) -> Rejected:
        def attempt(sketch: Plan, batch: int) -> Prediction | None:
            if batch == self.batch and self.bounds.bytes(sketch) > self.limit:
                return None
            try:
                return self.predict(sketch, batch)
            except PlanError:
                return None

        return Rejected(p, overfull(p), smallest_change(p, self.cluster.world, attempt))
