"""About what a step takes: no bound, but an order in which to look."""

from __future__ import annotations

import numpy as np

from trainplan.plan.plan import WORDS, plan
from trainplan.plan.rules import SPLIT_BACKWARD, TWO_WAYS
from trainplan.predict.contention import at_least
from trainplan.program.program import Ints
from trainplan.search.columns import Space
from trainplan.search.floor import Floats, Floors

_WORDS = WORDS["schedule"]
_HALF = [_WORDS.index(word) for word in (*SPLIT_BACKWARD, *TWO_WAYS)]


def likely(space: Space, known: Floors, rows: Ints) -> Floats:
    """Seconds of a step of some plans, with equal stages: their bounds, stretched by what pipelines wait, and by what
    ranks of a node that compute at once slow each other down."""
    pp, micro, chunks, schedule = (space.column(field)[rows] for field in ("pp", "micro", "chunks", "schedule"))
    idle = (pp - 1) / chunks / np.where(np.isin(schedule, _HALF), 2, 1)
    busy = np.where(schedule == _WORDS.index("naive"), 1.0, micro / (micro + idle))
    found = known.seconds[rows] / np.where(np.isin(schedule, _HALF) | (chunks > 1), busy, 1.0)
    if not space.cluster.contention and not space.cluster.spread:
        return np.asarray(found)
    dp, tp = (space.column(field)[rows] for field in ("dp", "tp"))
    ranks = space.ranks[rows] // (dp * tp)
    keys = np.column_stack([dp, tp, ranks])
    each, which = np.unique(keys, axis=0, return_inverse=True)
    company = [at_least(plan(dp=d, tp=t, pp=r), space.cluster, space.batch) for d, t, r in each.tolist()]
    slowed = np.array([one.about(1.0) / one.least for one in company])[which.reshape(-1)]
    return np.asarray(found * slowed)
