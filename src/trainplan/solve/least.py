"""How long a step takes at least where a plan is cut so: what needs no simulation to be ruled out.

With t(s) the seconds of a micro-batch on stage s, T(s) those of all stages before s, m micro-batches, and w(r) the sum
of t over the stages of rank r:

    naive                   m · Σ t                                   micro-batches go through one after the other
    gpipe                   Σ t + (m − 1) · max over s of  t(s)       one passes everything, the slowest works m times
    gems                    Σ forward + m · Σ backward                one goes back through all before the next one can
    chimera                 max over r of  T(r) + m/2 · (t(r) + t(p − 1 − r))           r in the first half
    backward in two parts   m · max over r of  w(r)
    all others              max over r of  T(r) + m · w(r)

For the last: rank r cannot start before the stages ahead of its first, and what it does last must go back through
them. In two directions ranks r and p − 1 − r share both stages, so one of them does at least half. Gradients of the
weights can be left for the time in which the next step has begun already, so of zero-bubble orders only a rank's own
work is certain.

Where stages recompute, T does not count the second forward: a stage may do it while it waits. The host that issues
work is never faster than it is. Communication only adds.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan, usual_placement
from trainplan.plan.rules import SPLIT_BACKWARD, of_replicas
from trainplan.predict.contention import at_least
from trainplan.predict.speeds import speeds
from trainplan.program.lower.backend import backend
from trainplan.solve.partition.instance import Floats
from trainplan.solve.partition.ranges import Tables

_IN_TURN = ("gpipe", "looped", "1f1b", "1f1b-early", "interleaved")


class Least:
    """Least seconds of one plan by its cuts."""

    def __init__(self, plan: Plan, cluster: Cluster, batch: int, tables: Tables) -> None:
        self.plan, self.cluster, self.tables = plan, cluster, tables
        self.size = max(of_replicas(plan, batch)) // plan.micro
        usual = plan.lines == 1 or plan.placement == usual_placement(plan)
        # Compute takes longer beside others of the node; not so the host that issues it.
        self.slowed = at_least(plan, cluster, batch).least if cluster.contention or cluster.spread else 1.0
        self.known = usual and not plan.spread and not plan.order and not plan.slices

    def __call__(self, cuts: tuple[int, ...]) -> float:
        plan, micro = self.plan, self.plan.micro
        if not self.known:  # ranks share a stage, or slices go through, in some way of its own
            return 0.0
        first = [0, *cuts]
        own, host, once = (np.add.reduceat(column, first) for column in (self._run, self._issue, self._through))
        if plan.lines > 1:
            return self._two_directions(own, once)
        _, entry, rank = np.unique([s[0] for s in plan.placement[0]], return_index=True, return_inverse=True)
        if plan.schedule in SPLIT_BACKWARD:
            # Where no gradient goes back from the first block of a stage, its backward may be whole.
            parts = np.add.reduceat(self._in_parts, first)
            own = np.where(self.tables.reads_grad[first], parts, np.minimum(parts, own))
            return float(micro * np.bincount(rank, weights=own).max())
        work, issued = (np.bincount(rank, weights=column) for column in (own, host))
        busiest = micro * float(max(work.max(), issued.max()))
        if plan.schedule == "naive":
            return max(micro * float(once.sum()), busiest)
        if plan.schedule not in _IN_TURN:
            return busiest
        if plan.schedule == "gpipe":
            busiest = max(busiest, float(once.sum() + (micro - 1) * own.max()))
        ahead = np.cumsum(once) - once
        return max(float((ahead[entry] + micro * work).max()), busiest)

    def _two_directions(self, own: Floats, once: Floats) -> float:
        plan, micro = self.plan, self.plan.micro
        if plan.schedule == "gems":
            forward = float(self._forward.sum())
            return forward + micro * (float(once.sum()) - forward)
        half = plan.pp // 2
        ahead = (np.cumsum(once) - once)[:half]
        both = (own + own[::-1])[:half]
        even = micro * float(own.sum()) / plan.pp
        return even if plan.pairs > 1 else max(float((ahead + micro / 2 * both).max()), even)

    @cached_property
    def _fastest(self) -> float:
        return max(speeds(self.tables.profile, self.cluster))

    @cached_property
    def _joint(self) -> bool:
        return backend(self.cluster.backend).host_computes

    @property
    def _recompute(self) -> str:
        """Of every micro-batch, for certain: where one is left out, it may be any."""
        return "full" if self.plan.recompute == "full" else "none"

    @cached_property
    def _run(self) -> Floats:
        """Seconds of a micro-batch in each block, with what is recomputed."""
        return self._pace(self._recompute)

    @cached_property
    def _through(self) -> Floats:
        return self._pace("none")

    def _pace(self, recompute: str) -> Floats:
        ranges = self.tables.at(self.size, recompute)
        return (ranges.seconds * self.slowed + ranges.issue * self._joint) / self._fastest

    @cached_property
    def _forward(self) -> Floats:
        ranges = self.tables.at(self.size)
        return (ranges.forward * self.slowed + ranges.forward_issue * self._joint) / self._fastest

    @cached_property
    def _in_parts(self) -> Floats:
        return self._forward + self.tables.at(self.size).backward_parts * self.slowed / self._fastest

    @cached_property
    def _issue(self) -> Floats:
        return self.tables.at(self.size, self._recompute).issue / self._fastest
