"""What `trainplan run` leaves beside its logs, so that the run can be judged and calibrated by later: `run.json`.

It is the file of a case with one candidate, as `bench run` writes them (`results.py`), with the profile and the cluster
that it was predicted from beside it. Workers of asynchronous servers have no step in common; of these nothing is kept.
"""

from __future__ import annotations

from pathlib import Path

from trainplan.bench.results import Outcome, Result
from trainplan.bench.row import Difference, Row
from trainplan.cluster.cluster import Cluster
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import text
from trainplan.predict.accuracy import plan_kind
from trainplan.profile.profile import Profile
from trainplan.program.timeline import Timeline
from trainplan.report.ran import Ran

RUN, PROFILE, CLUSTER = "run.json", "run.profile.json", "run.cluster.json"


def keep(ran: Ran, timeline: Timeline, workload: str, profile: Profile, cluster: Cluster) -> None:
    """Write it into the folder of the run, where there is anything to know."""
    found, folder = ran.prediction, Path(ran.out)
    if ran.step_s is None or ran.error is None or found.plan.exchange in ASYNCHRONOUS:
        return
    joined, made = ran.joined, profile.provenance
    corrected = ran.corrected_error
    line = text(found.plan)
    row = Row(
        workload=workload, plan=line, kind=plan_kind(found.plan), ranks=found.plan.world, batch=found.batch,
        predicted_s=found.step_s, measured_s=ran.step_s, error=ran.error if corrected is None else corrected,
        raw_error=ran.error, noise_floor=(joined.noise if joined else None) or 0.0, steps=len(ran.step_seconds),
        by_kind={kind.name: (kind.predicted_s, kind.measured_s) for kind in joined.kinds} if joined else {},
        asked=line, rounds=(ran.error if corrected is None else corrected,),
        worst=tuple(Difference(op.name, op.rank, op.predicted_s, op.measured_s) for op in joined.ops[:8])
        if joined else (),
        drift=ran.drift,
        spent={kind: took / timeline.world for kind, took in timeline.seconds_by_kind().items()},
    )  # fmt: skip
    result = Result(
        plan_kind(found.plan), line, line, found.fits, found.step_s, found.peak_bytes, row=row
    )  # fmt: skip
    network, _, dataset = workload.partition(",")[0].partition(":")
    profile.save(folder / PROFILE)
    cluster.save(folder / CLUSTER)
    Outcome(
        made.machine, profile.device, made.versions.get("torch", ""), made.made[:10], "trainplan run", network,
        "text" if "=" in dataset else dataset, workload, found.plan.world, found.batch, rounds=1, results=(result,),
        cluster=CLUSTER, profile=PROFILE,
    ).save(folder / RUN)  # fmt: skip
