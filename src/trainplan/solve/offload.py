"""How much a plan offloads: no more than it must to fit.

The policy of `program/offload.py` is asked at every operation of every rank's list, with the memory of its device. The
clock plays what comes out; where that is still over (collectives of several ranks meet otherwise than their lists say),
the policy is asked again with that much less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.offload import shortest
from trainplan.plan.plan import Plan
from trainplan.predict.planned import planned
from trainplan.predict.predict import MEMORY_MARGIN, Prediction, predict
from trainplan.profile.profile import Profile
from trainplan.program.lower import lower
from trainplan.program.lower.away import most_away
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.offload import absences, decide, levels
from trainplan.solve.limits import usable
from trainplan.units import MIB, gib

_TRIES = 4  # times that the policy is asked


def offloaded(plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> Prediction:
    """What a plan does that offloads as much as it must: nothing where it fits without; all that can go where it does
    not fit even so."""
    found = predict(plan, profile, cluster, batch)
    if found.fits:
        return found
    most = all_away(plan, profile, cluster, batch)
    if not most.away:
        return found
    least = predict(most, profile, cluster, batch)
    if not least.fits:
        return least
    program = lower(most, planned(plan, profile, cluster), batch, cluster.backend, fold=True)
    lists = [(levels(program, rank), absences(program, rank)) for rank in range(program.world)]
    budget = int(usable(cluster))
    for _ in range(_TRIES):
        depth = np.zeros((plan.depth, plan.micro), dtype=np.int64)
        for level, parcels in lists:
            for parcel, goes in zip(parcels, decide(level, parcels, budget), strict=True):
                if goes:
                    depth[parcel.stage, parcel.micro] = max(depth[parcel.stage, parcel.micro], parcel.section + 1)
        away = shortest(tuple(tuple(row) for row in depth.tolist()))
        trial = predict(replace(plan, away=away), profile, cluster, batch)
        if trial.fits:
            return trial
        budget -= trial.over_bytes
    return least


def all_away(plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> Plan:
    """The plan with everything away that can be."""
    sketch = replace(plan, away=((1,),) * plan.depth)  # so that its passes are in sections
    layout = Layout(sketch, profile, batch, backend(cluster.backend), (0,))
    return replace(plan, away=shortest(most_away(layout)))


def refuse_too_little(found: Prediction, asked: str) -> None:
    """Refused where not even offloading makes a plan fit: with the smallest memory in which it would."""
    if found.fits or found.plan.offload != "activations":
        return
    has = int(found.limit_bytes / (1 - MEMORY_MARGIN))
    need = max(int(found.peak_bytes / (1 - MEMORY_MARGIN)), has + found.overdrawn_bytes if found.overdrawn_bytes else 0)
    need = -(-need // MIB) * MIB
    if need <= has:  # then it is the host's memory that is short
        why = f"its ranks would have {gib(found.host_bytes)} in the memory of one host, which has less"
        raise PlanError(asked, why, "more micro-batches, or recompute=full")
    why = f"with all activations away that can be, rank {found.peak.rank} still "
    if found.peak_bytes > found.limit_bytes:
        why += f"needs {gib(found.peak_bytes)} at {found.peak.op}, and of {gib(has)} it may use "
        why += gib(found.limit_bytes)
    else:
        why += f"has tensors of {gib(found.peak_bytes)}, for which torch asks for {gib(need)}, and has {gib(has)}"
    raise PlanError(asked, why, f"memory={need // MIB}MiB, more micro-batches, or recompute=full")
