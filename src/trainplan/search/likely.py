"""About what a step takes: no bound, but an order in which to look.

Bounds must hold for the best cuts and whatever overlaps, so of pipelines they say nothing of gradients, nor of what
messages of one node do to each other. On a slow network that is most of a step. Here both are guessed: how long the
gradients of a stage take to be summed, less the backward pass that hides them, and how long the network card of a node
needs for what its ranks send.
"""

from __future__ import annotations

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import WORDS, plan
from trainplan.plan.rules import SPLIT_BACKWARD, TWO_WAYS
from trainplan.predict import collectives
from trainplan.predict.contention import at_least
from trainplan.program.program import Ints
from trainplan.search.columns import Space
from trainplan.search.floor import Floats, Floors, unique

_WORDS = WORDS["schedule"]
_HALF = [_WORDS.index(word) for word in (*SPLIT_BACKWARD, *TWO_WAYS)]
_BOTH = [_WORDS.index(word) for word in TWO_WAYS]
_LARGE = 2**30  # bytes, of which what is sent has its rate
_BACK = 2 / 3  # of compute is backward


def likely(space: Space, known: Floors, rows: Ints) -> Floats:
    """Seconds of a step of some plans, with equal stages: their bounds, stretched by what pipelines wait, and by what
    ranks of a node that compute at once slow each other down; what they send; and the sums of gradients that nothing
    hides."""
    pp, micro, chunks, schedule = (space.column(field)[rows] for field in ("pp", "micro", "chunks", "schedule"))
    idle = (pp - 1) / chunks / np.where(np.isin(schedule, _HALF), 2, 1)
    busy = np.where(schedule == _WORDS.index("naive"), 1.0, micro / (micro + idle))
    found = known.seconds[rows] / np.where(np.isin(schedule, _HALF) | (chunks > 1), busy, 1.0)
    if space.cluster.contention or space.cluster.spread:
        found = found * _slowed(space, rows)
    return np.asarray(found + _sending(space, known, rows) + _waiting(space, known, rows, found))


def _slowed(space: Space, rows: Ints) -> Floats:
    """How many times as long ranks take beside the others of their node."""
    dp, tp = (space.column(field)[rows] for field in ("dp", "tp"))
    each, which = unique(dp, tp, space.ranks[rows] // (dp * tp))
    company = [at_least(plan(dp=d, tp=t, pp=r), space.cluster, space.batch) for d, t, r in each.tolist()]
    return np.array([one.about(1.0) / one.least for one in company])[which]


def _sending(space: Space, known: Floors, rows: Ints) -> Floats:
    """Seconds in which the busiest network card passes what stages send each other, there and back."""
    cluster, inside = space.cluster, len(space.cluster.nodes[0].devices)
    dp, tp, chunks = (space.column(field)[rows] for field in ("dp", "tp", "chunks"))
    if len(cluster.nodes) == 1:
        return np.zeros(len(rows))
    talk = collectives.message(cluster, 0, inside, _LARGE)
    sizes = [(part.each * part.next * (1 + part.back)).sum() / max(part.next.sum(), 1.0) for part in known.lasting]
    at_once = np.minimum(dp * tp, inside)  # ranks of a node that send to another
    crowd = np.maximum(1.0, at_once * max((share for _, share in talk.cards), default=0.0))
    each = np.array(sizes)[known.variant[rows]] * -(-space.batch // dp) * chunks
    return np.where(_leaves(space, rows, inside), each * crowd * talk.bytes_s / _LARGE, 0.0)


def _leaves(space: Space, rows: Ints, inside: int) -> np.ndarray:
    """Whether a pipeline has stages on several nodes."""
    return np.asarray((space.column("pp")[rows] > 1) & (space.ranks[rows] > inside))


def _waiting(space: Space, known: Floors, rows: Ints, step: Floats) -> Floats:
    """Seconds that sums of gradients take beyond what hides them, and beyond what the bounds know of them."""
    fields = ("dp", "tp", "pp", "micro", "zero", "shard", "schedule", "pairs")
    dp, tp, pp, micro, zero, shard, schedule, pairs = (space.column(field)[rows] for field in fields)
    twice = np.isin(schedule, _BOTH)  # ranks hold a stage of every direction, and so do others
    keys, which = unique(dp, tp, np.minimum(pp, 2), shard, twice * pp)
    rates = np.array([_byte(space.cluster, *key) for key in keys.tolist()]).reshape(-1, 3)[which]
    gradients = np.array([part.gradients.sum() for part in known.lasting])[known.variant[rows]]
    # Sums, or as much in halves: with zero=2 every micro-batch scatters, with zero=3 it gathers twice as well.
    times = np.where(zero == 3, 1.5 * micro, np.where(zero == 2, (1 + micro) / 2, 1.0))
    each = times * gradients / pp * np.where(twice, 2 * pairs, 1)
    hidden = step * _BACK / np.where(zero > 1, 1, micro)
    alone, beside = rates[:, 0] * each, rates[:, 1] * each + rates[:, 2] * gradients / pp
    return np.where(pp > 1, np.maximum(0.0, beside - hidden), beside - alone)


def _byte(cluster: Cluster, dp: int, tp: int, stages: int, shard: int, ways: int) -> tuple[float, ...]:
    """Seconds a byte of a sum over replicas (of those that share out, where groups of them do): one group alone; all
    groups of a stage at once; and over those groups, which comes once a step. `stages`: 2 for any number of them;
    `ways`: how many, where they come in both directions, so that the first is on the last ranks as well."""
    inside, span = len(cluster.nodes[0].devices), dp * tp
    if ways:
        both = (*range(0, span, tp), *range((ways - 1) * span, ways * span, tp))
        return *_sum(cluster, both, max(tp, inside // dp)), 0.0
    if dp == 1:
        return 0.0, 0.0, 0.0
    # Of stages that lie otherwise than nodes do, one that lies across.
    across = inside // span * span
    first = across if stages > 1 and inside % span and across + span <= cluster.world else 0
    near = shard or dp
    alone, beside = _sum(cluster, tuple(range(first, first + near * tp, tp)), tp)
    far = _sum(cluster, tuple(range(0, span, shard * tp)), shard * tp)[1] / shard if shard else 0.0
    return alone, beside, far


def _sum(cluster: Cluster, members: tuple[int, ...], groups: int) -> tuple[float, float]:
    """Seconds a byte of a sum over some ranks: alone, and where so many groups like it share the cards of nodes."""
    talk = collectives.all_reduce(cluster, members, _LARGE)
    share = max((share for _, share in talk.cards), default=0.0)
    return talk.seconds / _LARGE, (talk.lead_s + talk.bytes_s * max(1.0, share * groups)) / _LARGE
