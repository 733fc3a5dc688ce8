"""What no plan of a space can beat, of all of them at once: seconds of a step, and whether any cuts could fit.

With p ranks, m micro-batches, T seconds of a micro-batch in all blocks (W with what is recomputed, and with the adding
to gradients that are there already), F and B those of its forward and of its backward passes, H seconds of a message
there and back, and C those of all sums of gradients at the rate of their bytes:

    one stage        m · W                        micro-batches go through one after the other
    naive            m · T
    gems             F + m · B                    one goes back through all stages before the next one can
    gpipe            T + (m − 1) · max over stages           … of the best cuts that there are
    1f1b             max over stages of T before + m · own   … of the best cuts that there are
    all others       m · W / p                               all ranks compute all the time
    and, of all      T + (stages − 1) · H         a micro-batch goes through all of them and back
    two parts        m · W / p, alone             gradients of weights may be left for the next step's beginning
    one stage        m · W, and the optimizer's step
    one stage        m · W − B + C                nothing can be summed before the last backward pass begins
      zero=1         … and the gathering of all weights, as far as it takes longer than the first forward pass
      zero=2, 3      gathers and scatters follow each other: G + m · S, and m · (G + S)

The best cuts are found exactly: with a limit V the first stage takes as many blocks as it can, and so do those after
it, since whoever takes more leaves less; the least V with which all blocks are taken is the bound. What ranks that
share blocks exchange inside a pass is part of its blocks' seconds. The host that issues the work is never faster than
it is: m · (seconds to issue) / p. Whether anything fits is for `room.py` to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.plan.plan import WORDS, plan
from trainplan.plan.rules import SPLIT_BACKWARD
from trainplan.predict.contention import at_least
from trainplan.predict.planned import planned
from trainplan.predict.speeds import speeds
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend
from trainplan.program.program import Bools, Ints
from trainplan.search.blocks import Blocks, Lasting
from trainplan.search.columns import Space
from trainplan.search.room import Columns, columns, fitting, shared_evenly
from trainplan.search.talk import aloud, hops, sums

Floats = NDArray[np.float64]
_SCHEDULE = {word: place for place, word in enumerate(WORDS["schedule"])}
_FULL, _MOST = (WORDS["recompute"].index(word) for word in ("full", "except-last"))
_IN_TURN = [_SCHEDULE[word] for word in ("1f1b", "1f1b-early")]
_TWO_WAYS = [_SCHEDULE[word] for word in ("gems", "chimera", "chimera-doubled")]
_IN_PARTS = [_SCHEDULE[word] for word in SPLIT_BACKWARD]
_CLOSE = 1e-4  # how closely the best cuts are found


@dataclass(frozen=True)
class Floors:
    """Of every row of a space."""

    seconds: Floats  # that a step takes at least
    fits: Bools  # whether there are cuts with which no rank has too much for certain

    variant: Ints  # which of `profiles` it is of
    profiles: tuple[Profile, ...]  # of a rank, as the plans of a variant have it
    loud: tuple[Profile, ...]  # the same with what ranks exchange inside passes as part of their seconds
    fastest: float  # device of the cluster, in units of the one that profiles are of
    hop: Floats  # seconds of a message between stages, there and back, at least
    summed: Floats  # seconds of summing a byte of gradients over replicas, or of sharing it out, at least
    started: Floats  # … and to begin with, of every piece
    lasting: tuple[Lasting, ...]  # of `profiles`
    joint: bool  # whether the seconds of the host that issues passes are part of theirs
    bytes: Floats  # that the fullest rank has at least, whatever the cuts
    room: Columns  # what bytes are made of


def floors(space: Space) -> Floors:
    """What none of the plans of a space can beat."""
    profiles, variant = _variants(space)
    loud = [aloud(profile, space.cluster) for profile in profiles]
    fastest = max(speeds(space.profile, space.cluster))
    micro = space.column("micro")
    local = -(-space.batch // space.column("dp"))  # samples of the first replica
    samples, larger = local // micro, local % micro  # of the smaller micro-batches; and how many have one more
    # What several rows share is worked out once: blocks by variant and samples.
    numbers, which = unique(np.tile(variant, 2), np.concatenate([samples, samples + (larger > 0)]))
    lasting = tuple(map(Lasting, profiles))
    # (Beside others of its node compute takes longer, and not so the host: what both take is for `solve/least.py`.)
    crowded = bool(space.cluster.contention or space.cluster.spread)
    joint = backend(space.cluster.backend).host_computes and not crowded
    parts = [Blocks(lasting[v], loud[v], n, fastest, joint) for v, n in numbers.tolist()]
    small, large = np.split(which, 2)
    room = columns(space, parts, small, large, larger)
    fits = fitting(room, space.cluster)
    seconds = np.full(len(space), np.inf)
    own = np.flatnonzero(fits)
    rows = _Rows(space, own, variant[own], small[own], large[own], larger[own])
    hop, summed, started = np.zeros((3, len(space)))
    hop[own] = _hops(space, rows, parts)
    started[own], summed[own] = _sums(space, rows)
    gradients = np.array([part.gradients.sum() for part in lasting])[rows.variant]
    pieces = np.array([max(part.pieces.sum(), 1.0) for part in lasting])[rows.variant] * (gradients > 0)
    seconds[own] = _seconds(rows, parts, gradients * summed[own] + pieces * started[own], hop[own])
    if crowded:
        none = np.zeros(len(own))
        seconds[own] = np.maximum(seconds[own], _crowded(space, rows) * _seconds(rows, parts, none, none, device=True))
    return Floors(
        seconds, fits, variant, tuple(profiles), tuple(loud), fastest, hop, summed, started, lasting, joint,
        shared_evenly(space, parts, small), room,
    )  # fmt: skip


class _Rows:
    """Some rows of a space: a field each, and what their micro-batches are."""

    def __init__(self, space: Space, own: Ints, variant: Ints, small: Ints, large: Ints, larger: Ints) -> None:
        fields = ("dp", "tp", "pp", "micro", "zero", "shard", "schedule", "chunks")
        self.dp, self.tp, self.pp, self.micro, self.zero, self.shard, self.schedule, self.chunks = (
            space.column(field)[own] for field in fields
        )
        self.spread, self.ranks = space.column("spread")[own] > 0, space.ranks[own] // (self.dp * self.tp)
        self.slowest = _slowest(space, own)
        self.full = space.column("recompute")[own] == _FULL
        # All but one micro-batch of every line are recomputed: of stages with several ranks, nothing is said.
        self.most = (space.column("recompute")[own] == _MOST) & (space.column("spread")[own] == 0)
        self.lines = np.where(np.isin(self.schedule, _TWO_WAYS), 2 * space.column("pairs")[own], 1)
        # Backward passes that find gradients which they add to: where buckets keep them or DDP copies them, all.
        self.adds = np.where(self.spread, 0, self.micro - (self.dp * self.lines == 1))
        self.variant, self.small, self.large, self.larger = variant, small, large, larger


def _seconds(rows: _Rows, parts: list[Blocks], sums: Floats, hop: Floats, device: bool = False) -> Floats:
    """`device`: of the devices alone, without hosts."""
    micro, pp, zero, schedule = rows.micro, rows.pp, rows.zero, rows.schedule
    once, again = (np.array([getattr(part, name) for part in parts]) for name in ("once", "again"))
    sides = ("forward", "backward", "issue")
    forward, backward, issue = (np.array([getattr(part, name) for part in parts]) for name in sides)

    def all_of_them(each: Floats) -> Floats:
        """Of all micro-batches, which have two sizes."""
        return np.asarray((micro - rows.larger) * each[rows.small] + rows.larger * each[rows.large])

    through = once.sum(axis=1)
    adding, update = (np.array([getattr(part, name) for part in parts]) for name in ("adding", "stepping"))
    adds = rows.adds * adding.sum(axis=1)[rows.small]
    whole = all_of_them(through) + adds
    twice = again.sum(axis=1)
    but = rows.most * np.minimum(rows.lines, micro) * twice[rows.large]
    work = whole + np.where(rows.full | rows.most, np.maximum(all_of_them(twice) - but, 0.0), 0.0)
    hosted = all_of_them(np.array([part.hosted for part in parts])) * np.where(rows.full | rows.most, 2, 1)
    slowest = work + (rows.slowest - 1) * np.maximum(work - hosted, 0.0)  # of the replica with the slowest devices
    found = np.maximum(slowest, all_of_them(issue) * (not device)) / rows.ranks
    # The best cuts: of orders in turn with what goes before a stage, of gpipe with one micro-batch less.
    several, gpipe = pp > 1, (schedule == _SCHEDULE["gpipe"]) & ~rows.spread
    in_turn, two_ways = np.isin(schedule, _IN_TURN), np.isin(schedule, _TWO_WAYS)
    cut = np.flatnonzero(several & ~two_ways & ~rows.spread)
    columns = (
        rows.small, rows.large, rows.full + 2 * rows.most, pp * rows.chunks, in_turn.astype(np.int64),
        micro - rows.larger - gpipe, rows.larger, rows.adds,
    )  # fmt: skip
    keys, row = unique(*(column[cut] for column in columns))
    best = np.zeros(len(pp))
    until = [np.cumsum(each, axis=1) for each in (once, again, adding)]
    best[cut] = _best_cuts(until[0], until[1], until[2], keys)[row]
    found = np.maximum(found, best + np.where(gpipe & several, through[rows.small], 0.0))
    found = np.where((schedule == _SCHEDULE["naive"]) & ~rows.spread, np.maximum(found, whole), found)
    back = forward[rows.small] + micro * backward[rows.small] + adds
    found = np.where(schedule == _SCHEDULE["gems"], np.maximum(found, back), found)
    found = np.maximum(found, through[rows.large] + (pp * rows.chunks - 1) * hop)
    # Communication, of one stage: what is computed before the last backward pass begins, and then the sums.
    gathers = np.where(zero > 0, sums, 0.0)
    late = np.maximum(0.0, gathers - forward[rows.large])
    busy = np.where(zero == 3, micro * (gathers + sums), np.where(zero == 2, gathers + micro * sums, 0.0))
    last = backward[rows.large] + np.where(rows.full, twice[rows.large], 0.0)
    last = last + 2 * adding.sum(axis=1)[rows.small]  # DDP's last pass of several adds, and copies
    alone = slowest + np.where(zero == 0, update.sum(axis=1)[rows.small], 0.0)
    talk = np.maximum(work - last + late + sums, busy)
    found = np.where(several, found, np.maximum(found, np.maximum(alone, talk)))
    # Gradients of weights can be left for the time in which the next step has begun: only their work is certain.
    halves = (all_of_them(np.array([part.parts for part in parts])) + adds) * rows.slowest / pp
    return np.where(np.isin(schedule, _IN_PARTS), halves, found)


def _slowest(space: Space, own: Ints) -> Floats:
    """How many times as long as the fastest device the devices of a replica take on average that has as many samples as
    where all have equally many, or more: of replicas that are dealt them out by speed any may be it, also the fastest.
    1 where all devices are alike."""
    pace = np.array(speeds(space.profile, space.cluster))
    if len(set(pace.tolist())) == 1:
        return np.ones(len(own))
    ranks = space.ranks[own] // (space.column("dp")[own] * space.column("tp")[own])
    keys, which = unique(space.column("dp")[own], space.column("tp")[own], ranks)
    found = np.empty(len(keys))
    for k, (dp, tp, many) in enumerate(keys.tolist()):
        # A group that shares stages is as fast as its first rank says: its ranks are alike, or nothing is certain.
        replicas = pace[: dp * tp * many].reshape(many, dp, tp).max(axis=2).sum(axis=0)
        found[k] = pace.max() * many / replicas.max()
    return np.asarray(found[which])


def _crowded(space: Space, rows: _Rows) -> Floats:
    """How many times as long compute takes at least, since devices of a node compute at once."""
    keys, which = unique(rows.dp, rows.tp, rows.ranks)
    plans = [plan(dp=dp, tp=tp, pp=ranks) for dp, tp, ranks in keys.tolist()]
    return np.array([at_least(each, space.cluster, space.batch).least for each in plans])[which]


def unique(*columns: Ints) -> tuple[Ints, Ints]:
    """The combinations that occur, and which of them each row has."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        number = number * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(number, return_index=True, return_inverse=True)
    return np.column_stack([column[first] for column in columns]), which


