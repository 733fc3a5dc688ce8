"""How a batch comes to its devices, where a search may choose.

Where devices have memory of their own, somebody has to bring it there: so what is shown says how, and its seconds and
bytes are in it. The clock says whether it is worth the room for a second batch to bring it ahead. Where the host's
memory is the device's (a CPU), nothing has to be brought, and it stays as it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.predict.predict import Prediction


def brought(found: Prediction, cluster: Cluster, trial: Callable[[Plan], Prediction]) -> Prediction:
    """A plan with its batches brought to the devices: ahead where that is faster and fits, else as steps begin."""
    plan = found.plan
    if plan.preload != "given" or not any(cluster.device(rank).host_rate for rank in range(plan.workers)):
        return found
    ahead = trial(replace(plan, preload="on")) if plan.overlap == "on" else None
    if ahead is not None and ahead.fits and ahead.step_s <= found.step_s:
        return ahead  # nothing is left to be gained
    waited = trial(replace(plan, preload="off"))
    better = ahead is not None and ahead.fits >= waited.fits and ahead.step_s < waited.step_s
    return ahead if better and ahead is not None else waited
