"""What a plan cannot beat once it is cut, and what its fullest rank has at least: closer than `floor.py`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import SPLIT_BACKWARD, TWO_WAYS
from trainplan.program.ops import Kind
from trainplan.program.program import Ints
from trainplan.program.schedules import orders_of
from trainplan.program.schedules.interleaved import round_length
from trainplan.search.blocks import Blocks
from trainplan.search.columns import Space
from trainplan.search.floor import Floats, Floors
from trainplan.search.in_order import behind, in_order
from trainplan.search.room import context, room, unlike
from trainplan.search.talk import summed
from trainplan.solve.least import Least
from trainplan.solve.limits import usable
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import cuts

# In passes that could be simulated instead: cutting, and making the tables for it, for every pair of blocks; and making
# the order of work, for every pass.
_CUT, _TABLES, _ORDER = 1 / 5000, 1 / 300, 1 / 1000


_KEPT = {"full": "read", "except-last": "least"}  # of micro-batches in flight; otherwise what is saved


class Closer:
    """What a plan cannot beat once it is cut; what several plans share is worked out once."""

    def __init__(self, space: Space, known: Floors) -> None:
        self.space, self.known = space, known
        self.by_variant: dict[int, Tables] = {}
        self.usable, self.room, self.own = usable(space.cluster), room(space.cluster), context(space.cluster)
        self.too_big = 0
        self.cut_work = 0.0  # that cutting took so far, in passes that could have been simulated instead
        self.bytes: dict[int, float] = {}  # by row, that the fullest rank has at least, once it is cut
        self._mixed = len(space.cluster.kinds) > 1
        # Where ranks slow each other down, or hosts are devices, `solve/least.py` knows more.
        self._beside = bool(space.cluster.contention or space.cluster.spread) or known.joint
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._flying: dict[tuple[object, ...], np.ndarray] = {}
        self._tables: set[tuple[object, ...]] = set()  # that cuts were made by
        self._played: dict[tuple[object, ...], float] = {}

    def tables(self, row: int) -> Tables:
        number = int(self.known.variant[row])
        if number not in self.by_variant:
            self.by_variant[number] = Tables(self.known.profiles[number])
        return self.by_variant[number]

    def __call__(self, row: int) -> tuple[float, tuple[int, ...]]:
        """Seconds that a step takes at least, and the cuts; without end where it cannot fit."""
        space, bound = self.space, float(self.known.seconds[row])
        sketch, number = space.sketch(row), int(self.known.variant[row])
        local = -(-space.batch // sketch.dp)
        small, large, larger = self._sizes(row, sketch)
        stages: tuple[int, ...] = ()
        self.bytes[row] = float(self.known.bytes[row])
        order = sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs
        key: tuple[object, ...] = (number, local, sketch.micro, sketch.recompute, *order)
        if self._mixed or sketch.spread:  # then it matters where stages are
            key = (*key, sketch.dp, sketch.spread)
        if sketch.pp > 1:
            if key not in self._cuts:
                tables = number, -(-local // sketch.micro), sketch.recompute in ("full", "except-last")
                self.cut_work += sketch.blocks**2 * (_CUT + _TABLES * (tables not in self._tables))
                self._tables.add(tables)
                self._cuts[key] = cuts(sketch, space.cluster, space.batch, self.tables(row), self.usable)
            stages = self._cuts[key]
            if sketch.spread:
                turns = _of_several(sketch, stages, small, float(self.known.hop[row]), space.cluster)
                return max(bound, turns), stages
            if self._beside:
                least = Least(sketch, space.cluster, space.batch, self.tables(row))
                bound = max(bound, least(stages))
            hop = float(self.known.hop[row])
            bound = max(bound, _when_cut(sketch, stages, small, large, larger, hop))
            bound = max(bound, _at_last(sketch, stages, small, large, larger, hop))
            shared = small.alone * float(self.known.summed[row]) + small.pieces * float(self.known.started[row])
            bound = max(bound, _exchanging(sketch, stages, shared))
            bound = max(bound, _summing(sketch, stages, small, shared))
        most = self._early(sketch, stages, small, large) if stages else self._most(sketch, stages, small, large, larger)
        return (bound if self._has_room(row, most) else float("inf")), stages

    def _has_room(self, row: int, most: float) -> bool:
        """Whether so many bytes of the fullest rank are not too many."""
        self.bytes[row] = max(self.bytes[row], (most + self.own) * unlike(self.space.cluster))
        self.too_big += most > self.room
        return most <= self.room

    def fits(self, row: int, stages: tuple[int, ...]) -> bool:
        """Whether a plan with these cuts may fit, by what is in flight at every moment of its order of work."""
        sketch = self.space.sketch(row)
        if not stages or sketch.spread:
            return True
        return self._has_room(row, self._most(sketch, stages, *self._sizes(row, sketch)))

    def _sizes(self, row: int, sketch: Plan) -> tuple[Blocks, Blocks, int]:
        """What the smaller and the larger micro-batches of a row take, and how many are larger."""
        samples, larger = divmod(-(-self.space.batch // sketch.dp), sketch.micro)
        number = int(self.known.variant[row])
        return self._of(number, samples), self._of(number, samples + (larger > 0)), larger

    def in_order(self, row: int, stages: tuple[int, ...]) -> float:
        """Seconds that a step of a plan with these cuts takes at least, by the order of its passes: closer still. Plans
        that differ in what they share out have their passes in common."""
        sketch, number = self.space.sketch(row), int(self.known.variant[row])
        small, large, larger = self._sizes(row, sketch)
        if not stages:
            return 0.0
        order = sketch.schedule, sketch.chunks, sketch.pairs, sketch.micro, sketch.recompute
        key = number, sketch.dp, stages, sketch.spread, order
        if key not in self._played:
            self._played[key] = in_order(sketch, stages, small, large, larger, self.space.cluster)
        passes = self._played[key]
        own = slice(0, stages[0])
        sums = small.alone[own].sum() * self.known.summed[row] + small.pieces[own].sum() * self.known.started[row]
        return passes + behind(sketch, stages, small, float(sums)) if passes else 0.0

    def _of(self, variant: int, samples: int) -> Blocks:
        if (variant, samples) not in self._blocks:
            of = self.known.lasting[variant], self.known.loud[variant]
            self._blocks[variant, samples] = Blocks(*of, samples, self.known.fastest, self.known.joint)
        return self._blocks[variant, samples]

    def _lasting(self, sketch: Plan, stages: tuple[int, ...], small: Blocks) -> tuple[Floats, Floats]:
        """Bytes of every rank that are there all the time; and at the optimizer's step, with all gradients."""
        share, first = 1 / sketch.sharers, [0, *stages]
        lasting = small.weights * (share if sketch.zero == 3 else 1.0) + small.states * (share if sketch.zero else 1.0)
        kept, coming = _gradients(sketch, stages, small)
        whole = np.add.reduceat(lasting, first) + kept * (share if sketch.zero > 1 else 1.0)
        rank, stage = _held(sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs)
        always, at_step = (np.bincount(rank, each[stage]).astype(np.float64) for each in (whole, whole + coming))
        for blocks, weights, gradients, states in small.tied:
            uses = np.zeros(len(first), dtype=bool)
            using = np.searchsorted(stages, blocks, side="right")
            uses[using] = True
            others = np.zeros(sketch.pp, dtype=bool)
            others[rank[uses[stage]]] = True
            others[rank[stage == using[0]]] = False  # of the first of the blocks it is counted already
            always[others] += weights + states
            at_step[others] += weights + states + gradients
        return always, at_step

    def _early(self, sketch: Plan, stages: tuple[int, ...], small: Blocks, large: Blocks) -> float:
        """Bytes that the fullest rank has at least when it first goes back: most that are too big are so then, and need
        no order of work to be made."""
        kept = _KEPT.get(sketch.recompute, "saved")
        each = np.minimum(*(np.add.reduceat(getattr(part, kept), [0, *stages]) for part in (small, large)))
        flying = _first_back(sketch.schedule, sketch.pp, sketch.chunks, sketch.micro) * each
        rank, stage = _held(sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs)
        always, at_step = self._lasting(sketch, stages, small)
        return float(max((always + np.bincount(rank, flying[stage])).max(), at_step.max()))

    def _most(self, sketch: Plan, stages: tuple[int, ...], small: Blocks, large: Blocks, larger: int) -> float:
        """Bytes that the fullest rank has at least: what is there all the time, and what is in flight; or all gradients
        at the optimizer's step."""
        order = sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs
        kept = _KEPT.get(sketch.recompute, "saved")
        key = small, large, larger, stages, kept, order, sketch.micro, sketch.dp > 1
        if key not in self._flying:
            self.cut_work += _ORDER * sketch.micro * (1 + len(stages))
            each = np.array([np.add.reduceat(getattr(part, kept), [0, *stages]) for part in (small, large)])
            _, coming = _gradients(sketch, stages, small)
            found = []
            for stage, micro, sign in _passes(*order, sketch.micro):
                change = sign * each[(micro < larger).astype(np.int64), stage]
                if coming.any():
                    back = np.flatnonzero(sign < 0)
                    own, first = np.unique(stage[back], return_index=True)
                    change[back[first]] += coming[own]
                found.append(np.cumsum(change).max())
            self._flying[key] = np.array(found)
        always, at_step = self._lasting(sketch, stages, small)
        flying = always + np.maximum(self._flying[key], self._at_one_block(sketch, stages, small))
        return float(max(flying.max(), at_step.max()))

    def _at_one_block(self, sketch: Plan, stages: tuple[int, ...], small: Blocks) -> Floats:
        """Bytes of every rank while one of its blocks goes back: what that has saved, or saves again, with zero=3 its
        weights as they were gathered, and from zero=2 on its gradients before they are scattered."""
        alone = small.alone * ((sketch.zero > 1) + (sketch.zero > 2))
        most = np.maximum.reduceat(small.inside + alone, [0, *stages])
        rank, stage = _held(sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs)
        found = np.zeros(sketch.pp)
        np.maximum.at(found, rank, most[stage])
        return found


