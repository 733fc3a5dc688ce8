"""Bytes that no plan of a space can do without, of all of them at once: whether any cuts could fit, and in how little.

A rank has its weights, what its optimizer keeps, gradients where buckets keep them, and what the micro-batches in
flight have saved inside blocks. How many are in flight, at one moment and at least, is a matter of the order of work:

    gpipe, looped    m                                     all of them
    1f1b             min(m, p - r) on rank r               1f1b-early: min(m, 2 (p - r) - 1)
    interleaved      min(g, 2 (p - r) - 1)                 when rank r first goes back: so many of the last chunk, which
                                                           does, and of others more; in rounds of g (its schedule)
    chimera          min(m / 2f, min(d, p/f - 1 - d) + 1)  the same; of f pairs of pipelines, d is r modulo p/f
    all others       1

Where a rank has one stage, the first one takes as many blocks as its memory holds, and so do those after it, since
whoever takes more leaves less; where some are left over in the end, no cuts fit. Where it has several, blocks are
given to ranks in whatever order. With h micro-batches in flight a block takes w + h · a bytes; let W + h · A be those
of all blocks. If the ranks have room for all of them (as often as there are copies), then for any weights v of ranks

    limit · Σ v(r)  ≥  copies · Σ over blocks of  min over r of  v(r) · (w + h(r) · a)

and v(r) = 1 / (W + h(r) · A) makes this the same as "all blocks fit" where all blocks are alike. The smaller of the
two is at the fewest or at the most in flight, since the quotient only rises or only falls with h.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import WORDS
from trainplan.predict.predict import MEMORY_MARGIN
from trainplan.program.program import Bools, Ints
from trainplan.search.blocks import Blocks
from trainplan.search.columns import Space

Floats = NDArray[np.float64]
_GPIPE, _LOOPED, _IN_TURN, _EARLY, _INTERLEAVED, _GEMS, _CHIMERA, _DOUBLED = (
    WORDS["schedule"].index(word)
    for word in ("gpipe", "looped", "1f1b", "1f1b-early", "interleaved", "gems", "chimera", "chimera-doubled")
)
# What stays of a micro-batch: what blocks save, or what they read; where only some are recomputed, the less of both.
_KEPT = np.array([{"full": 1, "except-last": 2}.get(word, 0) for word in WORDS["recompute"]])
_CLOSE = 0.002  # how closely the least bytes are found


class Columns(NamedTuple):
    """Of kinds of micro-batches, by block, and of every row."""

    left: Floats  # what is kept, kind, block: bytes that a micro-batch leaves
    weights: Floats  # kind, block
    gradients: Floats  # that the optimizer steps by
    bucketed: Floats  # … that are there all the time where buckets keep them, whatever the cuts
    states: Floats
    small: Ints  # row: kind of its smaller micro-batches, and of its larger ones
    large: Ints
    larger: Ints  # how many of these
    kept: Ints
    several: Bools  # replicas
    sharers: Ints
    pp: Ints
    micro: Ints
    zero: Ints
    chunks: Ints
    pairs: Ints
    schedule: Ints


def columns(space: Space, parts: list[Blocks], small: Ints, large: Ints, larger: Ints) -> Columns:
    """`parts`: the kinds of micro-batches that there are."""
    names = ("saved", "read", "least", "weights", "gradients", "alone", "states")
    saved, read, least, weights, gradients, alone, states = (
        np.array([getattr(part, name) for part in parts]) for name in names
    )
    pp, micro, zero, chunks, pairs, schedule = (
        space.column(field) for field in ("pp", "micro", "zero", "chunks", "pairs", "schedule")
    )
    # Of stages with several ranks none has more than one micro-batch for certain, as in an order that is none of these.
    schedule = np.where(space.column("spread") > 0, WORDS["schedule"].index("naive"), schedule)
    return Columns(
        np.stack([saved, read, least]), weights, gradients, alone, states, small, large, larger,
        _KEPT[space.column("recompute")], space.column("dp") > 1, sharers(space), pp, micro, zero, chunks, pairs,
        schedule,
    )  # fmt: skip


def fitting(of: Columns, cluster: Cluster) -> Bools:
    """Whether there are cuts with which no rank has too much for certain."""
    return _fitting(of, room(cluster))


def fullest(of: Columns, rows: Bools, least: Floats, cluster: Cluster) -> Floats:
    """Bytes that the fullest rank of these rows has at least, whatever the cuts, beside what its device's libraries
    take: what `least` says, or more."""
    own = context(cluster)
    found = _fullest(of, rows, least / unlike(cluster) - own, room(cluster), _CLOSE)
    return np.asarray(found + own) * unlike(cluster)


def shared_evenly(space: Space, parts: list[Blocks], small: Ints) -> Floats:
    """Bytes that the fullest rank has at least, whatever the cuts: weights, states and what one micro-batch leaves,
    shared out evenly, beside what its device's libraries take."""
    names = ("weights", "states", "least")
    weights, states, least = (np.array([getattr(part, name).sum() for part in parts])[small] for name in names)
    zero, many = space.column("zero"), sharers(space)
    lasting = weights / np.where(zero == 3, many, 1) + states / np.where(zero > 0, many, 1)
    own = (lasting + least) * space.column("dp") * space.column("tp") / space.ranks
    return np.asarray(own + context(space.cluster)) * unlike(space.cluster)


