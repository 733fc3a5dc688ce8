"""Cost classes: operations that take equally long share one, so that seconds are worked out once a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from trainplan.profile.parcels import parcels
from trainplan.profile.profile import Amount, Profile
from trainplan.program.exchanges import TELLING
from trainplan.program.lower.activations import crossings_of
from trainplan.program.lower.buckets import kept
from trainplan.program.lower.edges import message_bytes
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.loads import INPUT_MESSAGES, load_class
from trainplan.program.lower.rows import Table
from trainplan.program.lower.served import served_class
from trainplan.program.ops import COPIES, SENDS, SHARED_OUT, SPECS, Kind
from trainplan.program.program import CostClass, Inside, Ints, are, nonzero
from trainplan.program.text import WITHOUT_MICRO_BATCH

_KINDS = tuple(Kind)
# By name: to look up a member of an enumeration takes ten times as long as a name, and every class asks for several.
_F, _B, _R, _SEND_F, _RECV_F, _STEP, _LOAD = Kind.F, Kind.B, Kind.R, Kind.SEND_F, Kind.RECV_F, Kind.STEP, Kind.LOAD
_REDUCE_GRAD, _COUNT, _LOSS, _NORM, _BARRIER = Kind.REDUCE_GRAD, Kind.COUNT, Kind.LOSS, Kind.NORM, Kind.BARRIER
_TICK, _NEGOTIATE = Kind.TICK, Kind.NEGOTIATE
_IS_PASS = are((Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)).tolist()
_SHARED = (Kind.F, Kind.R, Kind.B)  # passes whose blocks ranks may share
_IS_SERVED = are((Kind.SEND_G, Kind.RECV_G, Kind.SEND_W, Kind.RECV_W, Kind.STEP)).tolist()
_IS_WHOLE = are(WITHOUT_MICRO_BATCH)
_IS_SHARED_OUT, _IS_MESSAGE = are(SHARED_OUT).tolist(), [SPECS[kind].message for kind in Kind]
_CARRIES = [
    SPECS[kind].message or SPECS[kind].collective or kind in (*COPIES, Kind.LOAD) for kind in Kind
]  # fmt: skip


def cost_classes(
    layout: Layout, table: Table, row: Ints, piece: Ints, group: Ints, spans: tuple[tuple[int, ...], ...]
) -> tuple[Ints, tuple[CostClass, ...], Ints]:
    """Class of each operation, the classes, and the payload bytes of each operation."""
    # What decides the cost: the row of an operation, and how many samples (or what slice of them) it is for.
    sizes, index = layout.kinds_of_amount
    place = table.alike[row]
    if len(sizes) > 1:
        place = place * len(sizes) + index[table.replica[row], piece]
    example = np.full(len(table.kind) * len(sizes), -1, dtype=np.int64)
    example[place] = np.arange(len(row))
    spots = nonzero(example >= 0)  # many rows are of variants that this order of work has none of
    example[spots], example_of = np.arange(len(spots)), example[spots]
    used, size = np.divmod(spots, len(sizes))
    columns = (
        table.kind, table.stage, table.unit, table.peer, table.replica, table.line, table.adds, table.last, table.again,
        table.size, table.cut,
    )  # fmt: skip
    members = (*spans, ())  # the last: of what is no collective
    kinds = table.kind[used]
    amounts: list[Amount] = [
        0 if whole else sizes[which]
        for whole, which in zip(_IS_WHOLE[kinds].tolist(), size.tolist(), strict=True)
    ]  # fmt: skip
    together = [members[number] for number in group[example_of].tolist()]
    rows = zip(amounts, together, *[column[used].tolist() for column in columns], strict=True)
    classes = _classes(layout, rows)
    cost = example[place]
    payload = [c.bytes if _CARRIES[c.kind] else 0 for c in classes]
    return cost, classes, np.array(payload, dtype=np.int64)[cost]


class _Way(NamedTuple):
    """Where the passes of a stage run: what their classes depend on, beside what their rows say."""

    spans: dict[tuple[int, ...], _Span]  # what is known of the pieces that they come in, by kind, unit and variant
    spot: int  # a number for the ranks
    rank: int
    sharing: tuple[int, ...]  # the ranks that share its blocks, where any do
    first: int
    last: int


_Span = tuple[int, int, float, float, bool]  # blocks first ≤ b < last, share of their time since … until, started


def _classes(layout: Layout, rows: Iterable[tuple[Any, ...]]) -> tuple[CostClass, ...]:
    """The class of every row. Many plans have the same, and each of these is made once: so prices are found by it."""
    known: dict[tuple[Any, ...], CostClass] = kept(layout.profile, "classes of passes", dict)
    others: dict[tuple[Any, ...], CostClass] = kept(layout.profile, "classes of others", dict)
    where: dict[tuple[int, int, int], _Way] = {}
    found = []
    for row in rows:
        samples, _, number, stage, unit, peer, replica, line, adds, last_pass, again, _, cut = row
        if layout.service is not None and _IS_SERVED[number]:  # its stage may be a server's
            served = served_class(layout, layout.service, _KINDS[number], stage, unit, peer, replica)
            if served is not None:
                found.append(served)
                continue
        name = replica, line, stage
        way = where.get(name)
        if way is None:
            way = where[name] = _way(layout, *name)
        if not _IS_PASS[number]:
            found.append(_class(layout, others, way, *row))
            continue
        what = number, unit, last_pass, again, cut
        span = way.spans.get(what)
        if span is None:
            span = way.spans[what] = _span(layout, stage, *what)
        key = number, span, samples, adds, way.spot
        one = known.get(key)
        if one is None:
            one = known[key] = _pass(layout, way, _KINDS[number], span, samples, adds)
        found.append(one)
    return tuple(found)


def _way(layout: Layout, replica: int, line: int, stage: int) -> _Way:
    """Plans that have spans in common find them by what these depend on, once a stage."""
    plan, rank = layout.plan, layout.plan.rank(replica, stage, line)
    bound = plan.bounds[stage]
    spots: dict[tuple[Any, ...], int] = kept(layout.profile, "spots of passes", dict)
    buckets = () if stage in layout.late else tuple([bucket.ready for bucket in layout.buckets[stage]])
    cuts = tuple(layout.sections[stage])
    name = "spans", bound, plan.zero, layout.offloads, bool(layout.units[stage]), cuts, buckets
    sharing = plan.slicers(rank) if plan.tp > 1 else ()
    # What ranks have a share each of depends on the cuts.
    spot = spots.setdefault((rank, sharing, plan.bounds if layout.partitions else ()), len(spots))
    return _Way(kept(layout.profile, name, dict), spot, rank, sharing, *bound)


def _span(layout: Layout, stage: int, number: int, unit: int, last_pass: int, again: int, cut: int) -> _Span:
    """What a pass, or a piece of one, goes through."""
    kind = _KINDS[number]
    first, last = layout.plan.bounds[stage]
    if kind is _R or (again and kind is _B):
        return unit, unit + 1, 0.0, 1.0, False
    if kind is _F and cut:
        return first + unit, first + unit + 1, unit / (last - first), (unit + 1) / (last - first), False
    if (kind is _F or kind is _B) and layout.cut(stage, kind, bool(last_pass)):
        pieces = layout.sections[stage]
        first, last = pieces[unit if kind is _F else len(pieces) - 1 - unit]
        return first, last, 0.0, 1.0, unit > 0
    if kind is _B and last_pass and len(layout.buckets[stage]) > 1 and stage not in layout.late:
        # A piece of the backward pass, which is cut where buckets become ready.
        buckets = layout.buckets[stage]
        since = buckets[unit - 1].ready if unit else 0.0
        return first, last, since, buckets[unit].ready if unit < len(buckets) - 1 else 1.0, False
    return first, last, 0.0, 1.0, False


def _pass(layout: Layout, way: _Way, kind: Kind, span: _Span, samples: Amount, adds: int) -> CostClass:
    """A pass, or a piece of one."""
    first, last, since, until, started = span
    sharing = way.sharing if kind in _SHARED else ()
    talk = _inside(layout.profile, kind is _B, first, last, samples) if sharing else ()
    if kind is _R and layout.partitions:
        talk = (*_gathered(layout, first, samples), *talk)
    return CostClass(
        kind, way.rank, -1, first, last, samples, 0, (), since, until, adds, sharing=sharing, inside=talk,
        started=started,
    )  # fmt: skip


def _gathered(layout: Layout, block: int, samples: Amount) -> tuple[Inside, ...]:
    """What a block read and ranks have a share each of, before it is recomputed."""
    sizes = Counter(crossing.bytes(samples) for crossing in crossings_of(layout)[0][block])
    return tuple(Inside("all_gather", size, count) for size, count in sizes.items())


def _inside(profile: Profile, back: bool, first: int, last: int, samples: Amount) -> tuple[Inside, ...]:
    """What ranks that share the blocks of a pass exchange inside it."""

    def found() -> tuple[Inside, ...]:
        # Most blocks are of one kind, and exchange the same: so each is looked at once, and counted.
        each = [block.backward_talk if back else block.forward_talk for block in profile.blocks[first:last]]
        alike = Counter(map(id, each))
        inside: dict[tuple[str, int, bool], int] = {}
        for own in {id(own): own for own in each}.values():
            for part in own:
                name = part.what, round(part.bytes_per_sample * float(samples)), part.hidden  # type: ignore[arg-type]
                inside[name] = inside.get(name, 0) + part.times * alike[id(own)]
        return tuple(Inside(what, size, count, hidden) for (what, size, hidden), count in inside.items())

    talk: tuple[Inside, ...] = kept(profile, ("inside", back, first, last, samples), found)
    return talk


def _class(
    layout: Layout, known: dict[tuple[Any, ...], CostClass], way: _Way, samples: Amount, members: tuple[int, ...],
    number: int, stage: int, unit: int, peer: int, replica: int, line: int, adds: int, last_pass: int, again: int,
    together: int, cut: int,
) -> CostClass:  # fmt: skip
    """Of what is no pass. Those that plans have most of are known by what they are made of."""
    plan, profile, kind = layout.plan, layout.profile, _KINDS[number]
    rank, first, last = way.rank, way.first, way.last
    if _IS_SHARED_OUT[number]:
        size, by = layout.units[stage][unit].bytes, layout.backend.sums_by
        key: tuple[Any, ...] = number, rank, first, last, size, members, by
        one = known.get(key)
        if one is None:
            one = known[key] = CostClass(kind, rank, -1, first, last, 0, size, members, by=by)
        return one
    if kind is _LOAD or kind in INPUT_MESSAGES:
        return load_class(layout, kind, rank, together)
    if _IS_MESSAGE[number]:
        forward = kind is _SEND_F or kind is _RECV_F
        edge = layout.edge[(stage, peer) if forward == (kind in SENDS) else (peer, stage)]
        numbers = edge.crossings if forward else edge.gradients
        other = plan.rank(replica, peer, line)
        key = number, rank, other, first, last, samples, numbers
        one = known.get(key)
        if one is None:
            size = message_bytes(profile, numbers, samples)
            one = CostClass(kind, rank, other, first, last, samples, size, tensors=len(numbers))
            known[key] = one
        return one
    if kind is _REDUCE_GRAD and layout.decides and unit < layout.first_tie:
        part = layout.decided[stage].parts[unit]
        apart = 1 if together == part.bytes else 2
        return CostClass(
            kind, rank, -1, first, last, 0, together, members, tensors=apart, by=layout.sums_by,
            element=layout.buckets[stage][part.bucket].element, background=True,
        )  # fmt: skip
    if kind is _NEGOTIATE:
        size = layout.decided[stage].rule.bits_bytes  # from host to host
        return CostClass(kind, rank, -1, first, last, 0, size, members, by=TELLING, element=8, background=True)
    if kind is _TICK:
        return CostClass(kind, rank, seconds=plan.cycle)
    if kind is _REDUCE_GRAD:
        tie = unit - layout.first_tie
        if tie >= 0:  # of the same weights on several stages, which only the backend sums
            size, element = layout.ties[tie].bytes, layout.ties[tie].element
            return CostClass(kind, rank, -1, first, last, 0, size, members, by=layout.backend.sums_by, element=element)
        if layout.units[stage]:  # of what a rank has a share of, over the groups that share it
            size = layout.units[stage][unit].share_bytes
            return CostClass(kind, rank, -1, first, last, 0, size, members, by=layout.backend.sums_by)
        bucket = layout.buckets[stage][unit]
        return CostClass(
            kind, rank, -1, first, last, 0, bucket.bytes, members, by=layout.sums_by, element=bucket.element,
            node=plan.node,
        )  # fmt: skip
    if kind in (_COUNT, _LOSS, _NORM):
        return CostClass(kind, rank, -1, first, last, 0, 8, members, by=layout.backend.sums_by, element=8)
    if kind is _BARRIER:
        return CostClass(kind, rank, members=members)
    if kind is _STEP and layout.crosses:
        return CostClass(kind, rank, -1, unit, unit + 1, accumulate=1, apart=True)
    if kind is _STEP:
        emptied = int(layout.copies[stage] > 1 and not layout.observed and not layout.plan.zero)
        return CostClass(kind, rank, -1, first, last, accumulate=emptied, until=layout.shared_share(stage))
    pieces = layout.sections[stage]  # it is a copy of what one of them leaves
    size = parcels(profile, samples, pieces, bool(again))[unit].bytes
    return CostClass(kind, rank, -1, *pieces[unit], samples, size)
