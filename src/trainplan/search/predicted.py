"""What is searched only where it is asked for, since it is predicted and not yet run: when it cannot be, and when it
should be, so that an answer says how."""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError, nearest
from trainplan.plan.plan import WORDS
from trainplan.profile.profile import Profile
from trainplan.profile.variant import Choice
from trainplan.profile.variant import refuse as refuse_choice

_FASTER = ("bf16", "fp16", "tf32")  # that tensor cores compute in, as one would choose


def refuse(profile: Profile, cluster: Cluster, precision: str) -> None:
    """Refused where plans are to be run: what is only predicted would be of no use."""
    asked = f"predicted={precision} for {profile.workload} on {cluster.name}"
    if precision not in WORDS["precision"]:
        why = f"it is the precision that all plans have, one of {', '.join(WORDS['precision'])}"
        raise PlanError(asked, why, f"predicted={nearest(precision, WORDS['precision'], 1)}")
    if cluster.source.startswith("probed") or cluster.contention:
        why = "the cluster was probed, so plans for it are to be run, and tp, sequence, precision and selective are not"
        raise PlanError(asked, why, "leaving it out, or a cluster of the catalogue, such as 8x8xA100-80")


def not_asked(profile: Profile, cluster: Cluster) -> list[str]:
    """What was not searched since nobody asked, with the option that asks: where all devices have tensor cores, which
    are faster than fp32, and plans can be predicted there."""
    precision = faster(cluster)
    try:
        refuse(profile, cluster, precision or "fp32")
        refuse_choice(profile, Choice(precision=precision or "fp32", selective=True))
    except PlanError:
        return []
    words = "another precision than fp32, tp, sequence and recompute=selective"
    return [f"{words} (--predicted {precision} does: predicted, not yet run here)"] if precision else []


def faster(cluster: Cluster) -> str:
    """The precision in which all its devices have tensor cores, by their data sheets; none where there is none.

    >>> from trainplan.cluster.parse import cluster
    >>> [faster(cluster(name)) for name in ("8xA100-80", "4xV100-16", "2xcpu")]
    ['bf16', 'fp16', '']
    """
    kinds = list(cluster.kinds.values())
    for precision in _FASTER:
        if all(kind.flops.get(precision, 0.0) > kind.flops.get("fp32", 0.0) for kind in kinds):
            return precision
    return ""
