"""From a request to a plan: whatever was left open is chosen, and the choice is explicit afterwards.

    shape    replicas, stages, order of work            by rule (shape.py)
    micro    micro-batches                              by simulating a few
    stages   where to cut                               by the solver that `partition` names; where it names none:
                                                        exact bottleneck partition within the memory limit, and from
                                                        there by simulating others: all of them where they are few,
                                                        else one cut moved by one block as long as that is faster
    ratio    samples of replicas on unlike devices      as fast as each is (ratio.py)
    bucket   gradients that travel together             by simulating a few sizes (exchange.py)
    exchange how they are summed over replicas          by the backend; a search also simulates others (exchange.py)
    …        its numbers, where it is decided in a run  by simulating a few (decided.py)

What the simulator decides here is what it predicts afterwards, so a plan is never chosen by another model than the one
that it is judged by.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.keys import SPLIT, most_servers
from trainplan.plan.offload import Away
from trainplan.plan.order import known
from trainplan.plan.plan import Plan, Request, open_fields
from trainplan.plan.text import brief, settled
from trainplan.predict.planned import planned
from trainplan.predict.predict import Prediction, predict
from trainplan.predict.speeds import speeds
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend
from trainplan.solve.decided import begun, check_numbers, tuned
from trainplan.solve.exchange import FASTER, check_bucket, distinct_sizes, on_nodes, other_exchanges, whole_bucket
from trainplan.solve.least import Least
from trainplan.solve.limits import limited, usable
from trainplan.solve.offload import offloaded, refuse_too_little
from trainplan.solve.partition.bottleneck import bottleneck, least_limit
from trainplan.solve.partition.choice import counts, partitioned, refuse
from trainplan.solve.partition.instance import instance, on
from trainplan.solve.partition.ranges import Tables, in_flight
from trainplan.solve.partition.uneven import elasticpipe
from trainplan.solve.ratio import balanced
from trainplan.solve.shape import micro_counts, shape
from trainplan.solve.slices import slicings

SLACKS = (0.05, 0.25)  # how much slower the slowest stage may be for the sake of less traffic
NOTHING = 1e-3  # a gain that no prediction is good enough to promise
FEW_CUTS = 64  # ways to cut that are all looked at; where there are more, only those one move away
MOST_SIMULATED = 24  # cuts of one plan
PATIENCE = 6  # of them that may bring nothing, one after the other
Bound = Callable[[tuple[int, ...]], float]  # cuts → seconds of a step, at least
_REPAIRS = 4  # times that the limit is tightened when the estimate of a stage's bytes was too low


def resolve(request: Request, profile: Profile, cluster: Cluster, batch: int, tables: Tables | None = None) -> Plan:
    """The plan that a request stands for on this model, cluster and batch. `tables` may be shared between calls."""
    return solve(request, profile, cluster, batch, tables).plan


def solve(request: Request, profile: Profile, cluster: Cluster, batch: int, tables: Tables | None = None) -> Prediction:
    """The plan, with the prediction by which it was chosen."""
    cluster, tables = limited(cluster, request.memory), tables or Tables(profile)
    request = settled(request, f"plan {brief(request)!r}")
    check_bucket(request, profile)
    check_numbers(request, profile, cluster.world)
    if request.partition is not None:
        refuse(request)
    a_node = len(cluster.nodes[0].devices)
    keys = most_servers([p.count for p in profile.parameters if p.trainable], request.split or SPLIT)
    sketch = shape(request, len(profile.blocks), cluster.world, batch, a_node, keys)
    sketch = on_nodes(sketch, request.node, cluster)
    sketch = begun(sketch, request, profile, cluster, batch)
    if planned(sketch, profile, cluster) is not profile:  # ranks share blocks, or compute in another precision
        profile = planned(sketch, profile, cluster)
        tables = Tables(profile)
    left = open_fields(request)
    if request.partition is not None:
        return _by_name(request, sketch, cluster, batch, tables)
    count = request.slices if isinstance(request.slices, int) else None
    few, many = [sketch.micro], list[int]()
    if "micro" in left and (sketch.pp > 1 or sketch.key == "accumulate"):
        few, many = micro_counts(sketch, batch)
    found = best([draft(replace(sketch, micro=micro), cluster, batch, tables, count) for micro in few])
    for micro in many:
        if found.fits:
            break
        found = best([found, draft(replace(sketch, micro=micro), cluster, batch, tables, count)])
    # Who asks for replicas and not for an exchange gets the backend's.
    # Who says what goes away says it of certain stages, so these stay as they are; sections are blocks in any bucket.
    may = ("bucket",) if request.away is not None else [field for field in left if field != "exchange"]
    found = refine(found, [field for field in may if field in left], cluster, batch, tables, away=request.away or ())
    if request.away is None:
        refuse_too_little(found, f"plan {brief(request)!r}")
    return tuned(found, request, profile, lambda trial: _predict(trial, cluster, batch, tables), best)


def _by_name(request: Request, sketch: Plan, cluster: Cluster, batch: int, tables: Tables) -> Prediction:
    """The best of what the named solver answers, with its cuts."""
    few, many = counts(request, sketch, cluster.world, batch)
    found, refused = None, list[PlanError]()
    for count in few + many:
        if count not in few and found is not None and found.fits:
            break
        try:
            plan = partitioned(request, replace(sketch, micro=count), cluster, batch, tables)
            trial = draft(plan, cluster, batch, tables, request.slices if isinstance(request.slices, int) else None)
        except PlanError as error:
            refused.append(error)
            continue
        found = trial if found is None else best([found, trial])
    if found is None:
        raise refused[0]
    return refine(found, () if request.bucket is not None else ("bucket",), cluster, batch, tables)


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest that fits; where none does, the one that is least over. The first of those that hardly differ."""
    found = predictions[0]
    for trial in predictions[1:]:
        if found.fits:
            better = trial.step_s < found.step_s * (1 - NOTHING) and trial.fits
        else:
            better = trial.fits or trial.fullness < found.fullness
        found = trial if better else found
    return found