@lru_cache(maxsize=4096)
def _first_back(schedule: str, pp: int, chunks: int, micro: int) -> Ints:
    """Of every stage, micro-batches in flight when its rank first goes back, at least."""
    rank, chunk = np.tile(np.arange(pp), chunks), np.repeat(np.arange(chunks), pp)
    if schedule in ("gpipe", "looped"):
        return np.full(pp * chunks, micro)
    if schedule == "1f1b":
        return np.minimum(micro, pp - rank)
    if schedule == "1f1b-early":
        return np.minimum(micro, 2 * (pp - rank) - 1)
    if schedule == "interleaved":  # rounds through all chunks but the last, and what has come back from that
        group = round_length(pp, micro)
        return np.where(chunk < chunks - 1, group, np.minimum(group, 2 * (pp - rank) - 1))
    return np.zeros(pp * chunks, dtype=np.int64)


@lru_cache(maxsize=4096)
def _passes(schedule: str, pp: int, chunks: int, pairs: int, micro: int) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """For every rank the stages that it passes, with which micro-batch, and whether forward (1) or back (-1)."""
    last = Kind.W if schedule in SPLIT_BACKWARD else Kind.B
    found = []
    whole = plan(pp=pp, schedule=schedule, chunks=chunks, pairs=pairs, micro=micro, blocks=pp * chunks)
    for order in orders_of(whole):
        own = order[(order[:, 0] == Kind.F) | (order[:, 0] == last)]
        found.append((own[:, 2], own[:, 3], np.where(own[:, 0] == Kind.F, 1, -1)))
    return tuple(found)


