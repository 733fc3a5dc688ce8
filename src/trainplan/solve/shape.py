"""The numbers and words that a request leaves open, where no search is needed to choose them.

ddp                    as many replicas as there are devices
ps-bsp, ps-asp, ssp …  one server, and as many workers as there are devices left
gpipe, dapple, naive   as many stages as there are devices (and no more than blocks)
a placement table      as many stages as it has entries, and as many ranks as it names
an order that is given what it says
anything else          one replica, one stage
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainplan.errors import PlanError
from trainplan.plan.keys import SPLIT
from trainplan.plan.offload import check_offload
from trainplan.plan.placement import placement, renamed
from trainplan.plan.plan import Plan, Request, plan, usual_lines
from trainplan.plan.rules import (
    CHUNKED,
    check_preload,
    check_ratio,
    check_sharding,
    check_sketch,
    check_stages,
    fewer_stages,
    least_micro,
    other_table,
    takes_slices,
)
from trainplan.plan.served import AT_ROOT, AT_SERVERS, ROOT_BUCKET, USUAL_BOUND, check_served, fewer_devices
from trainplan.plan.sliced import check_sliced
from trainplan.plan.text import brief, settled
from trainplan.units import some

USUAL_BUCKET = 25 * 2**20  # torch's
ENOUGH = 16  # micro-batches for each stage


def shape(request: Request, blocks: int, world: int, batch: int, inside: int = 0, keys: int = 0) -> Plan:
    """A sketch of the plan: everything but `micro`, `stages` and `bucket` decided, those as usual where they are open.
    `inside`: devices of a node, within which hybrid sharding shares out. `keys`: servers that have something to serve.

    Refused where it cannot be met, before anything is solved for it.

    >>> found = shape(Request(schedule="gpipe"), blocks=18, world=4, batch=32)
    >>> found.dp, found.pp, found.recompute, found.stages
    (1, 4, 'none', ())
    >>> found = shape(Request(placement=(0, 1, 1)), blocks=18, world=4, batch=32)
    >>> found.pp, found.schedule, found.placement
    (2, '1f1b', (((0,), (1,), (1,)),))
    """
    request = settled(request, f"plan {brief(request)!r}")
    own = request.placement or ()
    pp, dp, spread = request.pp, request.dp, request.spread or ()
    servers, tp = request.servers, request.tp or 1
    if servers is None:
        servers = 1 if request.exchange in AT_SERVERS else 0
    exchange = request.exchange or "all-reduce"
    if pp is None and own:
        pp = max(own) + 1
    usual_chunks = (len(own) // (pp or 1) if own else 2) if request.schedule in CHUNKED else 1
    chunks = request.chunks or max(1, usual_chunks)
    if pp is None and spread:
        pp = len(spread)
    if pp is None and request.stages:
        pp = -(-(len(request.stages) + 1) // chunks)
    if dp is None:
        exchanges = request.exchange is not None or request.bucket is not None or bool(request.zero) or servers > 0
        dp = max(1, min((world - servers) // ((pp or 1) * tp), batch)) if exchanges else 1
    if pp is None:
        each = (world - servers) // (dp * tp)
        pp = max(1, min(each, blocks // chunks)) if request.schedule or request.partition else 1
        if (request.schedule or "").startswith("chimera") and pp > 1:
            pp -= pp % 2  # two directions meet in the middle
    sketch = plan(
        dp=dp, pp=pp, micro=request.micro or 1, schedule=request.schedule or ("1f1b" if pp > 1 else "naive"),
        chunks=chunks, pairs=request.pairs or 1, spread=spread,
        slices=request.slices if isinstance(request.slices, tuple) else (),
        stages=request.stages or (), recompute=request.recompute or "none",
        exchange=exchange, bucket=request.bucket or (ROOT_BUCKET if exchange == AT_ROOT else USUAL_BUCKET),
        servers=servers, bound=USUAL_BOUND.get(exchange, ()) if request.bound is None else request.bound,
        split=request.split or SPLIT,
        updates=request.updates or "sync", precision=request.precision or "fp32", overlap=request.overlap or "on",
        preload=request.preload or "given",
        offload=request.offload or ("none" if request.away is None else "activations"), away=request.away or (),
        blocks=blocks, key=request.key, order=request.order or (), zero=request.zero or 0,
        shard=request.shard or (_hybrid(dp, inside) if request.key == "hsdp" else 0),
        tp=tp, sequence=request.sequence or "off", ratio=request.ratio or (),
    )  # fmt: skip
    if own:
        sketch = _placed(sketch, own, f"plan {brief(request)!r}")
    _refuse(request, sketch, world, batch, keys, lambda other: _accepted(other, blocks, world, batch, inside))
    return sketch


def _accepted(request: Request, blocks: int, world: int, batch: int, inside: int) -> bool:
    """Whether a request could be met."""
    try:
        shape(request, blocks, world, batch, inside)
    except PlanError:
        return False
    return True


def _hybrid(dp: int, inside: int) -> int:
    """Over how many replicas hybrid sharding shares out: those of a node, or else of as large a part as there is.

    >>> _hybrid(16, inside=8), _hybrid(8, inside=8), _hybrid(6, inside=4), _hybrid(2, inside=8)
    (8, 4, 3, 1)
    """
    parts = [count for count in range(1, dp) if dp % count == 0] or [1]
    return inside if inside in parts and inside > 1 else max(parts)


def _no_groups(dp: int, most: int) -> tuple[str, str]:
    """Why so many replicas cannot be shared out in groups, and what can, of at most so many.

    >>> _no_groups(3, most=4)
    ('it shares out within groups of replicas and sums across them, and 3 are not two groups of two', 'zero3 dp=3')
    """
    why = f"it shares out within groups of replicas and sums across them, and {dp} are not two groups of two"
    if dp == 1:
        return why.replace("1 are", "1 is"), "hsdp dp=4" if most >= 4 else "single"
    return why, f"zero3 dp={min(dp, most)}" if most > 1 else "single"


def _placed(sketch: Plan, table: tuple[int, ...], asked: str) -> Plan:
    """The sketch with its stages where a table puts them."""
    if sketch.takes_any_table:
        if max(table) + 1 != sketch.pp:
            why = f"pp={sketch.pp}, and the table has {max(table) + 1} ranks"
            raise PlanError(asked, why, f"pp={max(table) + 1}, or leaving it out")
        return replace(sketch, placement=placement(sketch.dp, (table,), sketch.tp))
    lines = renamed(usual_lines(sketch), table)
    if lines is None:
        raise PlanError(asked, *other_table(sketch))
    return replace(sketch, placement=placement(sketch.dp, lines, sketch.tp))


def micro_counts(sketch: Plan, batch: int) -> tuple[list[int], list[int]]:
    """The numbers of micro-batches that are worth trying, and those that are where none of these fits.

    Powers of two, and multiples of the stages. With 16 for each stage the bubble is under 6 %, and every further
    micro-batch costs calls and messages; so more than that only save memory.

    >>> micro_counts(plan(pp=3, schedule="1f1b"), batch=200)
    ([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48], [64, 128, 200])
    """
    most = batch // sketch.dp
    found = {2**k for k in range(most.bit_length())} | {most}
    if sketch.pp > 1:
        found |= {sketch.pp * 2**k for k in range(5)}
    fewest = max(_least(sketch.key), least_micro(sketch))
    counts = sorted(count for count in found | {fewest} if fewest <= count <= most)
    few = [count for count in counts if count <= ENOUGH * sketch.pp]
    return (few, counts[len(few) :]) if few else (counts, [])


def _least(key: str) -> int:
    return 2 if key == "accumulate" else 1


def _refuse(
    request: Request, sketch: Plan, world: int, batch: int, keys: int, accepted: Callable[[Request], bool]
) -> None:  # fmt: skip
    asked, dp, pp = f"plan {brief(request)!r}", sketch.dp, sketch.pp
    if batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    if sketch.wanted > sketch.blocks:
        why = f"{sketch.wanted} stages, but the model has only {sketch.blocks} blocks"
        raise PlanError(asked, why, fewer_stages(sketch))
    most = min(world, batch)
    if most < 2 and (sketch.zero or sketch.exchange not in ("all-reduce", *AT_SERVERS)):
        what = f"zero={sketch.zero}" if sketch.zero else f"exchange={sketch.exchange}"
        why = f"{what} is among replicas, and {some(world, 'device')} with a batch of {batch} can have one"
        raise PlanError(asked, why, "single")
    if request.key == "hsdp" and request.shard is None and sketch.shard in (0, 1):
        raise PlanError(asked, *_no_groups(dp, most))
    if request.key == "hsdp" and request.shard == dp > 1:
        why = f"it shares out within groups of replicas and sums across them, and {dp} in groups of {dp} are one group"
        groups = _hybrid(dp, inside=0)
        raise PlanError(asked, why, f"shard={groups}" if groups > 1 else _no_groups(dp, most)[1])
    _together(request, sketch, asked)
    own = sum(sketch.spread) if sketch.spread else pp
    if sketch.servers and sketch.world > world:
        raise PlanError(asked, *fewer_devices(sketch, world, keys))
    if dp * own * sketch.tp > world:
        if sketch.tp > 1:
            why = f"it needs {dp} × {own} × {sketch.tp} = {sketch.world} devices, and there are {world}"
            raise PlanError(asked, why, f"dp={max(1, world // (own * sketch.tp))} tp={min(sketch.tp, world)}")
        fewer = _fewer(request, dp, pp, world, accepted)
        if pp > world and (request.order or request.placement):
            fewer = f"{'an order of work' if request.order else 'a placement'} for {some(world, 'rank')}"
        raise PlanError(asked, f"it needs {dp} × {own} = {dp * own} devices, and there are {world}", fewer)
    if batch < dp:
        raise PlanError(asked, f"a batch of {some(batch, 'sample')} cannot be split over {dp} replicas", f"dp={batch}")
    micro = max(request.micro or 1, _least(request.key))
    if batch < dp * micro:
        parts = f"{some(dp, 'replica')} × {some(micro, 'micro-batch')}"
        why = f"a batch of {some(batch, 'sample')} cannot be split over {parts}"
        fits = batch // dp
        changes = fits >= _least(request.key) and not request.order  # which has its micro-batches in it
        raise PlanError(asked, why, f"micro={fits}" if changes else f"--batch {dp * micro}")


def _fewer(request: Request, dp: int, pp: int, world: int, accepted: Callable[[Request], bool]) -> str:
    """As many replicas and stages as there are devices for, of those that go with the rest of a request."""
    found = [(min(dp, world // stages), stages) for stages in range(min(pp, world), 0, -1)]
    for replicas, stages in sorted(found, key=lambda pair: -pair[0] * pair[1]):
        if accepted(replace(request, dp=replicas, pp=stages)):
            return f"pp={stages}" if request.dp is None and replicas == 1 else f"dp={replicas} pp={stages}"
    return f"zero3 dp={world}" if request.zero and world > 1 else "single"


def _together(request: Request, sketch: Plan, asked: str) -> None:
    """Refused in the words of the request where what it says does not go together, whatever the rest will be."""
    if request.slices is not None:
        takes_slices(sketch.schedule, asked)
    micro = request.micro or max(sketch.micro, least_micro(sketch))
    check_sketch(replace(sketch, micro=micro), asked)
    check_sharding(replace(sketch, shard=request.shard or sketch.shard), asked)
    check_ratio(sketch, asked)
    check_served(sketch, asked)
    if request.split is not None and not sketch.servers:
        why = f"split={request.split} elements are cut into a piece for each server, and there is none"
        raise PlanError(asked, why, "leaving split out, or exchange=ps-bsp")
    check_sliced(sketch, asked)
    check_preload(sketch, asked)
    check_offload(sketch, asked)
    if request.stages is not None:
        check_stages(sketch, asked)