def draft(sketch: Plan, cluster: Cluster, batch: int, tables: Tables, slices: int | None = None) -> Prediction:
    """A first plan from a sketch: cut into balanced stages that fit, where it is not cut yet; and its sequences into
    (so many) slices, where the order of work wants them. Buckets are no larger than the model. Replicas on unlike
    devices have as many samples as they are fast; or equally many, where that does not fit."""
    ratio = () if sketch.ratio else balanced(sketch, tables.profile, cluster, batch)
    if ratio:
        uneven = draft(replace(sketch, ratio=ratio), cluster, batch, tables, slices)
        if uneven.fits:
            return uneven
        return best([uneven, draft(replace(sketch, ratio=(1,) * sketch.dp), cluster, batch, tables, slices)])
    sketch = replace(sketch, bucket=min(sketch.bucket, whole_bucket(tables.profile)))
    if sketch.pp > 1 and not sketch.stages:
        sketch = replace(sketch, stages=cuts(sketch, cluster, batch, tables, _room(sketch, cluster)))
    if sketch.schedule == rules.SLICED and sketch.pp > 1 and not sketch.slices:
        ways = slicings(sketch, slices, tables.profile, cluster, batch)
        return best([_predict(replace(sketch, slices=way), cluster, batch, tables) for way in ways])
    return _predict(sketch, cluster, batch, tables)


def refine(
    found: Prediction, left: Collection[str], cluster: Cluster, batch: int, tables: Tables, gain: float = NOTHING,
    away: Away = (), least: Bound | None = None,
) -> Prediction:  # fmt: skip
    """The best of a plan and those with other cuts, buckets and exchanges, where these were left open and may gain that
    share. `away`: what goes away in any case; `least`: seconds that it takes at least with other cuts."""
    if "stages" in left and found.plan.pp > 1:
        found = _recut(found, cluster, batch, tables, gain, least or _anything)
    # Buckets hide communication; where there is next to nothing to hide, others are no better. But whole gradients, or
    # weights, that come and go bucket by bucket take less memory in smaller ones.
    buckets = "bucket" in left and found.plan.replicated and found.plan.exchange not in rules.DECIDED
    if buckets and (found.exposed_comm_s > gain * found.step_s or (found.plan.zero > 1 and not found.fits)):
        sizes = distinct_sizes(found.plan, tables.profile, cluster, batch, found.plan.bucket)
        trials = [_predict(_other(found.plan, away, bucket=size), cluster, batch, tables) for size in sizes]
        found = best([found, *trials])
    if "exchange" in left and found.exposed_comm_s > gain * found.step_s:
        for other in other_exchanges(found.plan, tables.profile, cluster):
            open_ = "bucket" in left
            sizes = distinct_sizes(other, tables.profile, cluster, batch) if open_ else [other.bucket]
            fastest = best([_predict(_other(other, bucket=size), cluster, batch, tables) for size in sizes])
            if fastest.step_s < found.step_s * (1 - FASTER) and fastest.fits >= found.fits:
                found = fastest
    return found


def _anything(cuts: tuple[int, ...]) -> float:
    """The bound of cuts of which nothing is known."""
    return 0.0


def _recut(
    found: Prediction, cluster: Cluster, batch: int, tables: Tables, gain: float, least: Bound
) -> Prediction:  # fmt: skip
    def trial(limit: float, slack: float = 0.0) -> tuple[int, ...]:
        return cuts(found.plan, cluster, batch, tables, limit, slack)

    limit = _room(found.plan, cluster)
    for _ in range(_REPAIRS):
        if found.fits:
            break
        limit -= found.over_bytes
        found = best([found, _predict(_other(found.plan, stages=trial(limit)), cluster, batch, tables)])
    others = {trial(limit, slack) for slack in SLACKS} - {found.plan.stages}
    found = best([found, *(_predict(_other(found.plan, stages=c), cluster, batch, tables) for c in sorted(others))])
    known = others | {found.plan.stages}
    return _moved(found, known, cluster, batch, tables, gain, least) if found.fits else found


