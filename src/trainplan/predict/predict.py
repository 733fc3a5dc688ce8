"""How long a step of a plan takes, and how much memory each rank needs: lower, check, play, read off."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS, SERVED
from trainplan.predict.accuracy import Accuracy, beyond, known_error, own_precision
from trainplan.predict.cards import flows_of, meeting, shares_cards
from trainplan.predict.clock import Floats, Played, compute_seconds, play
from trainplan.predict.contention import alike, contention
from trainplan.predict.cost import Setting, costs, priced, setting_of
from trainplan.predict.decided import expected_agendas
from trainplan.predict.flows import Flows
from trainplan.predict.memory import Peak, host_peaks, peaks
from trainplan.predict.occupancy import Occupancy, Tools, occupancy
from trainplan.predict.planned import planned
from trainplan.predict.prompt import Hosts, prompt
from trainplan.predict.speeds import speeds
from trainplan.predict.utilisation import utilisation
from trainplan.profile.profile import Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.edges import edges
from trainplan.program.ops import COMPUTES, Kind
from trainplan.program.program import Bools, Ints, Program, are
from trainplan.program.staleness import step_seconds as by_push
from trainplan.program.timeline import Timeline
from trainplan.program.wiring import Wiring, wire

# Of a device's memory, what tensors never fill: for how far below what was measured estimates were in the worst of 63
# cases that were held out (3.7 %), and for what nobody sees (cudnn's trials, NCCL's buffers).
MEMORY_MARGIN = 0.06
_F, _KINDS = int(Kind.F), tuple(kind.name for kind in Kind)
_PASS, _TALK = are((Kind.F, Kind.B, Kind.I, Kind.W)), ~are(COMPUTES)
INSIDE = "INSIDE"  # in seconds by kind: exchanges inside passes, of ranks that share blocks


@dataclass(frozen=True)
class Prediction:
    """What we expect of a plan."""

    plan: Plan
    tensors_fit: bool  # on every device, with the margin; and what was offloaded on the hosts
    step_s: float
    samples_per_s: float
    epoch_s: float
    peak_bytes: int  # of the worst rank, with what the device's own libraries take
    peak: Peak
    limit_bytes: int  # of that rank, margin taken off
    bubble: float  # share of device-seconds without compute
    exposed_comm_s: float  # how much shorter a step would be if communication were free
    compute_s: float  # of the busiest rank
    mfu: float | None  # None: the note says why
    mfu_note: str  # the formula, with its peaks
    price_per_epoch: float | None
    profile: str  # measured or estimated, eager or compiled
    error: Accuracy
    seconds_by_kind: dict[str, float]  # a step, summed over ranks
    device: str
    batch: int
    host_bytes: int = 0  # that a node's ranks have in its memory at most: what was offloaded
    peaks: tuple[Peak, ...] = field(repr=False, default=())
    played: Played | None = field(repr=False, compare=False, default=None)
    tools: Tools | None = field(repr=False, compare=False, default=None)  # None: the fullest device is a CPU
    hosts: Hosts | None = field(repr=False, compare=False, default=None)  # None: hosts are what computes

    @property
    def fits(self) -> bool:
        """Whether tensors leave the margin free, and torch's allocator has room for them, too: workspaces and holes are
        in no program, and may be more than the margin. (It is played when somebody asks, and only where tensors fit.)
        """
        return self.tensors_fit and self.overdrawn_bytes == 0

    @property
    def occupancy(self) -> Occupancy | None:
        """The fullest device, as its tools show it; None: it is a CPU."""
        return self.tools.occupancy if self.tools is not None else None

    @property
    def host_s(self) -> float:
        """How much shorter a step would yet be if communication were free, and hosts issued everything at once."""
        if self.hosts is None:
            return 0.0
        return self.step_s * _rest(self.exposed_comm_s + self.hosts.prompt.step_s, self.step_s)

    @property
    def overdrawn_bytes(self) -> int:
        """What torch would ask for beyond the whole memory of the fullest device."""
        return self.occupancy.overdrawn if self.occupancy is not None else 0

    @property
    def over_bytes(self) -> int:
        """What is short on the fullest device: of what tensors may have, or where these fit, of what torch asks for."""
        over = self.peak_bytes - self.limit_bytes
        return over if over > 0 else self.overdrawn_bytes

    @property
    def fullness(self) -> float:
        """How full the fullest device is, of what may be used: above 1 where it has too little."""
        tensors = self.peak_bytes / self.limit_bytes
        if tensors > 1 or self.occupancy is None or not self.occupancy.over:
            return tensors
        return self.occupancy.most.visible / self.occupancy.memory

    def timeline(self) -> Timeline:
        """The predicted timeline."""
        if self.played is None:
            raise PlanError(
                "timeline", "this prediction was made without keeping its timeline", "predict(..., keep=True)"
            )
        return self.played.timeline()

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes of the worst rank at its peak, by kind; `device` is what the device's own libraries take. (What is in
        the memory of the host is not among them: `host_bytes`.)"""
        return {**self.peak.breakdown, "device": self.peak_bytes - self.peak.bytes}

    def to_json(self) -> dict[str, Any]:
        data = {
            name: files.to_json(getattr(self, name))
            for name in self.__dataclass_fields__
            if name not in ("plan", "played", "peaks", "peak", "tools", "hosts")
        }
        data["host_s"] = self.host_s
        data["fits"], data["occupancy"] = self.fits, files.to_json(self.occupancy)
        data["plan"] = plan_text.text(self.plan)
        data["choices"] = plan_text.to_json(self.plan)
        data["peak_rank"], data["peak_op"] = self.peak.rank, self.peak.op
        data["breakdown"] = self.breakdown
        return data


