"""The profile of one rank as a plan has it: of ranks that share blocks, in the plan's precision."""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.plan.sliced import SELECTIVE
from trainplan.predict.speeds import device_of
from trainplan.profile.profile import Profile
from trainplan.profile.variant import Choice, variant


def planned(plan: Plan, profile: Profile, cluster: Cluster) -> Profile:
    """That of a rank of a plan; the profile itself where the plan leaves blocks as they are."""
    choice = Choice(plan.tp, plan.sequence == "on", plan.precision, plan.recompute == SELECTIVE)
    if choice == Choice() or is_planned(profile):
        return profile
    return variant(profile, device_of(profile, cluster), choice)


def is_planned(profile: Profile) -> bool:
    """Whether a profile is of a rank of some plan already."""
    return profile.varied
