"""What no plan of a space can beat, of all of them at once: seconds of a step, and whether any cuts could fit.

With p ranks, m micro-batches, T seconds of a micro-batch in all blocks (W with what is recomputed), B those of all its
backward passes, H seconds of a message there and back, and C those of all sums of gradients at the rate of their bytes:

    one stage        m · W                        micro-batches go through one after the other
    naive            m · T
    gpipe            T + (m − 1) · max over stages           … of the best cuts that there are
    1f1b             max over stages of T before + m · own   … of the best cuts that there are
    all others       m · W / p                               all ranks compute all the time
    and, of all      T + (stages − 1) · H         a micro-batch goes through all of them and back
    two parts        m · W / p, alone             gradients of weights may be left for the next step's beginning
    one stage        m · W, and what is added up and stepped beside it
    one stage        m · W − B + C                nothing can be summed before the last backward pass begins
      zero=1         … and the gathering of all weights, as far as it takes longer than the first forward pass
      zero=2, 3      gathers and scatters follow each other: G + m · S, and m · (G + S)

The best cuts are found exactly: with a limit V the first stage takes as many blocks as it can, and so do those after
it, since whoever takes more leaves less; the least V with which all blocks are taken is the bound. What ranks that
share blocks exchange inside a pass is part of its blocks' seconds. The host that issues the work is never faster than
it is: m · (seconds to issue) / p.

Bytes: a rank has its weights, what its optimizer keeps, gradients where buckets keep them, and what the micro-batches
in flight have saved inside blocks. By the same argument the first stage takes as many blocks as its memory holds; where
some are left over in the end, no cuts fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import WORDS, plan
from trainplan.plan.rules import SPLIT_BACKWARD
from trainplan.predict.contention import at_least
from trainplan.predict.planned import planned
from trainplan.predict.predict import MEMORY_MARGIN
from trainplan.predict.speeds import speeds
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend
from trainplan.program.program import Bools, Ints
from trainplan.search.blocks import Blocks, Lasting
from trainplan.search.columns import Space
from trainplan.search.talk import aloud, hops, sums

Floats = NDArray[np.float64]
_SCHEDULE = {word: place for place, word in enumerate(WORDS["schedule"])}
_FULL, _MOST = (WORDS["recompute"].index(word) for word in ("full", "except-last"))
# What stays of a micro-batch: what blocks save, or what they read; where only some are recomputed, the less of both.
_KEPT = np.array([{"full": 1, "except-last": 2}.get(word, 0) for word in WORDS["recompute"]])
_IN_TURN = [_SCHEDULE[word] for word in ("1f1b", "1f1b-early")]
_TWO_WAYS = [_SCHEDULE[word] for word in ("gems", "chimera", "chimera-doubled")]
_IN_PARTS = [_SCHEDULE[word] for word in SPLIT_BACKWARD]
_BESIDE = ("accumulate", "update")
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
    summed: Floats  # seconds of summing a byte of gradients over replicas, at least
    lasting: tuple[Lasting, ...]  # of `profiles`
    joint: bool  # whether the seconds of the host that issues passes are part of theirs
    bytes: Floats  # that the fullest rank has at least, whatever the cuts


def floors(space: Space) -> Floors:
    """What none of the plans of a space can beat."""
    profiles, variant = _variants(space)
    loud = [aloud(profile, space.cluster) for profile in profiles]
    fastest = max(speeds(space.profile, space.cluster))
    micro = space.column("micro")
    local = -(-space.batch // space.column("dp"))  # samples of the first replica
    samples, larger = local // micro, local % micro  # of the smaller micro-batches; and how many have one more
    # What several rows share is worked out once: blocks by variant and samples.
    numbers, which = _unique(np.tile(variant, 2), np.concatenate([samples, samples + (larger > 0)]))
    lasting = tuple(map(Lasting, profiles))
    # (Beside others of its node compute takes longer, and not so the host: what both take is for `solve/least.py`.)
    crowded = bool(space.cluster.contention or space.cluster.spread)
    joint = backend(space.cluster.backend).host_computes and not crowded
    parts = [Blocks(lasting[v], loud[v], n, fastest, joint) for v, n in numbers.tolist()]
    small, large = np.split(which, 2)
    fits = _fits(space, parts, small, large, larger)
    seconds = np.full(len(space), np.inf)
    own = np.flatnonzero(fits)
    rows = _Rows(space, own, variant[own], small[own], large[own], larger[own])
    hop, summed = np.zeros(len(space)), np.zeros(len(space))
    hop[own] = _hops(space, rows, parts)
    start, summed[own] = _sums(space, rows)
    gradients = np.array([part.gradients.sum() for part in lasting])[rows.variant]
    seconds[own] = _seconds(rows, parts, gradients * summed[own] + start * (gradients > 0), hop[own])
    if crowded:
        none = np.zeros(len(own))
        seconds[own] = np.maximum(seconds[own], _crowded(space, rows) * _seconds(rows, parts, none, none, device=True))
    return Floors(
        seconds, fits, variant, tuple(profiles), tuple(loud), fastest, hop, summed, lasting, joint,
        _bytes(space, parts, small),
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
    whole = all_of_them(through)
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
        micro - rows.larger - gpipe, rows.larger,
    )  # fmt: skip
    keys, row = _unique(*(column[cut] for column in columns))
    best = np.zeros(len(pp))
    best[cut] = _best_cuts(np.cumsum(once, axis=1), np.cumsum(again, axis=1), keys)[row]
    found = np.maximum(found, best + np.where(gpipe & several, through[rows.small], 0.0))
    found = np.where((schedule == _SCHEDULE["naive"]) & ~rows.spread, np.maximum(found, whole), found)
    found = np.maximum(found, through[rows.large] + (pp * rows.chunks - 1) * hop)
    # Communication, of one stage: what is computed before the last backward pass begins, and then the sums.
    gathers = np.where(zero > 0, sums, 0.0)
    late = np.maximum(0.0, gathers - forward[rows.large])
    busy = np.where(zero == 3, micro * (gathers + sums), np.where(zero == 2, gathers + micro * sums, 0.0))
    last = backward[rows.large] + np.where(rows.full, twice[rows.large], 0.0)
    accumulate, update = (np.array([getattr(part, name) for part in parts])[rows.small] for name in _BESIDE)
    alone = slowest + (micro - 1) * accumulate + np.where(zero == 0, update, 0.0)
    talk = np.maximum(work - last + late + sums, busy)
    found = np.where(several, found, np.maximum(found, np.maximum(alone, talk)))
    # Gradients of weights can be left for the time in which the next step has begun: only their work is certain.
    halves = all_of_them(np.array([part.parts for part in parts])) * rows.slowest / pp
    return np.where(np.isin(schedule, _IN_PARTS), halves, found)


def _slowest(space: Space, own: Ints) -> Floats:
    """How many times as long as the fastest device the devices of a replica take on average that has as many samples as
    where all have equally many, or more: of replicas that are dealt them out by speed any may be it, also the fastest.
    1 where all devices are alike."""
    pace = np.array(speeds(space.profile, space.cluster))
    if len(set(pace.tolist())) == 1:
        return np.ones(len(own))
    ranks = space.ranks[own] // (space.column("dp")[own] * space.column("tp")[own])
    keys, which = _unique(space.column("dp")[own], space.column("tp")[own], ranks)
    found = np.empty(len(keys))
    for k, (dp, tp, many) in enumerate(keys.tolist()):
        # A group that shares stages is as fast as its first rank says: its ranks are alike, or nothing is certain.
        replicas = pace[: dp * tp * many].reshape(many, dp, tp).max(axis=2).sum(axis=0)
        found[k] = pace.max() * many / replicas.max()
    return np.asarray(found[which])


def _crowded(space: Space, rows: _Rows) -> Floats:
    """How many times as long compute takes at least, since devices of a node compute at once."""
    keys, which = _unique(rows.dp, rows.tp, rows.ranks)
    plans = [plan(dp=dp, tp=tp, pp=ranks) for dp, tp, ranks in keys.tolist()]
    return np.array([at_least(each, space.cluster, space.batch).least for each in plans])[which]


def _bytes(space: Space, parts: list[Blocks], small: Ints) -> Floats:
    """Bytes that the fullest rank has at least, whatever the cuts: weights, states and what one micro-batch leaves,
    shared out evenly, beside what its device's libraries take."""
    names = ("weights", "states", "least")
    weights, states, least = (np.array([getattr(part, name).sum() for part in parts])[small] for name in names)
    zero, sharers = space.column("zero"), _sharers(space)
    lasting = weights / np.where(zero == 3, sharers, 1) + states / np.where(zero > 0, sharers, 1)
    own = (lasting + least) * space.column("dp") * space.column("tp") / space.ranks
    return np.asarray(own + context(space.cluster)) * unlike(space.cluster)


