"""How gradients travel, where a request leaves it open: in buckets of which size, and by which exchange.

Both are chosen by the clock. A bucket must be filled before it goes: large ones leave too late to be hidden behind the
rest of backward, small ones pay their latencies again and again. (torch's 25 MB hold nearly all of a model of 32 MiB,
which then waits for its last bucket.) Where even the best size leaves communication exposed, other exchanges are looked
at, but only the two that would be fastest with some size of bucket, were that all there is to it, and only if they are
faster than the backend's. NCCL makes such choices itself, beneath us.
"""

from __future__ import annotations

from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.decided import DECIDED
from trainplan.plan.exchanges import BY_BACKEND, HIERARCHICAL, check_nodes, uneven
from trainplan.plan.plan import Plan, Request
from trainplan.plan.text import brief
from trainplan.predict.collectives import one_of_several
from trainplan.predict.exchanges import in_rounds
from trainplan.predict.planned import planned
from trainplan.profile.profile import Profile
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.lower.backend import backend
from trainplan.program.lower.buckets import Bucket
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.units import Section, Unit
from trainplan.units import MIB, gib

BUCKETS = (1 * MIB, 4 * MIB, 8 * MIB, 25 * MIB, 64 * MIB, 256 * MIB)
FASTER = 0.02  # by so much an exchange must be ahead to be worth a simulation, and a step to leave the backend's own
MOST_TRIED = 2


def whole_bucket(profile: Profile) -> int:
    """The size of a bucket that holds all gradients of a model, in whole MiB: none larger makes a difference."""
    return _whole(sum(p.bytes for p in profile.parameters if p.trainable))


def _whole(size: int) -> int:
    return max(-(-size // MIB), 1) * MIB


def bucket_sizes(plan: Plan, profile: Profile) -> list[int]:
    """The bucket sizes that differ for this model: up to all gradients of a stage at once, in whole MiB."""
    most = max(sum(p.bytes for p in profile.parameters_of(*bound) if p.trainable) for bound in plan.bounds)
    return [*(size for size in BUCKETS if size < _whole(most)), _whole(most)]


def distinct_sizes(plan: Plan, profile: Profile, cluster: Cluster, batch: int, but: int | None = None) -> list[int]:
    """Of those sizes one for each program that comes of them, the first; not that of a plan that has one already
    (`but`). Weights that are larger than a bucket each travel alone, however much smaller it is."""
    sizes = [size for size in bucket_sizes(plan, profile) if size != but]
    if plan.offload == "activations":  # what goes away is to be found out for each
        return sizes
    own, chosen = planned(plan, profile, cluster), backend(cluster.backend)

    def together(size: int) -> tuple[list[list[Bucket]], list[list[Section]], list[list[Unit]]]:
        layout = Layout(replace(plan, bucket=size), own, batch, chosen, (0,))
        return layout.buckets, layout.sections, layout.units

    known = [together(but)] if but is not None else []
    found = []
    for size in sizes:
        way = together(size)
        if way not in known:
            known.append(way)
            found.append(size)
    return found


def check_bucket(request: Request, profile: Profile) -> None:
    """Refused where a bucket is asked for that holds nothing, or is larger than all gradients together, or where the
    exchange has none."""
    if request.bucket is None:
        return
    asked, most = f"plan {brief(request)!r}", whole_bucket(profile)
    if request.exchange in DECIDED:
        why = f"{request.exchange} decides while running what goes together, and has no buckets"
        instead = "slice" if request.exchange == "pace" else "threshold"
        raise PlanError(asked, why, f"{instead}={min(max(request.bucket, 1), most)}B without bucket, or neither")
    if request.bucket < 1:
        raise PlanError(asked, "a bucket of 0 bytes holds no gradient", "bucket=1MiB, or leaving it out")
    no_larger("bucket", request.bucket, profile, asked)


def no_larger(field: str, size: int, profile: Profile, asked: str) -> None:
    """Refused where what goes at once is asked to be larger than all gradients together."""
    most = whole_bucket(profile)
    if size > most:
        whole = sum(p.bytes for p in profile.parameters if p.trainable)
        why = f"a {field} of {gib(size)} is larger than all gradients of the model together, {gib(whole)}"
        raise PlanError(asked, why, f"{field}={most // MIB}MiB, which holds them all")


def on_nodes(plan: Plan, node: int | None, cluster: Cluster) -> Plan:
    """A plan whose exchange asks where ranks are, told so: as was asked, or as the cluster has them."""
    if node is not None:
        check_nodes(replace(plan, node=node), f"plan {brief(plan)!r} with node={node}", given=True)
        return replace(plan, node=node)
    if plan.exchange != HIERARCHICAL:
        return plan
    sizes = [len(cluster.nodes[n].devices) for n in dict.fromkeys(map(cluster.node_of, range(plan.world)))]
    if len(set(sizes)) > 1:
        why = f"the nodes of {cluster.name} have {' and '.join(map(str, sizes))} devices, and {HIERARCHICAL} wants as "
        raise PlanError(f"plan {brief(plan)!r}", f"{why}many on each", "exchange=ring")
    return replace(plan, node=sizes[0])


def other_exchanges(plan: Plan, profile: Profile, cluster: Cluster) -> list[Plan]:
    """The plan with the other exchanges that may be faster, most likely first."""
    if plan.exchange != BY_BACKEND or cluster.backend == "nccl" or plan.zero or not plan.replicated:
        return []
    sizes, found = bucket_sizes(plan, profile), list[tuple[float, int, Plan]]()
    members = max((plan.replicas_of(stage) for stage in range(plan.depth)), key=len)
    usual = [one_of_several(cluster, members, size).seconds for size in sizes]
    for word in BY_ROUNDS:
        try:
            other = on_nodes(replace(plan, exchange=word), None, cluster)
        except PlanError:
            continue
        if word == HIERARCHICAL and uneven(other, other.node) is not None:
            continue
        own = [in_rounds(cluster, word, members, size, other.node).seconds for size in sizes]
        share = min(ours / theirs for ours, theirs in zip(own, usual, strict=True))
        if share < 1 - FASTER:
            found.append((share, len(found), other))
    return [other for _, _, other in sorted(found)[:MOST_TRIED]]
