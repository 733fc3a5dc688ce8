"""Very many plans, best first: the best that fits, and proof that none is better.

Every plan of a space has a bound that it cannot beat (`floor.py`). The plan with the lowest bound is cut into stages,
which gives a closer bound and a closer look at its memory (`closer.py`); when a plan that is cut has the lowest bound
of all, it is simulated. A few that are likely to be fast are simulated before, so that there is something to beat.

As soon as the best that was found takes no longer than the lowest bound, no other can be better: the answer is that of
simulating everything. It goes on until that is so of the last place in the table, too: a plan is passed over where all
that have a place are better than its bound, or where it could hardly be better than another of its own shape. It stops
after so much work, and says what none of the others can beat: work is counted in passes of micro-batches through
stages, and not in seconds, so that the answer is the same on every machine.

On slow networks that does not come to an end: of pipelines over several nodes bounds say nothing of gradients, nor of
the card that a node's ranks share, so that thousands of plans may be faster and are not. Where half of the work has
proved nothing, a quarter goes to plans on one node, whose bounds are close, and to those on more of them, number by
number (so more devices are no worse than few); and half of the rest to those that are likely to be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trainplan.plan.plan import WORDS, Plan
from trainplan.predict.predict import Prediction
from trainplan.predict.speeds import speeds
from trainplan.program.program import Bools, Ints
from trainplan.search.closer import Closer
from trainplan.search.columns import FIELDS, Space
from trainplan.search.distinct import HARDLY, Standing
from trainplan.search.floor import Floats, Floors, floors
from trainplan.search.front import Front, smaller
from trainplan.search.likely import likely
from trainplan.search.objective import TIME, Objective
from trainplan.search.room import room
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import draft
from trainplan.uninterrupted import uninterrupted

Progress = Callable[[str, float], None]
WORK = 100_000  # passes that are simulated, all in all
_EACH = 200  # of them every plan costs, however small it is
_CUT = 8  # … and cutting one
_LONGER = 4  # times as much work, where nothing was found yet that fits
SEEDS = 8  # plans that are simulated first, of different shapes
_DEAR = 4  # so many of these would be all that may be simulated
_BEYOND = 1.25  # times as much work as was meant, where the last plan takes it
_NEAR = 0.1  # so much worse may be what is simulated in place of a plan that is much work
_FULL = WORDS["recompute"].index("full")
_LOWEST, _FEWER, _LIKELY = 0.5, 0.25, 0.125  # of the work: lowest bounds, fewer devices, likely ones; then bounds again
_ROOMY, _FULLER = 0.7, 0.95  # of its room a plan may take at least, to be likely to fit: before it is cut, and cut


@dataclass(frozen=True)
class Outcome:
    """What a search found, and what it did."""

    space: Space
    standing: Standing  # what may have a place in the table
    fitting: tuple[Prediction, ...]  # of those that were simulated, best first
    over: tuple[Prediction, ...]  # of those that were simulated and do not fit, least over first
    known: Floors
    too_big: int  # plans whose memory alone rules them out, before they were simulated
    left: int  # plans that might have a place, where the search stopped early; 0: none has
    better: int  # of these might be better than the best; 0: none is
    bound: float  # what no plan of the space that fits can beat, in units of the objective
    tables: Callable[[int], Tables]  # by row
    in_order: Callable[[int, tuple[int, ...]], float]  # by row and cuts: seconds of a step, at least

    @property
    def gap(self) -> float:
        """How much better than the best that was found the best plan may be, at most; 0: it is the best."""
        best = self.standing.objective.value(self.fitting[0]) if self.fitting else 0.0
        return 0.0 if not best else max(0.0, 1 - self.bound / best)


@uninterrupted()
def best_first(
    space: Space,
    top: int = 1,
    work: float = WORK,
    objective: Objective = TIME,
    progress: Progress = lambda words, share: None,
    meets: Callable[[Prediction], bool] = lambda p: True,
    possible: Callable[[Space, Floors], Bools] = lambda space, known: known.fits,
) -> Outcome:
    """The best plans of a space that fit and meet what else is asked for, after no more than so much work. `possible`:
    those that may, by their bounds."""
    known = floors(space)
    closer = Closer(space, known)
    standing = Standing(objective, space.cluster.world, top, meets)
    floor = objective.floor(space, known)
    order = np.flatnonzero(known.fits & np.isfinite(floor) & possible(space, known))
    order = order[np.argsort(floor[order], kind="stable")]
    everything = Front(order, floor[order])
    done, looked = set[int](), dict[int, float]()
    siblings = Siblings(space, closer)
    spent = 0.0

    def simulate(row: int, stages: tuple[int, ...]) -> None:
        nonlocal spent
        sketch = replace(space.sketch(row), stages=stages)
        spent += cost(sketch)
        done.add(row)
        p = draft(sketch, space.cluster, space.batch, closer.tables(row))
        standing.add(p, row)
        siblings.note(row, p)
        progress(f"{len(done)} plans simulated", min(1.0, spent / work))

    def look(row: int, stages: tuple[int, ...]) -> float:
        """A closer bound of a row that is cut, by the order of its passes; without end where it does not fit by it."""
        nonlocal spent
        if row not in looked:
            before = closer.cut_work
            fits = closer.fits(row, stages)
            seconds = closer.in_order(row, stages) if fits else np.inf
            looked[row] = objective.closer(space, row, seconds, closer.bytes[row]) if fits else np.inf
            spent += closer.cut_work - before
        return looked[row]

    def instead(bound: float, front: Front) -> tuple[int, tuple[int, ...]] | None:
        """Of those that are cut, the one with the lowest bound that is less work, likely to fit, and hardly worse than
        a plan with this bound."""
        near = min(standing.best, (1 + _NEAR) * bound)
        if standing.best <= (1 + HARDLY) * bound:
            return None
        for _, row, stages in sorted(each for each in front.cut if each[0] < near and each[1] not in done):
            less = spent + cost(space.sketch(row)) < work
            if less and look(row, stages) < near and likely_to_fit(row):
                return row, stages
        return None

    def likely_to_fit(row: int) -> bool:
        return closer.bytes[row] < _FULLER * (closer.room + closer.own)

    def try_out(row: int, sure: bool = False) -> None:
        """Simulate a row, unless it cannot be the best once it is cut. `sure`: nor where it hardly fits."""
        nonlocal spent
        before = closer.cut_work
        bound, stages = closer(row)
        spent += closer.cut_work - before
        if np.isfinite(bound) and look(row, stages) < standing.best and (not sure or likely_to_fit(row)):
            simulate(row, stages)

    def explore(front: Front, until: float) -> None:
        """Best first, until no other can have a place, or so much is spent. (Where some are left out: be the best.)"""
        nonlocal spent
        while True:
            lowest, enough = front.lowest, standing.last if front is everything else standing.best
            if lowest >= enough or spent >= (until if standing.best < np.inf else _LONGER * work):
                return
            if front.fresh:
                row = front.next()
                if row in done or standing.beaten(space.sketch(row), lowest):
                    continue
                before = closer.cut_work
                bound, stages = closer(row)
                spent += _CUT + closer.cut_work - before
                if np.isfinite(bound):
                    front.push((max(lowest, objective.closer(space, row, bound, closer.bytes[row])), row, stages))
                continue
            bound, row, stages = front.pop()
            if row in done:
                continue
            still = max(look(row, stages), objective.closer(space, row, siblings.least(row), 0.0))
            if still > bound:
                if still < np.inf:
                    front.push((still, row, stages))
                continue
            sketch = space.sketch(row)
            if standing.beaten(sketch, bound):
                continue
            price = cost(sketch)
            if price > work / _DEAR:
                # It would take most of what may be spent, and may not even fit: others that are nearly as good first.
                other = instead(bound, front)
                if other is not None:
                    front.push((bound, row, stages))
                    simulate(*other)
                    continue
                if spent + price > _BEYOND * work and standing.best < np.inf:
                    front.aside.append((bound, row))
                    continue
            simulate(row, stages)

    guess = np.full(len(space), np.inf)
    guess[order] = likely(space, known, order)
    for row in _seeds(space, guess, order, work):
        try_out(row)
    for row in _light(space, known, order, work) if standing.best == np.inf else ():
        if row not in done:
            try_out(row, sure=True)
        if standing.best < np.inf:
            break
    explore(everything, _LOWEST * work)
    if everything.lowest < standing.best < np.inf:
        fronts = smaller(space, order, floor[order])
        for front in fronts:
            explore(front, spent + _FEWER * work / len(fronts))
        about, until = objective.floor(space, replace(known, seconds=guess)), spent + _LIKELY * work
        for row in order[np.argsort(about[order], kind="stable")].tolist():
            if about[row] >= standing.best or spent >= until:
                break
            if row not in done and floor[row] < standing.best and cost(space.sketch(row)) < work / _DEAR:
                spent += _CUT
                try_out(row)
    explore(everything, work)
    lowest = min(everything.lowest, min(everything.aside, default=(np.inf, -1))[0])
    rest = everything.left(done)
    best = standing.best
    return Outcome(
        space,
        standing,
        tuple(standing.fitting),
        tuple(standing.over),
        known,
        int((~known.fits).sum()) + closer.too_big,
        int((rest < standing.last).sum()),
        int((rest < best).sum()),
        float(min(lowest, best)),
        closer.tables,
        closer.in_order,
    )


class Siblings:
    """Plans that differ in nothing but what their replicas share out compute the same, but for the optimizer's step and
    the adding up of gradients, which they share out, too. So of one of them that was simulated, what is left of its
    step if communication were free bounds the others. (Not where it matters who computes beside whom.)"""

    def __init__(self, space: Space, closer: Closer) -> None:
        self.space, self.closer = space, closer
        self.kept = [place for place, field in enumerate(FIELDS) if field not in ("zero", "shard")]
        self.apart = bool(space.cluster.contention or space.cluster.spread)
        self.known: dict[tuple[int, ...], float] = {}

    def note(self, row: int, p: Prediction) -> None:
        if self.apart or p.plan.dp == 1 or p.plan.zero:
            return
        profile = self.closer.tables(row).profile
        shared = profile.update_s(0, len(profile.blocks)) + sum(b.accumulate_s for b in profile.blocks)
        pace = min(speeds(profile, self.space.cluster))
        self.known[self._key(row)] = p.step_s - p.exposed_comm_s - shared / pace

    def least(self, row: int) -> float:
        """Seconds that a plan takes at least, by what is known of its siblings."""
        return self.known.get(self._key(row), 0.0)

    def _key(self, row: int) -> tuple[int, ...]:
        return tuple(self.space.rows[row, self.kept].tolist())


def cost(sketch: Plan) -> float:
    """About how much work it is to simulate a plan, in passes of a micro-batch through a stage."""
    # Passes come block by block where they are recomputed or gather weights, and in fewer pieces where they scatter.
    stage = sketch.blocks / sketch.pp / sketch.chunks
    by_block = sketch.zero == 3 or sketch.recompute in ("full", "except-last")
    pieces = max(1.0, stage if by_block else stage / 3 if sketch.zero == 2 else 1.0)
    ranks = sketch.dp * sketch.tp * sketch.pp  # of which one replica is played, but all have a place
    return _EACH + ranks / 8 + sketch.pp * sketch.chunks * sketch.micro * pieces


def _seeds(space: Space, guess: Floats, order: Ints, work: float) -> list[int]:
    """Rows that are likely to be fast, of different numbers of replicas and stages, as far as they are little work; and
    before them one device, which every answer says something about."""
    few = np.append(order[space.ranks[order] == 1][:1], order[np.argsort(guess[order], kind="stable")[: 50 * SEEDS]])
    return _of_each_shape(space, few, ("dp", "tp", "pp", "spread"), work / (4 * SEEDS))


def _light(space: Space, known: Floors, order: Ints, work: float) -> list[int]:
    """Rows that are likely to fit, should none of the fast ones: recomputed, and with room to spare; of different
    shapes those that are likely to be fast, and at last those with the least bytes. (Bounds do not know of the weights
    that zero=3 gathers: so those without it first.)"""
    rows = order[space.column("recompute")[order] == _FULL]
    roomy = rows[known.bytes[rows] < _ROOMY * room(space.cluster)]
    roomy = roomy[np.lexsort((likely(space, known, roomy), space.column("zero")[roomy] == 3))[: 50 * SEEDS]]
    least = rows[np.lexsort((known.bytes[rows], space.column("pp")[rows]))[: 50 * SEEDS]]
    fast = _of_each_shape(space, roomy, ("dp", "tp", "pp", "zero"), work / 4)
    return fast + [row for row in least.tolist() if cost(space.sketch(row)) < work / (4 * SEEDS)][:SEEDS]


def _of_each_shape(space: Space, rows: Ints, fields: tuple[str, ...], most: float) -> list[int]:
    """The first of these rows that differ in some fields and are no more work each than that."""
    found: dict[tuple[int, ...], int] = {}
    for row in rows.tolist():
        shape = tuple(int(space.column(field)[row]) for field in fields)
        if len(found) < SEEDS and shape not in found and cost(space.sketch(row)) < most:
            found[shape] = row
    return list(found.values())
