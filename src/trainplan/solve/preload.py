"""How a batch comes to its devices, where a search may choose.

Where devices have memory of their own, somebody has to bring it there: so what is shown says how, and its seconds and
bytes are in it. The clock says whether it is worth the room for a second batch to bring it ahead. Where the host's
memory is the device's (a CPU), nothing has to be brought, and it stays as it is given.
"""

from __future__ import annotations

from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.predict.predict import Prediction, predict
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import NOTHING, best


def brought(found: Prediction, cluster: Cluster, batch: int, tables: Tables) -> Prediction:
    """A plan with its batches brought to the devices: ahead where that is faster and fits, else as steps begin."""
    plan, profile = found.plan, tables.profile
    apart = any(cluster.device(rank).host_rate for rank in range(plan.workers))
    if plan.preload != "given" or not apart or not profile.input_bytes_per_sample:
        return found
    waited = predict(replace(plan, preload="off"), profile, cluster, batch)
    if plan.overlap == "off" or waited.step_s - found.step_s <= NOTHING * waited.step_s:
        return waited  # there is nothing to be gained
    return best([waited, predict(replace(plan, preload="on"), profile, cluster, batch)])
