"""A plan in plain words: which blocks, parameters and bytes sit on which rank, what moves when, and where time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.plan.exchanges import BY_BACKEND
from trainplan.plan.rules import splits_backward
from trainplan.plan.sliced import SELECTIVE
from trainplan.plan.text import brief
from trainplan.predict.planned import planned
from trainplan.predict.predict import Prediction
from trainplan.profile.parcels import parcels
from trainplan.profile.profile import Profile
from trainplan.program.lower.away import depths
from trainplan.program.lower.backend import backend
from trainplan.program.lower.buckets import Bucket
from trainplan.program.lower.edges import message_bytes
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.loads import loaded_bytes, loads, reads_batch, scattered_bytes, scatters
from trainplan.program.ops import Kind
from trainplan.program.traffic import summing
from trainplan.report.table import gib_number, milliseconds, table
from trainplan.search.reasons import pieces, reason
from trainplan.units import count, gb_per_s, gib, percent, seconds, some

_ORDERS = {
    "naive": "one micro-batch after the other goes forward and back through all stages, which take turns",
    "gpipe": "all micro-batches go forward through the stages, then all go back, the last one first",
    "lockstep": "as gpipe, but in ticks: all stages exchange what they need, then all compute, and nobody goes ahead",
    "looped": "all micro-batches go forward through a round of stages, then the next, and back in the opposite order",
    "1f1b": "a few micro-batches go forward, then every stage does one backward after each forward",
    "1f1b-early": "as 1f1b, but about twice as many go forward first, so that no stage waits for a message",
    "interleaved": "as 1f1b, but every rank has several stages, and a micro-batch passes it several times",
    "zb-h1": "as 1f1b, but the gradients of the weights wait until there is nothing better to do",
    "zb-h2": "as zb-h1, and more micro-batches go forward first, which fills the start too",
    "zb-v": "every rank has one stage on the way down and one on the way up; gradients of the weights fill the gaps",
    "gems": "one micro-batch goes down the ranks and the next one up, each through its own copy of the stages",
    "chimera": "half of the micro-batches go down the ranks and half go up, each through its own copy of the stages",
    "chimera-doubled": "as chimera, with two forwards for every backward",
    "terapipe": "slices of every sequence follow each other forward, then go back, the last one first",
    "given": "every rank does what the order of work says that was given",
}


@dataclass(frozen=True)
class StageView:
    """One stage, and the ranks that hold it."""

    stage: int
    ranks: tuple[int, ...]  # of all replicas, and of all that share one of them
    blocks: tuple[int, int]  # first ≤ b < last
    names: str  # of the first and the last of them
    parameters: int
    forward_s: float  # of one micro-batch
    backward_s: float
    backward_parts_s: tuple[float, float] | None  # for the input and for the weights, where the plan does them apart
    recompute_s: float
    update_s: float
    peak_bytes: int  # with what the device's own libraries take
    peak_op: str
    breakdown: dict[str, int]
    limit_bytes: int


@dataclass(frozen=True)
class Explanation:
    """What a plan does, for people."""

    plan: str
    headline: str
    stages: tuple[StageView, ...]
    moves: tuple[str, ...]  # what is sent when, a sentence each
    time: tuple[str, ...]  # where a step goes, a sentence each

    def __str__(self) -> str:
        parts = [f"plan   {self.plan}", self.headline, "", _stage_table(self.stages), ""]
        parts += ["memory of the worst rank of each stage, at its peak, GiB", _memory_table(self.stages), ""]
        parts += ["what moves", *(f"  {line}" for line in self.moves or ("nothing: there is one rank",)), ""]
        return "\n".join([*parts, "where a step goes", *(f"  {line}" for line in self.time)])

    def to_json(self) -> dict[str, Any]:
        return dict(files.to_json(self))


def explain(prediction: Prediction, profile: Profile, cluster: Cluster) -> Explanation:
    """Put a prediction into words."""
    plan = prediction.plan
    profile = planned(plan, profile, cluster)
    layout = Layout(plan, profile, prediction.batch, backend(cluster.backend), tuple(range(plan.dp)))
    return Explanation(
        plan=brief(plan),
        headline=_headline(layout, cluster),
        stages=tuple(_stage(prediction, layout, cluster, stage) for stage in range(plan.depth)),
        moves=tuple(_moves(layout, cluster)),
        time=tuple(_time(prediction, profile, cluster)),
    )


def _headline(layout: Layout, cluster: Cluster) -> str:
    plan, sizes = layout.plan, layout.sizes
    own = sum(sizes[0])
    if plan.world == 1:
        words = f"one device takes the whole batch of {own} {layout.profile.sample}s"
    elif plan.pp == 1 and plan.dp == 1:
        words = f"one model takes the whole batch of {own} {layout.profile.sample}s"
    elif plan.pp == 1:
        words = f"{plan.dp} replicas of the whole model, each takes {own} of {layout.batch} {layout.profile.sample}s"
    else:
        chain = f"a pipeline of {plan.depth} stages"
        if plan.world != plan.depth * plan.dp * plan.tp:
            chain += f" on {plan.world // plan.dp} ranks"
        words = chain if plan.dp == 1 else f"{plan.dp} replicas of {chain}, each takes {own} of {layout.batch} samples"
    if plan.micro > 1:
        words += f", in {plan.micro} micro-batches of {sizes[0][0]}"
        words += f" to {sizes[-1][-1]}" if sizes[-1][-1] != sizes[0][0] else ""
    if plan.tp > 1:
        words += f"; every stage is shared by {plan.tp} ranks, with slices of its weights"
        words += ", and what they do not slice they share out by tokens" if plan.sequence == "on" else ""
    if plan.slices:
        words += f", each sequence in {len(plan.slices)} slices of {max(plan.slices)} to {min(plan.slices)} tokens"
    if plan.pp > 1:
        words += f"; {_ORDERS[plan.schedule]}"
    if plan.recompute == SELECTIVE:
        words += "; the core of attention is computed once more before its backward"
    if layout.recomputes:
        words += "; only the inputs of blocks are kept, and every block runs forward once more before its backward"
        words += "" if layout.recomputed.all() else f" (but for the last {'slice' if plan.slices else 'micro-batch'})"
    used = "is" if plan.world == 1 else "are"
    cut = f" Cut by {plan.cut_by}." if plan.cut_by else ""
    return f"{words}. {plan.world} of {cluster.world} devices of {cluster.name} {used} used.{cut}"


def _stage(prediction: Prediction, layout: Layout, cluster: Cluster, stage: int) -> StageView:
    plan, profile = layout.plan, layout.profile
    first, last = plan.bounds[stage]
    samples = layout.sizes[0][0]
    ranks = plan.replicas_of(stage)
    whole = len(prediction.peaks) * plan.tp == plan.world  # or one replica stands for all
    place = plan.ranks(0).index(ranks[0])
    # Of ranks that share a stage the first stands for all.
    own = [prediction.peaks[rank // plan.tp] for rank in ranks] if whole else [prediction.peaks[place]]
    peak = max(own, key=lambda p: p.bytes)
    device = cluster.device(ranks[0])
    forward = profile.total("forward_s", first, last, samples)
    names = profile.blocks[first].name if last - first == 1 else (
        f"{profile.blocks[first].name} … {profile.blocks[last - 1].name}"
    )  # fmt: skip
    return StageView(
        stage=stage, ranks=tuple(rank for leader in ranks for rank in plan.slicers(leader)), blocks=(first, last),
        names=names,
        parameters=sum(p.count for p in profile.parameters_of(first, last)), forward_s=forward,
        backward_s=profile.total("backward_s", first, last, samples), backward_parts_s=_parts(layout, stage, samples),
        recompute_s=profile.total("recompute_s", first, last, samples) if layout.recomputes else 0.0,
        update_s=profile.update_s(first, last),
        peak_bytes=peak.bytes + device.context_bytes, peak_op=peak.op,
        breakdown={**peak.breakdown, "device": device.context_bytes},
        limit_bytes=prediction.limit_bytes,
    )  # fmt: skip


def _parts(layout: Layout, stage: int, samples: int) -> tuple[float, float] | None:
    """Seconds of the two parts of a backward pass, where the plan does them apart and the profile has them."""
    profile, (first, last) = layout.profile, layout.plan.bounds[stage]
    if not (splits_backward(layout.plan) and profile.has_halves):
        return None
    if not any(edge.target == stage and edge.gradients for edge in layout.edges):
        return 0.0, profile.total(
            "backward_s", first, last, samples
        )  # no gradient goes further back: all is for weights
    return (
        profile.total("backward_input_s", first, last, samples),
        profile.total("backward_weight_s", first, last, samples),
    )


def _moves(layout: Layout, cluster: Cluster) -> list[str]:
    plan, profile = layout.plan, layout.profile
    lines = _inputs(layout)
    for edge in layout.edges:
        if not layout.is_message(edge, 0):
            continue
        there = message_bytes(profile, edge.crossings, layout.sizes[0][0])
        back = message_bytes(profile, edge.gradients, layout.sizes[0][0])
        link = cluster.link(plan.rank(0, edge.source), plan.rank(0, edge.target))
        tensors = f"{len(edge.crossings)} tensors, " if len(edge.crossings) > 1 else ""
        lines.append(
            f"stage {edge.source} → {edge.target}: {tensors}{gib(there)} forward and {gib(back)} back for every "
            f"micro-batch, {gib((there + back) * plan.micro)} a step, over {link.name} {gb_per_s(link.rate)}"
        )
    lines += _inside(layout)
    for stage, buckets in enumerate(layout.buckets):
        if buckets:
            lines.append(_exchange(layout, stage, buckets))
        if layout.units[stage]:
            lines.append(_shared_out(layout, stage))
        if layout.offloads and depths(layout, stage).any():
            lines.append(_offloaded(layout, cluster, stage))
    for tie in layout.ties if layout.service is None else ():  # where servers sum them, they are in buckets
        ranks = sorted({rank for stage in tie.stages for rank in plan.replicas_of(stage)})
        lines.append(
            f"tied weights {', '.join(tie.names)}: {gib(tie.bytes)} of gradients summed over {_ranks(ranks)} "
            "after the last backward"
        )
    return lines


def _inside(layout: Layout) -> list[str]:
    """What ranks that share a stage exchange inside its passes."""
    plan, profile, lines = layout.plan, layout.profile, []
    for stage, bounds in enumerate(plan.bounds if plan.tp > 1 else ()):
        talk = [
            part for block in profile.blocks[slice(*bounds)] for part in (*block.forward_talk, *block.backward_talk)
        ]
        if not talk:
            continue
        where = f"stage {stage}: " if plan.pp > 1 else ""
        size = sum(part.bytes_per_sample * part.times for part in talk) * sum(layout.sizes[0])
        count = sum(part.times for part in talk) * plan.micro
        ranks = _ranks(plan.slicers(plan.rank(0, stage)))
        lines.append(f"{where}{gib(size)} a step in {some(count, 'exchange')} of {ranks}, inside passes")
    return lines


def _inputs(layout: Layout) -> list[str]:
    """What is loaded of the batch, and by whom."""
    plan = layout.plan
    if not loads(layout):
        return []
    if scatters(layout):
        sent = sum(scattered_bytes(layout, replica) for replica in range(1, plan.dp))
        others = _ranks([plan.rank(replica, 0) for replica in range(1, plan.dp)])
        whole = f"{gib(loaded_bytes(layout, layout.holdings[0]))} of inputs and targets, the whole batch, loaded"
        return [f"{whole} by rank {plan.rank(0, 0)} before a step; {gib(sent)} of it scattered to {others}"]
    when = "during the step before" if plan.preload == "on" else "before a step"
    lines = []
    for stage in (stage for stage in layout.stages if reads_batch(layout, stage)):
        size = max(loaded_bytes(layout, holding) for holding in layout.holdings if holding.stage == stage)
        where = f"stage {stage}: " if plan.pp > 1 else ""
        each = "each of " if len(plan.replicas_of(stage)) > 1 else ""
        ranks = _ranks(plan.replicas_of(stage))
        lines.append(f"{where}{gib(size)} of the batch loaded from the host by {each}{ranks} {when}")
    return lines


def _shared_out(layout: Layout, stage: int) -> str:
    """What is gathered and scattered of a stage that its replicas share out."""
    plan, units = layout.plan, layout.units[stage]
    passes, whole = plan.micro, sum(unit.bytes for unit in units)
    again = sum(units[number].bytes for number in layout.gathers_in(stage, Kind.GATHER_B))
    gathered = whole if plan.zero < 3 else passes * (whole + again)
    scattered = whole * (passes if plan.zero > 1 else 1)
    groups = plan.dp // plan.sharers
    sent = (1 - 1 / plan.sharers) * (gathered + scattered) + 2 * (1 - 1 / groups) * whole / plan.sharers
    where = f"stage {stage}: " if plan.pp > 1 else ""
    what = {1: "optimizer states", 2: "gradients and optimizer states", 3: "weights, gradients and optimizer states"}
    among = f"groups of {plan.sharers} of " if groups > 1 else ""
    when = "every pass" if plan.zero == 3 else "the first forward pass"
    return (
        f"{where}{what[plan.zero]} of {gib(whole)} of weights, in {some(len(units), 'unit')}, shared out among {among}"
        f"{_ranks(plan.replicas_of(stage))}: {gib(gathered)} gathered for {when}, {gib(scattered)} of gradients "
        f"scattered, a step; a rank sends {gib(sent)}"
    )


def _offloaded(layout: Layout, cluster: Cluster, stage: int) -> str:
    """What of a stage goes to the memory of the host, and comes back."""
    plan, cut, away = layout.plan, layout.sections[stage], depths(layout, stage)
    size = sum(
        sum(p.bytes for p in parcels(layout.profile, samples, cut, again)[:depth])
        for samples, again, depth in zip(layout.sizes[0], layout.recomputed.tolist(), away.tolist(), strict=True)
    )
    where, rate = f"stage {stage}: " if plan.pp > 1 else "", cluster.device(plan.rank(0, stage)).host_rate
    many = f"{away.min()} to {away.max()}" if away.min() < away.max() else f"{away.max()}"
    over = f" over its host link {gb_per_s(rate)}" if rate else ""
    return (
        f"{where}what the first {many} of {some(len(cut), 'block')} save of every micro-batch: {gib(size)} to the "
        f"memory of the host and back, a step{over}"
    )


def _exchange(layout: Layout, stage: int, buckets: list[Bucket]) -> str:
    plan, members, sizes = layout.plan, layout.plan.replicas_of(stage), [bucket.bytes for bucket in buckets]
    where = f"stage {stage}: " if plan.pp > 1 else ""
    many = f"{len(sizes)} buckets" if len(sizes) > 1 else "one bucket"
    when = "as they become ready in the last backward pass" if len(sizes) > 1 else "after the last backward pass"
    how = "" if plan.exchange == BY_BACKEND else f" by {plan.exchange}"
    if layout.service is not None:  # messages between workers and servers, and no sums
        to = _ranks([layout.service.rank(server) for server in layout.service.servers])
        from_ = _ranks([plan.rank(replica, stage) for replica in layout.service.pushers])
        back = "before the next step" if layout.service.at_root else "when that has stepped"
        size = gib(sum(sizes))
        return f"{where}{size} of gradients, in {many}, from {from_} to {to}{how} {when}, and weights back {back}"
    whole = f"{where}{gib(sum(sizes))} of gradients, in {many}, summed over {_ranks(members)}{how} {when}"
    sent = [summing(layout.sums_by, members, b.bytes, b.element, plan.node) for b in buckets]
    return f"{whole}; a rank sends {gib(max(map(sum, zip(*sent, strict=True))))}"


def _time(prediction: Prediction, profile: Profile, cluster: Cluster) -> list[str]:
    parts, step = pieces(prediction), prediction.step_s
    rows = [
        (parts.compute, "compute, if all ranks had the same"),
        (parts.imbalance, "more than that on the busiest rank"),
        (parts.waiting, "idle on the busiest rank though communication were free"),
        (parts.host, "idle until hosts have issued what is computed"),
        (parts.exposed, "communication that nothing hides"),
    ]
    lines = [f"{seconds(value)} ({percent(value / step)}) {words}" for value, words in rows if value > 1e-4 * step]
    return [*lines, f"{seconds(step)} in all: {reason(prediction, profile, cluster)}"]


def _stage_table(stages: tuple[StageView, ...]) -> str:
    recomputes = any(s.recompute_s for s in stages)
    # Two parts may take longer than the whole: whether filling gaps with one of them pays is seen here.
    parts = [">as input ms", ">and weights ms"] if any(s.backward_parts_s for s in stages) else []
    headers = ["stage", "ranks", ">blocks", "", ">parameters", ">forward ms", ">backward ms", *parts, ">update ms"]
    rows = [
        [
            str(s.stage), _ranks(s.ranks), str(s.blocks[1] - s.blocks[0]), s.names, count(s.parameters),
            milliseconds(s.forward_s), milliseconds(s.backward_s), *map(milliseconds, s.backward_parts_s or ()),
            milliseconds(s.update_s),
            *([milliseconds(s.recompute_s)] if recomputes else []),
        ]
        for s in stages
    ]  # fmt: skip
    return table([*headers, *([">recompute ms"] if recomputes else [])], rows, lines=True)


def _memory_table(stages: tuple[StageView, ...]) -> str:
    kinds = [
        k for k in dict.fromkeys(k for s in stages for k in s.breakdown) if any(s.breakdown.get(k) for s in stages)
    ]
    rows = [
        [
            str(s.stage), gib_number(s.peak_bytes), gib_number(s.limit_bytes), s.peak_op or "the start",
            *(gib_number(s.breakdown.get(kind, 0)) for kind in kinds),
        ]
        for s in stages
    ]  # fmt: skip
    return table(["stage", ">peak", ">limit", "at", *(f">{kind}" for kind in kinds)], rows, lines=True)


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """
    >>> _ranks((0, 1, 2, 3)), _ranks((0, 4)), _ranks((2,))
    ('ranks 0–3', 'ranks 0, 4', 'rank 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
