"""Which plans have a place in the table, and which differ so little that one of them stands for all.

A shape has one row: of its plans the best, or one that is hardly worse; of those that do not differ the plainest.
Recomputation is worth a row where the same plan is not better without. Orders of work that are the same program with so
many ranks and micro-batches (Chimera's two) are one row, under the first of their names.

Thirteen, fourteen and fifteen replicas of a batch of 64 take the same time, since the largest share of the batch is
five samples in each: three rows would say one thing. Plans are of one kind where they differ in nothing but the number
of replicas. Of those of one kind whose times hardly differ, that with the fewest devices stands for all. Two are shown
in any case: the fastest of all, and plans that use every device, which is what people try first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from trainplan.plan.plan import WORDS, Plan
from trainplan.predict.predict import Prediction
from trainplan.program.schedules import orders_of
from trainplan.search.space import Shape, plain_shape, shape_of
from trainplan.solve.resolve import NOTHING

if TYPE_CHECKING:
    from trainplan.search.objective import Objective

HARDLY = 0.01  # a difference of time that is not worth a row
Kind = tuple[object, ...]
Value = Callable[[Prediction], float]


def _seconds(p: Prediction) -> float:
    return p.step_s


def kind(p: Prediction, world: int) -> Kind:
    """What plans have in common that differ in the number of their replicas only."""
    plan = p.plan
    served = plan.exchange if plan.servers else ""
    return plan.pp, plan.schedule, plan.recompute, plan.tp, plan.sequence, plan.spread, served, plan.world == world


def groups(ordered: Sequence[Prediction], world: int, value: Value = _seconds) -> list[list[Prediction]]:
    """Plans, best first, put together where they are of one kind and hardly worse than the first of their group."""
    found: list[list[Prediction]] = []
    latest: dict[Kind, list[Prediction]] = {}
    for p in ordered:
        group = latest.get(kind(p, world))
        if group is None or value(p) > value(group[0]) * (1 + HARDLY):
            group = latest[kind(p, world)] = []
            found.append(group)
        group.append(p)
    return found


def shown(grouped: Sequence[Sequence[Prediction]]) -> list[Prediction]:
    """The best of all, and of each group the one with the fewest devices."""
    rows = [min(group, key=lambda p: p.plan.world) for group in grouped]
    fastest = [group[0] for group in grouped[:1]]
    return fastest + [row for row in rows if row not in fastest]


def same_program(a: Prediction, b: Prediction) -> bool:
    """Whether two plans differ in the name of their order of work only."""
    if a.step_s != b.step_s or a.peak_bytes != b.peak_bytes:
        return False
    return replace(a.plan, schedule="naive") == replace(b.plan, schedule="naive") and _order(a.plan) == _order(b.plan)


@lru_cache(maxsize=256)
def _order(plan: Plan) -> tuple[bytes, ...]:
    return tuple(own.tobytes() for own in orders_of(plan))


class Standing:
    """What was simulated, and who has a place: the best of every shape, by an objective. `meets`: whether a plan that
    fits meets what else was asked for.

    Whether a plan fits is known once torch's allocator is played on it, which takes as long as simulating it. So it is
    played only for those that would have the place of their shape (where one alone is asked for: that are better than
    all others); the rest is forgotten. Whoever has a place fits."""

    def __init__(
        self, objective: Objective, world: int, top: int, meets: Callable[[Prediction], bool] = lambda p: True
    ) -> None:
        self.objective, self.world, self.top, self.meets = objective, world, top, meets
        self.simulated = 0
        self.rows: dict[int, int] = {}  # of a plan that is kept, by its id, the row of the space
        self._fitting: list[Prediction] = []
        self._over: list[Prediction] = []
        self._best: dict[Shape, Prediction] = {}
        self._lowest: dict[Shape, float] = {}
        self._last: float | None = None  # the last place; None: to be worked out again

    def add(self, p: Prediction, row: int = -1) -> None:
        self.simulated += 1
        shape, value = shape_of(p.plan), self.objective.value(p)
        kept, lowest = self._best.get(shape), self._lowest.get(shape, float("inf"))
        takes = kept is None or self._better(p, kept)
        wanted = (takes or value < lowest) if self.top > 1 else value < self.best
        if p.tensors_fit and not (wanted and self.meets(p)):
            return  # whether it fits or not
        self.rows[id(p)] = row
        if not p.fits:
            self._over.append(p)
            return
        self._fitting.append(p)
        self._last = None
        self._lowest[shape] = min(value, lowest)
        if takes:
            self._best[shape] = p

    def _better(self, p: Prediction, kept: Prediction) -> bool:
        value, before = self.objective.value(p), self.objective.value(kept)
        if abs(value - before) > NOTHING * before:
            return value < before
        return (_plain(p), value) < (_plain(kept), before)

    @property
    def fitting(self) -> list[Prediction]:
        return sorted(self._fitting, key=self.objective.value)

    @property
    def over(self) -> list[Prediction]:
        return sorted(self._over, key=lambda p: p.fullness)

    @property
    def best(self) -> float:
        """The value of the best plan; without end where there is none."""
        return min(self._lowest.values(), default=float("inf"))

    def standing(self) -> list[Prediction]:
        """The best of every shape, best first, without those that say what another says."""
        found = []
        for (*plain, recompute), p in self._best.items():
            without = self._best.get((*plain, "none"))
            if recompute == "none" or without is None or self.objective.value(p) < self.objective.value(without):
                found.append(p)
        found.sort(key=lambda p: (self.objective.value(p), WORDS["schedule"].index(p.plan.schedule)))
        alone: list[Prediction] = []
        for p in found:
            if not any(same_program(p, other) for other in alone):
                alone.append(p)
        return alone

    def shown(self) -> list[Prediction]:
        """The rows of the table."""
        return shown(groups(self.standing(), self.world, self.objective.value))[: self.top]

    @property
    def last(self) -> float:
        """A plan that is worse than this has no place any more."""
        if self._last is None:
            if self.top == 1:
                self._last = self.best
            else:
                last = groups(self.standing(), self.world, self.objective.value)[self.top - 1 : self.top]
                # One that is hardly worse than the first of the last group may stand for it.
                self._last = self.objective.value(last[0][0]) * (1 + HARDLY) if last else float("inf")
        return self._last

    def beaten(self, sketch: Plan, bound: float) -> bool:
        """Whether a plan with this bound is of no interest: all places are taken by better ones, or its shape has one
        that it can hardly beat. Whatever may be the best of all is of interest."""
        if bound < self.best:
            return False
        own = (shape_of(sketch), (*plain_shape(sketch), "none"))
        lowest = min(self._lowest.get(shape, float("inf")) for shape in own)
        return bound >= min(self.last, lowest * (1 - HARDLY))


def _plain(p: Prediction) -> tuple[int, ...]:
    """How much a plan does that is out of the ordinary."""
    plan = p.plan
    return plan.zero, plan.shard, plan.pairs, plan.chunks
