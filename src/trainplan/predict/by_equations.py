"""What the thesis's equations (`thesis.py`) say of a plan, from what its author had: one device's seconds, and links.

Its predictor timed a few batches on one device, measured the links of one node, and knew two systems: replicas that sum
their gradients around a ring (5.1), and a pipeline that computes and exchanges in turn (6.1 and 6.2). Of every other
plan it says nothing. Read as in its chapters 3 to 6: the seconds of one device are of batches as large as those that a
worker gets; what leaves a stage is the output of its last layer, and skips over a cut are left out.
"""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster
from trainplan.errors import InputError
from trainplan.plan.plan import Plan
from trainplan.predict.thesis import compute_seconds, exchange_seconds, horovod_seconds, link_seconds
from trainplan.profile.profile import Profile

RINGS = ("all-reduce", "ring", "horovod")
IN_TURN = ("gpipe", "lockstep")


def by_equations(plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> float | None:
    """Seconds of a step; None where the thesis has no equation."""
    whole = plan.chunks == 1 and not plan.zero and not plan.spread and plan.tp == 1 and plan.pairs == 1
    if plan.world == 1 and plan.micro == 1:
        return one_device(profile, batch)
    if not whole:
        return None
    if plan.pp == 1 and plan.micro == 1 and plan.exchange in RINGS:
        links = [cluster.link(rank, (rank + 1) % plan.dp) for rank in range(plan.dp)]
        gradients = sum(parameter.bytes for parameter in profile.parameters if parameter.trainable)
        alone = plan.dp * one_device(profile, batch / plan.dp)
        return horovod_seconds(alone, gradients, [(link.latency_s, link.rate) for link in links])
    if plan.dp == 1 and plan.schedule in IN_TURN:
        samples = batch / plan.micro
        alone = plan.micro * one_device(profile, samples)
        seconds = []
        for rank, cut in enumerate(plan.stages):
            link = cluster.link(rank, rank + 1)
            seconds.append(link_seconds(link.latency_s, link.rate, _leaves(profile, cut), round(samples)))
        try:
            return compute_seconds(alone, plan.pp, plan.micro) + exchange_seconds(seconds, plan.micro)
        except InputError:  # fewer micro-batches than 6.2 counts on
            return None
    return None


def one_device(profile: Profile, samples: float) -> float:
    """Seconds of a batch on one device, the optimizer's step among them: what the thesis timed."""
    blocks = len(profile.blocks)
    passes = sum(profile.total(quantity, 0, blocks, samples) for quantity in ("forward_s", "backward_s"))
    return passes + profile.update_s(0, blocks)


def _leaves(profile: Profile, cut: int) -> float:
    """Bytes a sample of the output of the last layer before a cut."""
    return sum(c.bytes_per_sample for c in profile.crossings if c.producer == cut - 1 and c.consumers[-1] >= cut)