@lru_cache(maxsize=1024)
def _held(schedule: str, pp: int, chunks: int, pairs: int) -> tuple[Ints, Ints]:
    """The stages that ranks hold: ranks, and a stage of each."""
    lines = plan(pp=pp, schedule=schedule, chunks=chunks, pairs=pairs, blocks=pp * chunks).placement
    held = np.unique([(rank, stage) for line in lines for stage, (rank,) in enumerate(line)], axis=0)
    return held[:, 0].copy(), held[:, 1].copy()


def _gradients(sketch: Plan, stages: tuple[int, ...], small: Blocks) -> tuple[Floats, Floats]:
    """Of every stage, bytes of gradients that are there all the time, since buckets keep them; and of those that come
    with its first backward pass and go with the optimizer's step. Buckets have what goes to other ranks that hold the
    stage; not what several stages use, which goes by itself."""
    first = [0, *stages]
    _, stage = _held(sketch.schedule, sketch.pp, sketch.chunks, sketch.pairs)
    whole, own = np.add.reduceat(small.gradients, first), np.add.reduceat(small.alone, first)
    for blocks, _, gradients, _ in small.tied:
        using = np.searchsorted(stages, blocks, side="right")
        own[using[0]] += gradients * (using[0] == using[-1])
    kept = own * (sketch.dp * np.bincount(stage) > 1)
    return kept, whole - kept


def adds(sketch: Plan) -> int:
    """Backward passes of every stage that find gradients which they add to: all where buckets keep them."""
    return sketch.micro - (sketch.dp * sketch.lines == 1)