def sharers(space: Space) -> Ints:
    """Replicas that share out what they have."""
    return np.where(space.column("shard") > 0, space.column("shard"), space.column("dp"))


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
def _fitting(of: Columns, limit: float) -> Bools:
    found = np.empty(len(of.small), np.bool_)
    for row in range(len(of.small)):
        found[row] = _fits(of, row, limit)
    return found


@njit(cache=True)
def _fullest(of: Columns, rows: Bools, least: Floats, limit: float, close: float) -> Floats:
    """The limits within which rows no longer fit, by halving."""
    found = least.copy()
    for row in range(len(of.small)):
        if not rows[row]:
            continue
        low, high = least[row], max(limit, least[row])
        if _fits(of, row, low):
            continue
        while high - low > close * high:
            middle = 0.5 * (low + high)
            if _fits(of, row, middle):
                high = middle
            else:
                low = middle
        found[row] = low
    return found


@njit(cache=True)
def _in_flight(schedule: int, rank: int, ranks: int, micro: int, pairs: int) -> int:
    """Micro-batches of every stage of a rank that are in flight when it first goes back, at least."""
    if schedule == _INTERLEAVED:
        rounds = max(1, micro // ranks)
        group = micro // rounds if micro % rounds == 0 else ranks
        return int(min(group, 2 * (ranks - rank) - 1))
    apart = ranks // pairs  # ranks between the pairs of pipelines
    place = rank % apart
    return int(min(micro // (2 * pairs), min(place, apart - 1 - place) + 1))


@njit(cache=True)
def _fits(of: Columns, row: int, limit: float) -> bool:
    """Whether some cuts of a row may fit. The larger micro-batches come first, so they are among those in flight."""
    kind, stages, micro, schedule = of.small[row], of.pp[row], of.micro[row], of.schedule[row]
    blocks = of.weights.shape[1]
    each, more = of.left[of.kept[row], kind], of.left[of.kept[row], of.large[row]]
    share = 1.0 / of.sharers[row]
    weight = share if of.zero[row] == 3 else 1.0
    gradient = share if of.zero[row] >= 2 else 1.0
    state = share if of.zero[row] >= 1 else 1.0
    kept = of.several[row]  # gradients are there before any pass
    if schedule in (_INTERLEAVED, _CHIMERA, _DOUBLED):
        copies = 1 if schedule == _INTERLEAVED else 2 * of.pairs[row]
        total = flying = have = need = 0.0
        for b in range(blocks):
            total += weight * of.weights[kind, b] + state * of.states[kind, b]
            total += gradient * of.bucketed[kind, b] if kept or copies > 1 else 0.0
            flying += each[b]
        fewest, most = micro, 0
        for rank in range(stages):
            held = _in_flight(schedule, rank, stages, micro, of.pairs[row])
            fewest, most = min(fewest, held), max(most, held)
            have += limit / (total + held * flying)
        for b in range(blocks):
            own = weight * of.weights[kind, b] + state * of.states[kind, b]
            own += gradient * of.bucketed[kind, b] if kept or copies > 1 else 0.0
            few = (own + fewest * each[b]) / (total + fewest * flying)
            need += copies * min(few, (own + most * each[b]) / (total + most * flying))
        return bool(need <= have)
    if of.chunks[row] > 1 or schedule == _GEMS:  # all ranks together
        held = micro if schedule == _LOOPED else 1
        copies = 2 if schedule == _GEMS and stages % 2 == 0 else 1
        total = 0.0
        for b in range(blocks):
            own = weight * of.weights[kind, b] + state * of.states[kind, b]
            own += gradient * of.bucketed[kind, b] if kept or copies > 1 else 0.0
            total += copies * own + held * each[b]
        return bool(total <= limit * stages)
    block = 0
    for stage in range(stages):
        held = 1
        if schedule == _GPIPE:
            held = micro
        elif schedule == _IN_TURN:
            held = min(micro, stages - stage)
        elif schedule == _EARLY:
            held = min(micro, 2 * (stages - stage) - 1)
        first = min(held, of.larger[row])
        lasting, grown, stays, flying, last = 0.0, 0.0, 0.0, 0.0, 0.0
        while block < blocks:
            lasting += weight * of.weights[kind, block] + state * of.states[kind, block]
            grown += gradient * of.gradients[kind, block]
            if kept:  # what several blocks use is in a bucket where they are one stage for certain
                stays += gradient * (of.gradients if stages == 1 else of.bucketed)[kind, block]
            flying += (held - first) * each[block] + first * more[block]
            last += more[block]
            need = max(lasting + flying + stays, lasting + grown + flying - last)
            if need > limit:
                break
            block += 1
    return bool(block == blocks)
