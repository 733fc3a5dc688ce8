"""What a plan cannot beat, without simulating it: so that most plans need not be.

A step takes at least the compute of its busiest rank. With p stages and m micro-batches that take T seconds through
all stages, and M seconds through the slowest stage of the best partition there is:

    one stage             Σ T                                 micro-batches go through one after the other
    naive                 max(Σ T, m M)
    several stages        Σ T / p                             all ranks compute all the time
    gpipe                 T + (m - 1) M                       one passes everything, the slowest stage works m times
    1f1b, 1f1b-early      max(m M, T / (1 - (1 - 1/m)^p))
    backward in two parts                                     nothing, before it is cut

(T and M of the smallest micro-batch, where they are of different sizes.)

For 1f1b: stage s cannot start before the stages ahead of it, nor end later than they need to finish, so
V ≥ T_before(s) + m t(s) for every s; the t(s) that meet all of these with equality add up to V (1 - (1 - 1/m)^p).
Where stages recompute, M counts the second forward and T does not: a stage may do it while it waits. All of it takes
longer where devices of a node compute at once: how many at least is known before (`predict/contention.py`).
Communication only adds. Bytes have a bound too: states and activations of all stages, shared out evenly.

Cutting is quick, beside simulating; so what these leave is cut, and `solve/least.py` says what it takes at least then.
"""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.plan.rules import SPLIT_BACKWARD, split
from trainplan.predict.contention import Contention, at_least
from trainplan.predict.speeds import speeds
from trainplan.solve.least import Least
from trainplan.solve.limits import usable
from trainplan.solve.partition.bottleneck import bottleneck, slowest
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import cuts


class Bounds:
    """Bounds for one model, cluster and batch; what several plans share is worked out once."""

    def __init__(self, tables: Tables, cluster: Cluster, batch: int) -> None:
        self.tables, self.cluster, self.batch = tables, cluster, batch
        self.limit = usable(cluster)
        self._slowest: dict[tuple[int, int, str], float] = {}
        self._company: dict[tuple[int, int], Contention] = {}
        self._fastest = max(speeds(tables.profile, cluster))
        self._accumulate = sum(block.accumulate_s for block in tables.profile.blocks)
        self._update = tables.profile.update_s(0, len(tables.profile.blocks))

    def seconds(self, sketch: Plan) -> float:
        """A step of any plan with this sketch takes at least as long."""
        sizes, micro = self._sizes(sketch), sketch.micro
        if sketch.pp == 1:
            compute = self._whole(sizes, sketch.recompute)
            return (compute + (micro - 1) * self._accumulate + self._update) * self._slowed(sketch)
        if sketch.schedule in SPLIT_BACKWARD:
            return 0.0
        through, stage = self._through(sizes[-1], "none"), self._stage(sketch, sizes[-1])  # the smallest
        whole = self._whole(sizes, "none")
        compute = whole / sketch.pp
        if sketch.schedule == "naive":
            compute = max(whole, micro * stage)
        elif sketch.schedule == "gpipe":
            compute = max(compute, through + (micro - 1) * stage)
        elif sketch.schedule in ("1f1b", "1f1b-early"):
            compute = max(compute, micro * stage, through / (1 - (1 - 1 / micro) ** sketch.pp))
        return compute * self._slowed(sketch)

    def when_cut(self, sketch: Plan) -> float:
        """The same of the sketch as it would be cut."""
        if sketch.pp == 1:
            return self.seconds(sketch)
        least = Least(sketch, self.cluster, self.batch, self.tables)
        return least(cuts(sketch, self.cluster, self.batch, self.tables, self.limit))

    def likely(self, sketch: Plan) -> float:
        """About what a step takes, with equal stages: no bound, but an order in which to look."""
        sizes, p = self._sizes(sketch), sketch.pp
        through = self._whole(sizes, sketch.recompute) / sketch.micro
        idle = {"naive": (p - 1) * sketch.micro, "gems": (p - 1) * sketch.micro * 2 / 3}.get(sketch.schedule)
        if idle is None:
            idle = (p - 1) / sketch.chunks / (2 if sketch.lines > 1 or sketch.schedule in SPLIT_BACKWARD else 1)
        slowed = self._contention(sketch).about(sketch.micro / (sketch.micro + idle)) / self._fastest
        return (sketch.micro + idle) * through / p * slowed

    def bytes(self, sketch: Plan) -> float:
        """The worst rank of any plan with this sketch needs at least as much."""
        ranges = self.tables.at(min(self._sizes(sketch)), sketch.recompute)
        held = sketch.micro if sketch.schedule in ("gpipe", "looped") else 1
        # Before the first backward pass the gradients are not there, unless buckets keep them; after it one
        # micro-batch less is, unless the next ones come only then.
        before = self.tables.states if sketch.dp * sketch.lines > 1 else self.tables.lasting
        still = held - 1 if held == sketch.micro else held
        if sketch.offload != "none":
            held = still = 0  # nobody knows before how much of it goes away
        if sketch.chunks > 1:
            still = 0  # the other stages of a rank have no gradients yet
        share = sketch.sharers if sketch.zero else 1  # at the best everything is shared out
        needs = (before[0, -1] / share, held * ranges.kept), (self.tables.states[0, -1] / share, still * ranges.kept)
        copies = sketch.lines if sketch.pp % 2 == 0 else 1  # of all weights; a rank in the middle needs one for both
        return float(max(copies * states + own for states, own in needs)) / sketch.pp

    def _through(self, size: int, recompute: str) -> float:
        return self.tables.at(size, recompute).through

    def _whole(self, sizes: tuple[int, ...], recompute: str) -> float:
        """All micro-batches, one after the other: they have one size, or two."""
        larger = sizes.count(sizes[0])
        least = self._through(sizes[-1], recompute) if larger < len(sizes) else 0.0
        return larger * self._through(sizes[0], recompute) + (len(sizes) - larger) * least

    def _sizes(self, sketch: Plan) -> tuple[int, ...]:
        return split(split(self.batch, sketch.dp)[0], sketch.micro)

    def _stage(self, sketch: Plan, size: int) -> float:
        key = sketch.pp, size, sketch.recompute
        if key not in self._slowest:
            times = self.tables.at(size, sketch.recompute).seconds
            best = bottleneck(times, sketch.pp)
            assert best is not None  # without a limit there is always one
            self._slowest[key] = slowest(times, best)
        return self._slowest[key]

    def _slowed(self, sketch: Plan) -> float:
        """How much longer compute takes at least: devices of a node compute at once, and may be of another kind."""
        return self._contention(sketch).least / self._fastest

    def _contention(self, sketch: Plan) -> Contention:
        key = sketch.dp, sketch.pp
        if key not in self._company:
            self._company[key] = at_least(sketch, self.cluster, self.batch)
        return self._company[key]