def _variants(space: Space) -> tuple[list[Profile], Ints]:
    """The profiles of ranks that the plans of a space have, and which of them each has."""
    selective = space.column("recompute") == WORDS["recompute"].index("selective")
    tp, sequence = space.column("tp"), space.column("sequence")
    keys, which = unique(tp, sequence, selective.astype(np.int64))
    first = np.full(len(keys), len(space), dtype=np.int64)
    np.minimum.at(first, which, np.arange(len(space)))
    return [planned(space.sketch(row), space.profile, space.cluster) for row in first.tolist()], which


@njit(cache=True)
def _best_cuts(once: Floats, again: Floats, adding: Floats, keys: Ints) -> Floats:
    """The least that the busiest stage takes, of all ways to cut; if asked, with what goes before it."""
    found = np.empty(len(keys))
    blocks = once.shape[1]
    work = np.empty(blocks)  # of all micro-batches, up to and with a block
    for k in range(len(keys)):
        small, large, full, stages, ahead, count, larger, adds = keys[k]
        for b in range(blocks):
            work[b] = count * once[small, b] + larger * once[large, b] + adds * adding[small, b]
            if full:  # 2: all but one of them
                work[b] += max(0, count + 1 - full) * again[small, b] + larger * again[large, b]
        total = work[blocks - 1]
        low, high = total / stages, total + once[large, blocks - 1]
        while high - low > _CLOSE * high:
            limit = 0.5 * (low + high)
            block, before, taken = 0, 0.0, 0.0  # seconds of what is taken already: of one micro-batch, and of all
            for _ in range(stages):
                until = taken + limit - ahead * before
                while block < blocks and work[block] <= until:
                    block += 1
                if block == blocks:
                    break
                if block:
                    taken, before = work[block - 1], once[small, block - 1]
            if block == blocks:
                high = limit
            else:
                low = limit
        found[k] = low
    return found


def _sums(space: Space, rows: _Rows) -> tuple[Floats, Floats]:
    """Seconds of summing gradients over replicas, or of gathering or scattering what they share out: to begin with, and
    a byte. (Where groups of them share out, they sum over these beside it.)"""
    keys, which = unique(rows.dp, rows.tp, rows.ranks, (rows.zero > 0).astype(np.int64), rows.shard)
    found = np.zeros((len(keys), 2))
    for k, (replicas, sharing, stages, shares, shard) in enumerate(keys.tolist()):
        if replicas > 1:
            groups = replicas // shard if shard else 1
            found[k] = sums(space.cluster, replicas // groups, sharing, stages * groups, bool(shares))
    return found[which, 0], found[which, 1]


def _hops(space: Space, rows: _Rows, parts: list[Blocks]) -> Floats:
    """Seconds of a message between stages, there and back: stages of one pipeline are so many ranks apart."""
    sizes = np.array([part.hop for part in parts])
    keys, which = unique(rows.dp * rows.tp, rows.small, (rows.pp > 1).astype(np.int64))
    found = [
        hops(space.cluster, apart, sizes[n]) if several and sizes[n] else 0.0 for apart, n, several in keys.tolist()
    ]
    return np.array(found)[which]