def _of_several(sketch: Plan, stages: tuple[int, ...], small: Blocks, hop: float, cluster: Cluster) -> float:
    """The ranks of a stage take turns, so one of them has as large a part of the micro-batches as any, and recomputes
    all of them but one of every line. It cannot start before the stages ahead; in the naive order it waits while a
    micro-batch goes through those behind; and what it shares with others is summed in the end."""
    first, place, ranks = [0, *stages], np.arange(sketch.pp), np.array(sketch.spread)
    once, again = np.add.reduceat(small.once, first), np.add.reduceat(small.again, first)
    many = -(-sketch.micro // ranks)
    twice = {"full": many, "except-last": np.maximum(many - sketch.lines, 0)}.get(sketch.recompute, 0 * many)
    own = many * once + twice * again
    starts = np.cumsum(ranks) - ranks
    groups = [tuple(range(start, start + count)) for start, count in zip(starts.tolist(), sketch.spread, strict=True)]
    sums = np.array([summed(cluster, group) if len(group) > 1 else (0.0, 0.0) for group in groups])
    gradients = np.add.reduceat(small.alone, first)
    last = once - np.add.reduceat(small.forth, first) + (sketch.recompute == "full") * again
    summing = own - last + np.where(gradients > 0, sums[:, 0] + sums[:, 1] * gradients, 0.0)
    if sketch.schedule == "naive":
        own = np.maximum(own, many * (np.cumsum(once[::-1])[::-1] + hop * (sketch.pp - 1 - place)))
    return float(max((np.cumsum(once) - once + hop * place + own).max(), summing.max()))


def _at_last(
    sketch: Plan, stages: tuple[int, ...], small: Blocks, large: Blocks, larger: int, hop: float
) -> float:  # fmt: skip
    """The last micro-batch comes to the first stage after all others, goes through all stages and back."""
    if sketch.lines > 1 or sketch.schedule in SPLIT_BACKWARD:
        return 0.0
    mine = slice(0, stages[0])
    ahead = (sketch.micro - 1 - larger) * small.forth[mine].sum() + larger * large.forth[mine].sum()
    return float(ahead + small.once.sum()) + len(stages) * hop


def _exchanging(sketch: Plan, stages: tuple[int, ...], shared: Floats) -> float:
    """Gathers and scatters that passes wait for follow each other on a rank (but for the last of a step). The next step
    ends at least those of one rank later, and which one is not known: so the least of them. Backward passes gather once
    more, but for what forward passes end with. `shared`: seconds of every block's weights."""
    if sketch.lines > 1 or sketch.zero < 2:
        return 0.0
    first, micro = [0, *stages], sketch.micro
    once, most = np.add.reduceat(shared, first), np.maximum.reduceat(shared, first)
    each = (micro - 1) * once
    if sketch.zero == 3:
        each += micro * once + micro * np.maximum(once - 2 * most, 0.0)
    return float(np.bincount(np.arange(len(first)) % sketch.pp, weights=each).min())


def _summing(sketch: Plan, stages: tuple[int, ...], blocks: Blocks, shared: Floats) -> float:
    """A rank sums its first stage's gradients when it has computed all but its last backward pass, and only then
    begins the next step."""
    if sketch.lines > 1 or sketch.schedule in SPLIT_BACKWARD or not shared.any():
        return 0.0
    first, full, again = [0, *stages], sketch.recompute == "full", sketch.recompute in ("full", "except-last")
    each = np.add.reduceat(blocks.once + blocks.again * full, first)
    adding = np.add.reduceat(blocks.adding, first)
    own = sketch.micro * each + adds(sketch) * adding
    work = np.bincount(np.arange(len(first)) % sketch.pp, weights=own)
    last = (np.add.reduceat(blocks.once - blocks.forth * (not again), first) + adding)[: sketch.pp]
    return float((work - last + np.add.reduceat(shared, first)[: sketch.pp]).max())


def _when_cut(
    sketch: Plan, stages: tuple[int, ...], small: Blocks, large: Blocks, larger: int, hop: float
) -> float:  # fmt: skip
    """As `solve/least.py` has it: rank r cannot start before the stages ahead of its first, and what it does last must
    go back through them; with the messages between."""
    first, micro, full = [0, *stages], sketch.micro, sketch.recompute == "full"
    once = np.add.reduceat(small.once, first)
    each = [np.add.reduceat(part.once + part.again * full, first) for part in (small, large)]
    adding = np.add.reduceat(small.adding, first)
    own = (micro - larger) * each[0] + larger * each[1] + adds(sketch) * adding  # of all micro-batches
    if sketch.schedule == "gems":
        # Of an odd number of stages one rank alone has the middle one, and finds no gradients at first.
        alone = float(adding[sketch.pp // 2]) if sketch.pp % 2 and sketch.dp == 1 else 0.0
        return small.forward + micro * (small.backward + float(small.adding.sum())) - alone
    if sketch.pairs > 1:
        return float(own.sum()) / sketch.pp
    if sketch.schedule in TWO_WAYS:
        half = sketch.pp // 2
        ahead = (np.cumsum(once) - once)[:half] + hop * np.arange(half)
        both = each[0] + adding
        return float((ahead + micro / 2 * (both + both[::-1])[:half]).max())
    if sketch.schedule in SPLIT_BACKWARD:
        return 0.0
    if sketch.schedule == "naive":
        return float(micro * once.sum() + adds(sketch) * adding.sum())
    work = np.bincount(np.arange(len(own)) % sketch.pp, weights=own)
    ahead = (np.cumsum(once) - once)[: sketch.pp] + hop * np.arange(sketch.pp)
    found = float((ahead + work).max())
    return max(found, float(once.sum() + (own - each[0]).max())) if sketch.schedule == "gpipe" else found
