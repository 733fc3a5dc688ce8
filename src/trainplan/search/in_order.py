"""What a plan cannot beat in the order of its passes: every rank's list is played, with nothing in it but passes and
the messages between stages. Closer than formulas, and a hundredth of a simulation's work.

A pass starts when the one before it in its rank's list is over, and what it reads has come; it takes at least the
seconds of its blocks on the fastest device, and a message those of its bytes on the fastest link that it may take. All
that is left out (sums, gathers, hosts, links that are shared) only adds. So the last pass ends no sooner than here.

A step takes as long. The last pass of a step is one of the first stage, since all that comes to it from behind goes on
to there. Ranks that hold it step once its gradients are summed, after the last pass of any of them, and go on only
then; and whatever the next step computes waits for a forward pass of the first stage. So steps do not overlap, and the
optimizer's step of the first stage, and what is left of its sums, come between them. (Not where gradients of weights
wait: their passes may end last anywhere.)
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import SPLIT_BACKWARD
from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints
from trainplan.program.schedules import Orders, orders_of
from trainplan.search.blocks import Blocks
from trainplan.search.talk import sent

Floats = NDArray[np.float64]


def in_order(
    sketch: Plan, stages: tuple[int, ...], small: Blocks, large: Blocks, larger: int, cluster: Cluster
) -> float:  # fmt: skip
    """Seconds of all passes of a step, from the first to the last; 0 where nothing is certain."""
    first = [0, *stages]
    several = sketch.dp * sketch.lines > 1  # replicas, or lines, that only sums of the first stage hold together
    if sketch.spread or sketch.schedule in SPLIT_BACKWARD or (several and not small.alone[: stages[0]].sum()):
        return 0.0
    sizes = (small, large)
    forward, recomputed = (
        np.array([np.add.reduceat(getattr(part, name), first) for part in sizes]) for name in ("forth", "again")
    )
    backward = np.array([np.add.reduceat(part.once - part.forth, first) for part in sizes])
    adding = np.add.reduceat(small.adding, first)
    known = {0.0: 0.0}

    def seconds(sizes: Floats) -> Floats:
        for size in set(sizes.tolist()) - set(known):
            known[size] = sent(cluster, sketch.dp * sketch.tp, size)
        return np.array([known[size] for size in sizes.tolist()])

    cut = np.array(stages) - 1
    there, back = seconds(small.there[cut]), seconds(small.back[cut])
    whole = plan(
        pp=sketch.pp, schedule=sketch.schedule, chunks=sketch.chunks, pairs=sketch.pairs, micro=sketch.micro,
        blocks=sketch.wanted,
    )  # fmt: skip
    orders = orders_of(whole)
    begin, stage, micro, goes_back = orders.once("passes alone", lambda: _passes(orders))
    kept = sketch.dp * orders.once("copies", lambda: copies(orders, len(first))) > 1  # gradients, in buckets
    # Micro-batches that are recomputed: all of them, or all but the last.
    again = {"full": sketch.micro, "except-last": sketch.micro - 1}.get(sketch.recompute, 0)
    return float(
        _played(
            begin,
            stage,
            micro,
            goes_back,
            forward,
            recomputed,
            backward,
            adding,
            there,
            back,
            sketch.micro,
            larger,
            again,
            kept,
        )
    )


def behind(sketch: Plan, stages: tuple[int, ...], small: Blocks, sums: float) -> float:
    """Seconds that come between the last pass of a step and the next step, at least: the first stage's optimizer step,
    and its `sums` as far as they take longer than the pass beside which they can begin."""
    own = slice(0, stages[0])
    again = sketch.recompute in ("full", "except-last")  # the last pass is not always the last micro-batch's
    step = float(small.stepping[own].sum()) / (sketch.sharers if sketch.zero else 1)
    if sketch.lines > 1:
        return step
    last = small.once[own].sum() - (not again) * small.forth[own].sum() + small.adding[own].sum()
    return step + max(0.0, sums - float(last))


def copies(orders: Orders, stages: int) -> Ints:
    """Of every stage, how many ranks pass it."""
    return np.bincount(np.concatenate([np.unique(order[:, 2]) for order in orders]), minlength=stages)


def _passes(orders: Orders) -> tuple[Ints, Ints, Ints, Bools]:
    """The lists of all ranks, one after the other: where each begins, and of every pass its stage, its micro-batch, and
    whether it goes back."""
    begin = np.cumsum([0, *map(len, orders)])
    whole = np.concatenate(list(orders))
    return begin, whole[:, 2].copy(), whole[:, 3].copy(), whole[:, 0] == Kind.B


@njit(cache=True)
def _played(
    begin: Ints, stage: Ints, micro: Ints, goes_back: Bools, forward: Floats, recomputed: Floats, backward: Floats,
    adding: Floats, there: Floats, back: Floats, count: int, larger: int, again: int, kept: Bools,
) -> float:  # fmt: skip
    """When the last pass is over. Ranks go on in turn, each as far as what it reads is there."""
    ranks, stages = len(begin) - 1, len(adding)
    over = np.full((2, stages, count), np.inf)  # when a pass is: forward, back
    home = np.empty((stages, count), np.int64)
    for rank in range(ranks):
        for k in range(begin[rank], begin[rank + 1]):
            home[stage[k], micro[k]] = rank
    found = np.zeros((ranks, stages), np.bool_) | kept  # whether a rank has gradients of a stage that a pass adds to
    at, free, left = begin[:-1].copy(), np.zeros(ranks), len(stage)
    while left:
        before = left
        for rank in range(ranks):
            while at[rank] < begin[rank + 1]:
                k = at[rank]
                s, m = stage[k], micro[k]
                size = 1 if m < larger else 0
                start, ready = free[rank], 0.0
                if goes_back[k]:
                    if m < again:
                        start += recomputed[size, s]  # which needs no gradient
                    if s < stages - 1:
                        ready = over[1, s + 1, m] + (back[s] if home[s + 1, m] != rank else 0.0)
                    took = backward[size, s] + (adding[s] if found[rank, s] else 0.0)
                else:
                    if s:
                        ready = over[0, s - 1, m] + (there[s - 1] if home[s - 1, m] != rank else 0.0)
                    took = forward[size, s]
                if ready == np.inf:
                    break
                free[rank] = max(start, ready) + took
                if goes_back[k]:
                    over[1, s, m], found[rank, s] = free[rank], True
                else:
                    over[0, s, m] = free[rank]
                at[rank] += 1
                left -= 1
        if left == before:
            return 0.0  # no order of work that can be played like this one
    return float(free.max())