def _sharers(space: Space) -> Ints:
    return np.where(space.column("shard") > 0, space.column("shard"), space.column("dp"))


def _unique(*columns: Ints) -> tuple[Ints, Ints]:
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
    keys, which = _unique(tp, sequence, selective.astype(np.int64))
    first = np.full(len(keys), len(space), dtype=np.int64)
    np.minimum.at(first, which, np.arange(len(space)))
    return [planned(space.sketch(row), space.profile, space.cluster) for row in first.tolist()], which


@njit(cache=True)
def _best_cuts(once: Floats, again: Floats, keys: Ints) -> Floats:
    """The least that the busiest stage takes, of all ways to cut; if asked, with what goes before it."""
    found = np.empty(len(keys))
    blocks = once.shape[1]
    work = np.empty(blocks)  # of all micro-batches, up to and with a block
    for k in range(len(keys)):
        small, large, full, stages, ahead, count, larger = keys[k]
        for b in range(blocks):
            work[b] = count * once[small, b] + larger * once[large, b]
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
    a byte; nothing where groups of them share out."""
    keys, which = _unique(rows.dp, rows.tp, rows.ranks, (rows.zero > 0).astype(np.int64), rows.shard)
    found = np.zeros((len(keys), 2))
    for k, (replicas, sharing, stages, shares, shard) in enumerate(keys.tolist()):
        if replicas > 1 and not shard:
            found[k] = sums(space.cluster, replicas, sharing, stages, bool(shares))
    return found[which, 0], found[which, 1]


def _hops(space: Space, rows: _Rows, parts: list[Blocks]) -> Floats:
    """Seconds of a message between stages, there and back: stages of one pipeline are so many ranks apart."""
    sizes = np.array([part.hop for part in parts])
    keys, which = _unique(rows.dp * rows.tp, rows.small, (rows.pp > 1).astype(np.int64))
    found = [
        hops(space.cluster, apart, sizes[n]) if several and sizes[n] else 0.0 for apart, n, several in keys.tolist()
    ]
    return np.array(found)[which]


def _fits(space: Space, parts: list[Blocks], small: Ints, large: Ints, larger: Ints) -> Bools:
    names = ("saved", "read", "least", "weights", "gradients", "states")
    saved, read, least, weights, gradients, states = (
        np.array([getattr(part, name) for part in parts]) for name in names
    )
    dp, pp, micro, zero, schedule, chunks = (
        space.column(field) for field in ("dp", "pp", "micro", "zero", "schedule", "chunks")
    )
    words = np.array([_SCHEDULE[word] for word in ("gpipe", "looped", "1f1b", "1f1b-early")])
    # Of stages with several ranks none has more than one micro-batch for certain, as in an order that is none of these.
    schedule = np.where(space.column("spread") > 0, _SCHEDULE["naive"], schedule)
    kept = _KEPT[space.column("recompute")]
    return _have_room(
        np.stack([saved, read, least]), weights, gradients, states, small, large, larger, kept, dp, _sharers(space),
        pp, micro, zero, chunks, schedule, np.isin(schedule, _TWO_WAYS), words, room(space.cluster),
    )  # fmt: skip


def unlike(cluster: Cluster) -> float:
    """The memory of the smallest device in units of the largest one's: a plan's peak is that of the rank which is
    nearest to its limit, and of unlike devices another one may have so many times as much."""
    sizes = [device.memory_bytes for device in cluster.kinds.values()]
    return min(sizes) / max(sizes)


def context(cluster: Cluster) -> float:
    """Bytes that the libraries of a device take at least."""
    return float(min(device.context_bytes for device in cluster.kinds.values()))


def room(cluster: Cluster) -> float:
    """Bytes that a program may use on the device with most of them."""
    nodes = {id(node): node for node in cluster.nodes}  # of many machines most are one value
    devices = [device for node in nodes.values() for device in node.devices]
    return float(max(device.memory_bytes * (1 - MEMORY_MARGIN) - device.context_bytes for device in devices))


@njit(cache=True)
def _have_room(
    left: Floats, weights: Floats, gradients: Floats, states: Floats, small: Ints, large: Ints, larger: Ints,
    which: Ints, dp: Ints, sharers: Ints, pp: Ints, micro: Ints, zero: Ints, chunks: Ints, schedule: Ints,
    two_ways: Bools, words: Ints, limit: float,
) -> Bools:  # fmt: skip
    """Whether some cuts may fit. The larger micro-batches come first, so they are among those in flight."""
    found = np.empty(len(small), np.bool_)
    blocks = weights.shape[1]
    gpipe, looped, in_turn, early = words
    for row in range(len(small)):
        w, m, stages = small[row], micro[row], pp[row]
        each, more = left[which[row], w], left[which[row], large[row]]
        share = 1.0 / sharers[row]
        weight = share if zero[row] == 3 else 1.0
        gradient = share if zero[row] >= 2 else 1.0
        state = share if zero[row] >= 1 else 1.0
        kept = dp[row] > 1  # gradients are there before any pass
        if chunks[row] > 1 or two_ways[row]:  # all ranks together
            held = m if schedule[row] == looped else 1
            copies = 2.0 if two_ways[row] and stages % 2 == 0 else 1.0
            first = min(held, larger[row])
            total = 0.0
            for b in range(blocks):
                own = weight * weights[w, b] + state * states[w, b] + (gradient * gradients[w, b] if kept else 0.0)
                total += copies * own + (held - first) * each[b] + first * more[b]
            found[row] = total <= limit * stages
            continue
        block = 0
        for stage in range(stages):
            held = 1
            if schedule[row] == gpipe:
                held = m
            elif schedule[row] == in_turn:
                held = min(m, stages - stage)
            elif schedule[row] == early:
                held = min(m, 2 * (stages - stage) - 1)
            first = min(held, larger[row])
            lasting, grown, flying, last = 0.0, 0.0, 0.0, 0.0
            while block < blocks:
                lasting += weight * weights[w, block] + state * states[w, block]
                grown += gradient * gradients[w, block]
                flying += (held - first) * each[block] + first * more[block]
                last += more[block]
                need = lasting + flying + grown if kept else max(lasting + flying, lasting + grown + flying - last)
                if need > limit:
                    break
                block += 1
        found[row] = block == blocks
    return found