def _moved(
    found: Prediction, known: set[tuple[int, ...]], cluster: Cluster, batch: int, tables: Tables, gain: float,
    closer: Bound,
) -> Prediction:  # fmt: skip
    """The best by the clock of the cuts around those that were found, or of all where they are few.

    Cuts whose busiest stage alone takes longer than the best step so far need no simulation: most of them. Those of
    which a closer bound says so are tried in vain, but not simulated either.
    """
    plan, simulated, in_vain = found.plan, 0, 0
    bound = Least(plan, cluster, batch, tables)
    stages = plan.wanted
    few = math.comb(plan.blocks - 1, stages - 1) <= FEW_CUTS
    while True:
        around = itertools.combinations(range(1, plan.blocks), stages - 1) if few else _one_move(found.plan)
        before = found
        for least, trial in sorted((bound(trial), trial) for trial in set(around) - known):
            if simulated == MOST_SIMULATED or in_vain == PATIENCE or least >= found.step_s * (1 - gain):
                break
            simulated, in_vain = simulated + 1, in_vain + 1
            known.add(trial)
            if closer(trial) >= found.step_s:
                continue
            better = best([found, _predict(_other(plan, stages=trial), cluster, batch, tables)])
            found, in_vain = better, 0 if better is not found else in_vain
            if found is not before and not few:
                break  # go on from there
        if few or found is before:
            return found


def _one_move(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The cuts that differ from a plan's by one block at one place."""
    edges = (0, *plan.stages, plan.blocks)
    for place in range(1, len(edges) - 1):
        for cut in (edges[place] - 1, edges[place] + 1):
            if edges[place - 1] < cut < edges[place + 1]:
                yield (*plan.stages[: place - 1], cut, *plan.stages[place:])


def _room(plan: Plan, cluster: Cluster) -> float:
    """Bytes that stages may take when a model is cut: where what is too much goes away, that is no matter of cuts."""
    return math.inf if plan.offload == "activations" else usable(cluster)


def _other(plan: Plan, away: Away = (), **changes: Any) -> Plan:
    """A plan in which something is different; how much it offloads is then to be found out again, unless it is said."""
    return replace(plan, away=away, **changes)


def _predict(plan: Plan, cluster: Cluster, batch: int, tables: Tables) -> Prediction:
    rules.check(plan, batch, cluster.world)
    foresee = offloaded if plan.offload == "activations" and not plan.away else predict
    return foresee(plan, tables.profile, cluster, batch)


def cuts(plan: Plan, cluster: Cluster, batch: int, tables: Tables, limit: float, slack: float = 0.0) -> tuple[int, ...]:
    """The bottleneck partition within a limit of bytes; where there is none, the one that needs the least memory."""
    local = max(rules.split(batch, plan.dp))
    samples = max(rules.split(local, plan.micro))
    ranges = tables.at(samples, plan.recompute)
    pace = ranges.pace(backend(cluster.backend).host_computes)
    stages = plan.wanted
    on_rank = Counter(rank for line in plan.placement[: plan.lines] for rank, *_ in line)
    shared = max(on_rank.values())
    pace_of = speeds(tables.profile, cluster)
    own = [pace_of[stage[0]] for stage in plan.placement[0]]
    # Stages with more ranks, faster ones, or fewer neighbours, take more.
    if plan.spread or min(on_rank.values()) < shared or len(set(own)) > 1:
        alone = [max(1 / on_rank[line[stage][0]] for line in plan.placement[: plan.lines]) for stage in range(stages)]
        shares = tuple(speed * count for speed, count in zip(own, plan.spread or alone, strict=True))
        return elasticpipe(on(instance(pace.tolist()), speeds=shares)).cuts
    held = known(plan.order).held if plan.order else in_flight(plan.schedule, stages, plan.micro)
    batch_bytes = tables.profile.input_bytes_per_sample * local

    def within(limit: float) -> tuple[int, ...] | None:
        # A rank with several stages has a share of the limit for each.
        # Mostly there is room for all, and then the cuts are those without a limit, which several plans share.
        key = stages, samples, plan.recompute, cluster.backend, slack
        if key not in tables.free:
            tables.free[key] = bottleneck(pace, stages, ranges.traffic, slack=slack) or ()
        if ranges.fits(tables.free[key], held, limit / shared, batch_bytes):
            return tables.free[key]
        return bottleneck(pace, stages, ranges.traffic, ranges.room(held, limit / shared, batch_bytes), slack)

    found = within(limit)
    if found is not None:
        return found
    low, high = 0.0, shared * float(ranges.fixed.max() + max(held) * ranges.each.max() + batch_bytes)
    least = least_limit(stages, ranges.room(held, 0.0, batch_bytes))
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle / shared >= least else (middle, high)
    return within(high) or ()
