"""Why a plan takes as long as it does, and why it lost: in words, made from its prediction.

A step is taken apart into five pieces that add up to it:

    compute     what every rank would do if work were spread evenly
    imbalance   what the busiest rank does beyond that
    waiting     the busiest rank idle, though communication were free and hosts prompt: filling and draining a pipeline
    host        how much shorter it would be yet if hosts issued at once what devices compute, which these wait for
    exposed     how much shorter the step would be if communication were free
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.cluster.cluster import Cluster, Link
from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches
from trainplan.plan.served import SERVED
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.units import gb_per_s, gib, percent, seconds, significant

_WORTH_SAYING = 0.05  # of a step


@dataclass(frozen=True)
class Pieces:
    """Seconds of a step, by what they are spent on."""

    compute: float
    imbalance: float
    waiting: float
    host: float
    exposed: float


def pieces(p: Prediction) -> Pieces:
    """The five pieces of a predicted step."""
    if p.hosts is not None:
        alone, exposed = p.hosts.prompt, p.exposed_comm_s
        imbalance, waiting = alone.busiest_s - alone.mean_s, alone.step_s - alone.busiest_s
        return Pieces(alone.mean_s, max(imbalance, 0.0), max(waiting, 0.0), p.host_s, exposed)
    mean = (1 - p.bubble) * p.step_s
    exposed = min(p.exposed_comm_s, max(p.step_s - p.compute_s, 0.0))
    return Pieces(mean, max(p.compute_s - mean, 0.0), max(p.step_s - p.compute_s - exposed, 0.0), 0.0, exposed)


def reason(p: Prediction, profile: Profile, cluster: Cluster) -> str:
    """What limits a plan: the pieces of its step that are worth saying, the largest first."""
    parts = pieces(p)
    said = [
        (parts.exposed, f"{percent(parts.exposed / p.step_s)} exposed communication ({_traffic(p, profile, cluster)})"),
        (parts.waiting, f"{percent(parts.waiting / p.step_s)} bubble ({_bubble(p.plan)})"),
        (parts.imbalance, f"{percent(parts.imbalance / p.step_s)} imbalance ({_imbalance(parts)})"),
        (parts.host, f"{percent(parts.host / p.step_s)} waiting for {_hosts(p.plan)}"),
    ]
    said = sorted((item for item in said if item[0] > _WORTH_SAYING * p.step_s), reverse=True)
    compute = f"{percent(parts.compute / p.step_s)} compute" + (", forward twice" if p.plan.recompute == "full" else "")
    away = f"{gib(p.host_bytes)} of activations on a host, since nothing fits without"
    return "; ".join([compute, *(words for _, words in said), *([away] if p.plan.away else [])])


def compared(p: Prediction, winner: Prediction, profile: Profile, cluster: Cluster) -> str:
    """Why a plan is behind the winner: the pieces of its step that grew, and those that shrank, as far as they matter.

    All together they are the difference, but for what is too little to say.
    """
    gap = p.step_s - winner.step_s
    if gap < 0.005 * winner.step_s:
        return f"as fast as #1 within our error: {reason(p, profile, cluster)}"
    own, best = pieces(p), pieces(winner)
    grown = sorted(
        (
            (own.compute - best.compute, "compute", _more_compute(p, winner, profile)),
            (own.imbalance - best.imbalance, "imbalance", _imbalance(own)),
            (own.host - best.host, "waiting for hosts", _hosts(p.plan)),
            (own.waiting - best.waiting, "bubble", _bubble(p.plan)),
            (own.exposed - best.exposed, "exposed communication", _traffic(p, profile, cluster)),
        ),
        reverse=True,
    )
    said = [item for item in grown if item[0] > _WORTH_SAYING * p.step_s][:2] or grown[:1]
    words = ", ".join(f"{seconds(extra)} more of {what} ({why})" for extra, what, why in said)
    rest = [item for item in grown if item not in said]
    for before, sign, after in (("and", 1, ""), ("but", -1, " less")):
        parts = [(sign * extra, what) for extra, what, _ in rest if sign * extra > 0]
        total = sum(extra for extra, _ in parts)
        if total > _WORTH_SAYING * gap:
            names = " and ".join(what for extra, what in sorted(parts, reverse=True) if extra > _WORTH_SAYING * total)
            words += f", {before} {seconds(total)}{after} of {names}"
    return f"{percent(gap / winner.step_s)} slower: {words}"


def one_device(single: Prediction | None, winner: Prediction, runner_up: Prediction | None) -> str:
    """Whether distributing is worth it, in a sentence."""
    if single is None or not single.fits:
        return ""
    if winner.plan.world > 1:
        speed = single.step_s / winner.step_s
        efficiency = speed / winner.plan.world
        return (
            f"it fits on one device ({seconds(single.step_s)} a step); #1 is {significant(speed)} × as fast "
            f"on {winner.plan.world} devices ({percent(efficiency)} of linear)"
        )
    if runner_up is None:
        return "it fits on one device, and there is no other"
    parts = pieces(runner_up)
    shared = winner.step_s / runner_up.plan.world  # what each device would compute, were the work shared out evenly
    cause = max(
        (parts.exposed, f"{seconds(parts.exposed)} of it is exposed communication"),
        (parts.waiting, f"{seconds(parts.waiting)} of it is a bubble ({_bubble(runner_up.plan)})"),
        (parts.host, f"{seconds(parts.host)} of it is waiting for {_hosts(runner_up.plan)}"),
        (parts.compute + parts.imbalance - shared, "smaller parts of the batch compute hardly faster than the whole"),
    )[1]
    return (
        f"it fits on one device, and distributing it is slower because the best way to do so takes "
        f"{seconds(runner_up.step_s)} instead of {seconds(winner.step_s)}, and {cause}"
    )


def _traffic(p: Prediction, profile: Profile, cluster: Cluster) -> str:
    """What is sent, and over what."""
    plan, words = p.plan, []
    if max(len(plan.replicas_of(stage)) for stage in range(plan.depth)) > 1:
        size = sum(parameter.bytes for parameter in profile.parameters if parameter.trainable)
        rings = [ring for ring in map(plan.replicas_of, range(plan.depth)) if len(ring) > 1]
        link = _slowest(cluster, [pair for ring in rings for pair in zip(ring, (*ring[1:], ring[0]), strict=True)])
        what = "gradients and weights" if plan.zero else "gradients"
        words.append(f"{gib(size)} of {what} over {link.name} {gb_per_s(link.rate)}")
    if plan.pp > 1:
        link = _slowest(cluster, [(plan.rank(0, stage), plan.rank(0, stage + 1)) for stage in range(plan.depth - 1)])
        words.append(f"activations between stages over {link.name} {gb_per_s(link.rate)}")
    if plan.tp > 1:
        groups = [plan.slicers(rank) for rank in plan.leaders]
        link = _slowest(cluster, [pair for ranks in groups for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True)])
        words.append(f"exchanges inside passes over {link.name} {gb_per_s(link.rate)}")
    if plan.preload != "given":
        inputs = sum(micro_batches(plan, p.batch)[0]) * profile.input_bytes_per_sample
        words.append(f"{gib(round(inputs))} of inputs from the host")
    if plan.away:
        rate = min(cluster.device(rank).host_rate for rank in range(plan.workers))
        words.append("activations to the host and back" + (f" at {gb_per_s(rate)}" if rate else ""))
    return " and ".join(words) or "none"


def _slowest(cluster: Cluster, pairs: list[tuple[int, int]]) -> Link:
    return min((cluster.link(a, b) for a, b in pairs), key=lambda link: link.rate)


def _hosts(plan: Plan) -> str:
    whose = "the host, which issues" if plan.world == 1 else "hosts, which issue"
    return f"{whose} no faster"


def _bubble(plan: Plan) -> str:
    if plan.pp == 1:
        if plan.exchange in SERVED:
            return "waiting for servers, or for the slowest replica"
        return "waiting for the slowest replica" if plan.dp > 1 else "nothing is computed beside it"
    if plan.schedule == "naive":
        return f"{plan.pp} stages take turns"
    stages = f"{plan.pp} stages" if plan.chunks == 1 else f"{plan.pp} ranks of {plan.chunks} stages each"
    slices = f" of {len(plan.slices)} slices" if plan.slices else ""
    return f"{stages} fill and drain for {plan.micro} micro-batches{slices}"


def _imbalance(parts: Pieces) -> str:
    return f"the busiest rank computes {significant((parts.compute + parts.imbalance) / parts.compute)} × the mean"


def _more_compute(p: Prediction, winner: Prediction, profile: Profile) -> str:
    if p.plan.world < winner.plan.world:
        return f"{p.plan.world} of {winner.plan.world} devices"
    if p.plan.recompute == "full" != winner.plan.recompute:
        return "every forward pass twice"
    own, best = micro_batches(p.plan, p.batch)[0][0], micro_batches(winner.plan, winner.batch)[0][0]
    if own < best:
        return f"micro-batches of {own} {profile.sample}s compute less efficiently than of {best}"
    return "communication slows it down, or more devices share a node"