def predict(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    batch: int | None = None,
    keep: bool = False,
) -> Prediction:
    """What a plan will do on a cluster. `keep`: the timeline stays with the prediction."""
    batch = batch or profile.batch
    own = own_precision(profile, plan)
    profile = planned(plan, profile, cluster)
    pace = speeds(profile, cluster)
    if plan.world > cluster.world:
        why = f"it needs {plan.world} devices, and {cluster.name} has {cluster.world}"
        raise PlanError(f"plan {plan_text.brief(plan)!r}", why, f"a plan for {cluster.world} devices or fewer")
    fold = plan.dp > 1 and not keep and replicas_alike(plan, cluster, profile) and alike(plan, cluster, batch)
    alone = setting_of(profile, cluster, pace, plan.world)
    program = lower(plan, profile, batch, cluster.backend, steps=steps_of(plan), fold=fold)
    wiring, flows = wire(program), flows_of(program, plan, cluster)
    check(program, wiring)
    setting = beside_others(plan, program, alone, wiring, flows)
    if plan.exchange in rules.DECIDED:  # then what is exchanged when follows from when it is ready
        agendas = expected_agendas(plan, profile, cluster, batch, setting, fold)
        program = lower(plan, profile, batch, cluster.backend, steps=2, fold=fold, agendas=(agendas,) * 2)
        wiring, flows = wire(program), flows_of(program, plan, cluster)
        check(program, wiring)
        setting = beside_others(plan, program, alone, wiring, flows)
    run, issue, spoken = priced(program, setting)
    played = play(program, run, issue, cluster.slowdown_of(plan.world), wiring, flows)
    step_s = step_seconds(played)
    free = run.copy()
    talk = _TALK[program.kind]
    free[talk] = 0.0
    free -= spoken
    unhindered = step_seconds(play(program, free, np.where(talk, 0.0, issue), None, wiring))
    found = peaks(played)
    if fold or plan.tp > 1:  # to the user a rank is one of the cluster, also where it stands for others
        ranks = plan.ranks(0) if fold else plan.leaders
        found = [Peak(ranks[peak.rank], peak.bytes, peak.op, peak.breakdown) for peak in found]
    place = [cluster.device(peak.rank) for peak in found]
    # A byte at least: of a single one the margin leaves none, and shares of nothing cannot be told.
    limits = [max(1, int(device.memory_bytes * (1 - MEMORY_MARGIN))) for device in place]
    used = [peak.bytes + device.context_bytes for peak, device in zip(found, place, strict=True)]
    worst = int(np.argmax([u / limit for u, limit in zip(used, limits, strict=True)]))
    host, roomy = _on_hosts(plan, cluster, [peak.rank for peak in found], host_peaks(played), fold)
    busy = (compute_seconds(played) - np.bincount(program.rank, spoken, program.world)) / program.steps
    if program.bound is None:  # where a rank ends its step late once, the next one may end sooner after it; but not all
        step_s, unhindered = max(step_s, float(busy.max())), max(unhindered, float(busy.max()))
    arithmetic = utilisation(profile, cluster, plan.world, batch, step_s)
    steps_per_epoch = -(-profile.samples_per_epoch // batch)
    epoch_s = steps_per_epoch * step_s + max(0.0, played.makespan - program.steps * step_s)
    price = cluster.price_per_hour(plan.world) * epoch_s / 3600
    scaled = " and scaled" if len(set(pace)) > 1 else ""  # by the peaks of the other devices
    tools = None
    if place[worst].name != "cpu":
        tools = Tools(partial(occupancy, played, worst, found[worst].rank, plan, profile, place[worst]))
    hosts = None
    if not backend(cluster.backend).host_computes:
        hosts = Hosts(partial(prompt, program, setting, step_seconds, unhindered))
    return Prediction(
        plan=plan, tensors_fit=roomy and all(u <= limit for u, limit in zip(used, limits, strict=True)), step_s=step_s,
        samples_per_s=batch / step_s, epoch_s=epoch_s, peak_bytes=used[worst], peak=found[worst],
        limit_bytes=limits[worst], bubble=_rest(float(busy.sum()), program.world * step_s),
        exposed_comm_s=step_s * _rest(unhindered, step_s), compute_s=float(busy.max()),
        mfu=arithmetic.share, mfu_note=arithmetic.note, price_per_epoch=price or None,
        profile=f"{profile.kind}{scaled}, {'compiled' if profile.compiled else 'eager'}",
        error=beyond(plan, profile, batch)
        or known_error(plan, profile.kind + scaled, profile.device, profile.compiled, cluster.backend, own, step_s),
        seconds_by_kind=by_kind(played, spoken), device=profile.device, batch=batch,
        host_bytes=host, peaks=tuple(found), played=played if keep else None,
        tools=tools, hosts=hosts,
    )  # fmt: skip


def _on_hosts(plan: Plan, cluster: Cluster, ranks: list[int], peaks: list[int], fold: bool) -> tuple[int, bool]:
    """The most bytes that the ranks of one node have in its memory together, and whether all nodes have that much (or
    have not said how much they have)."""
    if not any(peaks):
        return 0, True
    if fold:  # every replica has as much as the first
        known = dict(zip(plan.ranks(0), peaks, strict=True))
        ranks = [rank for replica in range(plan.dp) for rank in plan.ranks(replica)]
        peaks = [known[rank] for _ in range(plan.dp) for rank in plan.ranks(0)]
    total = [0] * len(cluster.nodes)
    for rank, peak in zip(ranks, peaks, strict=True):
        total[cluster.machine_of(rank)] += peak
    rooms = [node.host_memory_bytes for node in cluster.nodes]
    return max(total), all(not room or own <= room for own, room in zip(total, rooms, strict=True))


def beside_others(plan: Plan, program: Program, alone: Setting, wiring: Wiring, flows: Flows | None) -> Setting:
    """The setting of a program whose ranks slow each other down, from that in which nobody is in anybody's way."""
    cluster = alone.cluster
    if not cluster.contention and not cluster.spread:
        return alone
    fold = program.replicas > 1
    company = contention(plan, cluster, fold)
    slowed = company.known()
    if slowed is None:
        played = play(program, *costs(program, alone), cluster.slowdown_of(plan.world), wiring, flows)
        slowed = company.found(played, step_seconds(played))
    by_rank = np.ones(cluster.world)
    by_rank[list(plan.ranks(0) if fold else (*plan.leaders, *range(plan.workers, plan.world)))] = slowed
    return replace(alone, contention=tuple(by_rank.tolist()))


def step_seconds(played: Played) -> float:
    """The slope: how much later the last step of the program ends than the one before it."""
    program = played.program
    if program.steps == 1:
        return played.makespan
    if program.bound is not None:
        return _by_push(played)
    ends, passes, begin = _by_step(program.kind, program.step, played.start, played.end, _PASS, program.steps)
    if begin < ends[-2]:  # steps overlap, and nothing comes after the last: so by their passes
        ends = passes
    return float(ends[-1] - ends[-2])


@njit(cache=True)
def _by_step(
    kind: NDArray[np.uint8], step: Ints, start: Floats, end: Floats, passes: Bools, steps: int
) -> tuple[Floats, Floats, float]:
    """When every step ends, and its passes do; and when the first forward pass of the last begins."""
    ends, of_passes, begin = np.full(steps, -np.inf), np.full(steps, -np.inf), np.inf
    for op in range(len(kind)):
        own = step[op]
        ends[own] = max(ends[own], end[op])
        if passes[kind[op]]:
            of_passes[own] = max(of_passes[own], end[op])
        if kind[op] == _F and own == steps - 1:
            begin = min(begin, start[op])
    return ends, of_passes, begin


def steps_of(plan: Plan) -> int:
    """Steps that are played: until a bound on the lead of the fastest has had time to be felt."""
    return min(8 + 2 * max(plan.bound, default=0), 32) if plan.exchange in ASYNCHRONOUS else 2


def _by_push(played: Played) -> float:
    """Of workers that go on without each other: the time in which they push as often as they are many."""
    program = played.program
    pushes = (program.kind == Kind.STEP) & (program.rank == program.rank[program.kind == Kind.STEP].min())
    workers = np.unique(program.pipeline[pushes])
    return by_push([played.end[pushes & (program.pipeline == worker)] for worker in workers])


def _rest(part: float, whole: float) -> float:
    """Share of a whole beside a part of it; rounding leaves a trace where there is none.

    >>> _rest(3.0 - 4e-16, 3.0), _rest(1.0, 4.0)
    (0.0, 0.75)
    """
    share = 1.0 - part / whole
    return share if share > 1e-12 else 0.0


def replicas_alike(plan: Plan, cluster: Cluster, profile: Profile) -> bool:
    """Whether all replicas run on equal devices and talk over equal links, so that one of them stands for all.

    Equal machines are not enough: of two pipelines over three stages on two nodes one may cross from node to node
    early, and the other late.
    """
    if not cluster.uniform or plan.ratio or plan.exchange in SERVED:  # servers have a message from everybody
        return False
    paired = any(node.pairs for node in cluster.nodes)  # then it matters which devices of a node they are

    def shape(replica: int) -> tuple[tuple[int, int], ...]:
        names: dict[int, int] = {}
        own = plan.placement[replica * plan.lines : (replica + 1) * plan.lines]
        places = [cluster.ranks[stage[0]] for pipeline in own for stage in pipeline]
        return tuple((names.setdefault(node, len(names)), device if paired else 0) for node, device in places)

    if plan.shard and not _share_alike(plan, cluster):
        return False
    return len({shape(replica) for replica in range(plan.dp)}) == 1 and _meet_alike(plan, cluster, profile)


def _share_alike(plan: Plan, cluster: Cluster) -> bool:
    """Whether all groups of replicas lie on the nodes in the same way, and so do those across them."""

    def nodes(stage: int, replicas: range) -> tuple[int, ...]:
        names: dict[int, int] = {}
        ranks = (plan.rank(replica, stage) for replica in replicas)
        return tuple(names.setdefault(cluster.node_of(rank), len(names)) for rank in ranks)

    size, count = plan.shard, plan.dp // plan.shard
    groups = [range(group * size, (group + 1) * size) for group in range(count)]
    across = [range(place, plan.dp, size) for place in range(size)]
    ways = [{nodes(stage, way) for way in each} for stage in range(plan.depth) for each in (groups, across)]
    return all(len(found) == 1 for found in ways)


def _meet_alike(plan: Plan, cluster: Cluster, profile: Profile) -> bool:
    """Whether the messages of all replicas meet as many others at the network cards of their nodes."""
    if not shares_cards(cluster):
        return True
    if plan.lines > 1:
        return False  # those of its lines meet each other, too
    for edge in edges(profile, plan.bounds):
        for ends in ((edge.source, edge.target), (edge.target, edge.source)):
            crowds = [sorted(cards.items()) for cards in meeting(plan, cluster, *ends)]
            if len({tuple((card % 2, crowd) for card, crowd in cards) for cards in crowds}) > 1:
                return False
    return True


def by_kind(played: Played, spoken: np.ndarray) -> dict[str, float]:
    """Seconds of every kind of operation, a step, summed over ranks; `spoken` are those inside passes."""
    program = played.program
    many = program.replicas * program.slicers / program.steps
    spent = (played.end - played.start - spoken) * many
    sizes = np.array([len(group) for group in program.groups] or [1], dtype=np.float64)
    weight = np.where(program.group >= 0, sizes[np.maximum(program.group, 0)], 1.0)  # once for each member
    total = np.bincount(program.kind, weights=spent * weight, minlength=len(Kind)).tolist()
    count = np.bincount(program.kind, minlength=len(Kind)).tolist()
    found = {kind: seconds for kind, seconds, times in zip(_KINDS, total, count, strict=True) if times}
    return {**found, INSIDE: float(spoken.sum()) * many} if program.slicers > 1 else found
