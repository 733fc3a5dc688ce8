"""How many samples each replica trains where their devices are not equally fast.

A step ends with the slowest replica. So samples are dealt out one by one, each to the replica that would be through
first with it: that makes the slowest replica as fast as can be, since a replica never takes less time for more samples.

    seconds of a replica with n samples = micro · t(n / micro) / (speed of its slowest device)

with t the seconds of a micro-batch in all blocks. Where all devices are alike, nothing is dealt out otherwise than
evenly, and nothing is said of it.
"""

from __future__ import annotations

import heapq
import math

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.predict.speeds import speeds
from trainplan.profile.profile import Profile


def balanced(plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> tuple[int, ...]:
    """The ratio of the samples of a plan's replicas on this cluster; none where they have equally many."""
    if plan.dp == 1 or plan.exchange in ASYNCHRONOUS or len(cluster.kinds) == 1:
        return ()
    pace = speeds(profile, cluster)
    own = [min(pace[rank] for rank in plan.ranks(replica)) for replica in range(plan.dp)]
    if len(set(own)) == 1:
        return ()

    def seconds(replica: int, samples: int) -> float:
        each = max(1, round(samples / plan.micro))
        passes = (profile.total(which, 0, plan.blocks, each) for which in ("forward_s", "backward_s"))
        return samples / each * sum(passes) / own[replica]

    counts = [plan.micro] * plan.dp
    queue = [(seconds(replica, plan.micro + 1), replica) for replica in range(plan.dp)]
    heapq.heapify(queue)
    for _ in range(batch - sum(counts)):
        _, replica = queue[0]
        counts[replica] += 1
        heapq.heapreplace(queue, (seconds(replica, counts[replica] + 1), replica))
    common = math.gcd(*counts)
    return tuple(count // common for count in counts)
