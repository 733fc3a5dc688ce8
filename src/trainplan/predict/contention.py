"""Ranks of one node that compute at the same time slow each other down: by how much, in this program?

The cluster's table says how many times as long compute takes while 1, 2, … ranks of a node are at it. How many are is a
matter of the program: of equal replicas always all, in the naive order one, in orders with bubbles now more and now
fewer. So a program is played once as if nobody was in anybody's way, and what a rank pays is the mean of the table over
the time in which it computes:

    ∫ table[n(t)] dt / ∫ dt      of the last step, while this rank computes; n(t) = ranks of its node that do

Then it is played with that. (With a table that rises in a straight line, and for all ranks of a node together, this is
the table at ∫ n² dt / ∫ n dt.) Playing it a third time would change little, since the ranks of a node that wait for
each other are slowed down much alike: their bubbles grow as their work does. With a table that ends at 1.13, as
that of four slices of a GPU does, it is less than 0.1 % (`tests/predict/test_contention.py`), with one that doubles up
to 4 %.

And they wait for each other, so that the slowest of them counts. Devices that should be equally fast are not: of the
cores of a shared machine now one and now another is a few percent slower, for seconds. Of n that compute at once, each
of them the `spread` of the cluster (a standard deviation) off the mean, the slowest takes

    1 + spread · E[largest of n standard normal numbers]

times as long as the mean, and the table is so much higher. (Workers of asynchronous servers wait for nobody: there the
mean counts.)

Some of n is known before: a rank that stands for its copies in all replicas computes when they do, and no more ranks
compute than there are. Where the table is the same from the one to the other, nothing need be played for it; and the
least of the table from the one to the other is what a search may count on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.predict.clock import Played
from trainplan.program.ops import COMPUTES
from trainplan.program.program import Ints, are

Floats = NDArray[np.float64]
_COMPUTE = are(COMPUTES)


@dataclass(frozen=True)
class Contention:
    """The ranks of a program by node, and what it costs them to compute at once."""

    table: Floats  # by the number of ranks that do, from 1 on
    node: Ints  # of each rank of the program
    stands: Ints  # [node, rank of the program]: for how many ranks of that node it stands

    @cached_property
    def possible(self) -> list[tuple[float, ...]]:
        """Of each rank, the part of the table for as many ranks as may compute while it does."""
        fewest = self.stands[self.node, np.arange(len(self.node))].tolist()
        most = self.stands.sum(axis=1)[self.node].tolist()
        return [tuple(self.table[few - 1 : many].tolist()) for few, many in zip(fewest, most, strict=True)]

    @cached_property
    def least(self) -> float:
        """Compute takes at least so many times as long, on every rank."""
        return min(map(min, self.possible))

    def about(self, share: float) -> float:
        """How many times as long it takes, roughly, where ranks compute for this share of the time."""
        return max(row[round((len(row) - 1) * share)] for row in set(self.possible))

    def known(self) -> Floats | None:
        """Of each rank, how many times as long compute takes, where that does not depend on when the others compute."""
        same = all(len(set(row)) == 1 for row in set(self.possible))
        return np.array([row[0] for row in self.possible]) if same else None

    def found(self, played: Played, period: float) -> Floats:
        """The same in a program as it was played without; its steps follow each other after `period` seconds."""
        program = played.program
        begin = played.start[program.step == program.steps - 1].min()
        ops = np.flatnonzero(_COMPUTE[program.kind] & (played.end > begin))
        rank, start, end = program.rank[ops], played.start[ops], played.end[ops]
        last = program.step[ops] == program.steps - 1
        # The step after the last is not in the program. Some orders begin it before this one is over.
        start, end = np.append(start, start[last] + period), np.append(end, end[last] + period)
        times = np.append(start, end)
        order = np.argsort(times)
        times, spans = times[order], np.diff(times[order])
        spent, paid = np.zeros(len(self.node)), np.zeros(len(self.node))
        for node in np.unique(self.node):
            joins = self.stands[node][np.append(rank, rank[last])]
            busy = np.cumsum(np.append(joins, -joins)[order])[:-1]
            price = self.table[np.clip(busy, 1, self.stands[node].sum()) - 1]
            until = np.append(0.0, np.cumsum(price * spans))  # what one would pay who computed all the time
            own = np.flatnonzero(last & (self.node[rank] == node))
            cost = np.interp(end[own], times, until) - np.interp(start[own], times, until)
            spent += np.bincount(rank[own], weights=end[own] - start[own], minlength=len(spent))
            paid += np.bincount(rank[own], weights=cost, minlength=len(spent))
        return np.where(spent > 0, paid / np.where(spent > 0, spent, 1.0), 1.0)


def contention(plan: Plan, cluster: Cluster, fold: bool) -> Contention:
    """That of a plan's program. `fold`: only the first replica is in it, and stands for the others.

    >>> from trainplan.cluster.parse import cluster
    >>> from trainplan.plan.plan import plan
    >>> contention(plan(dp=4, pp=2, schedule="gpipe"), cluster("2x4xTitanRTX"), fold=True).stands.tolist()
    [[4, 0], [0, 4]]
    """
    everybody = (*plan.leaders, *range(plan.workers, plan.world))
    copies = [plan.ranks(replica) for replica in range(plan.dp)] if fold else [everybody]
    node = np.array([[cluster.machine_of(rank) for rank in copy] for copy in copies], dtype=np.int64)
    stands = np.zeros((len(cluster.nodes), node.shape[1]), dtype=np.int64)
    for copy in copies:  # a rank stands for its copies, and for those that share its stages with it
        for place, rank in enumerate(copy):
            for other in plan.slicers(rank) if plan.tp > 1 else (rank,):
                stands[cluster.machine_of(other), place] += 1
    table = np.array(cluster.contention or (1.0,))
    most = int(stands.sum(axis=1).max())
    apart = 0.0 if plan.exchange in ASYNCHRONOUS else cluster.spread
    slowest = 1.0 + apart * np.array([largest(count) for count in range(1, most + 1)])
    return Contention(table[np.minimum(np.arange(most), len(table) - 1)] * slowest, node[0], stands)


@cache
def largest(count: int) -> float:
    """The largest of so many numbers of the standard normal distribution, as is to be expected (Blom's approximation).

    >>> [round(largest(count), 2) for count in (1, 2, 8)]  # exactly 0, 0.56 and 1.42
    [0.0, 0.59, 1.43]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def alike(plan: Plan, cluster: Cluster, batch: int) -> bool:
    """Whether one replica stands for all in this respect: they have as much to do, in as much company."""
    if len(set(cluster.contention)) <= 1 and not cluster.spread:
        return True
    stands = contention(plan, cluster, fold=True).stands
    company = {
        tuple(tuple(stands[cluster.machine_of(rank)].tolist()) for rank in plan.ranks(replica))
        for replica in range(plan.dp)
    }
    return batch % plan.dp == 0 and not plan.ratio and len(company) == 1


def at_least(plan: Plan, cluster: Cluster, batch: int) -> Contention:
    """That of a plan which may not be cut yet: replicas count for each other only where they keep step for certain."""
    (node, *others) = {cluster.node_of(rank) for rank in range(plan.world)}
    one_way = plan.pp == 1 or not (others or cluster.nodes[node].pairs)  # all messages take as long
    keeps_step = one_way and batch % plan.dp == 0 and not plan.ratio
    return contention(plan, cluster, fold=cluster.uniform and keeps_step)
