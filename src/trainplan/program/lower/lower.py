"""Lowering: a plan, laid over a model, becomes a program.

    schedule (compute only) ─ templates (messages, recomputation, exchange, step) ─ rows ─ columns + values ─ program

The lowering is a function of the plan *and* of what will run it (`Backend`): pure data parallelism is run by torch's
DDP, pipelines by our own engine, and a CPU host waits for its own arithmetic while a GPU's runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from trainplan.plan import rules
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import brief
from trainplan.profile.profile import Profile
from trainplan.program.agenda import Agendas
from trainplan.program.lower.away import with_copies
from trainplan.program.lower.backend import Backend
from trainplan.program.lower.backend import backend as find_backend
from trainplan.program.lower.costs import cost_classes
from trainplan.program.lower.found import Found
from trainplan.program.lower.groups import Group, across_group, norm_group, replica_group, share_group, stage_group
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.rows import Entries, Table, entries
from trainplan.program.lower.values import values
from trainplan.program.ops import (
    COLLECTIVES,
    COMPUTES,
    COPIES,
    PER_REPLICA,
    RECEIVES,
    SENDS,
    SHARED_OUT,
    SPECS,
    Kind,
    Lane,
)
from trainplan.program.policies import Policy
from trainplan.program.program import Ints, Program, Ragged, are, nonzero
from trainplan.program.staleness import bound_of

_COMPUTE, _SEND, _COLLECTIVE, _PER_REPLICA = map(are, (COMPUTES, SENDS, COLLECTIVES, PER_REPLICA))
_SHARED_OUT, _COPY = are(SHARED_OUT), are(COPIES)
_LANE = np.array([SPECS[kind].lane for kind in Kind], dtype=np.int64)
_WAY = np.isin(_LANE, (Lane.COPY_IN, Lane.COPY_OUT))  # between a device and its host
_AWAITED = are((*RECEIVES, Kind.COUNT, Kind.NORM))  # by their hosts, where receiving keeps these
_WITH_SERVER = are((Kind.SEND_G, Kind.RECV_W, Kind.RECV_INPUT))  # messages of workers


def lower(
    plan: Plan,
    profile: Profile,
    batch: int,
    backend: str = "gloo",
    steps: int = 1,
    fold: bool = False,
    agendas: Sequence[Agendas] = (),
) -> Program:
    """The program of some steps of training.

    `fold`: replicas are alike, so only the first gets lists; collectives still know all their members.
    `agendas`: what of each stage is exchanged when in each step, where that is decided while running.
    """
    rules.check_model(rules.check(plan, batch), profile)
    replicas = (0,) if fold else tuple(range(plan.dp))
    layout = Layout(plan, profile, batch, find_backend(backend), replicas, tuple(agendas))
    lists = with_copies(layout, entries(layout, steps))
    table = lists.table
    numbers = _number(layout, lists)
    row, piece, step, phase = (
        column[numbers.entry] for column in (lists.row, lists.piece, lists.step, lists.phase)
    )  # fmt: skip
    zeros = np.zeros(len(row), dtype=np.int64)
    micro, part = np.divmod(piece, len(plan.slices)) if plan.slices else (piece, zeros)
    group = numbers.group
    kind, rank = table.kind[row], table.rank[row]
    together = group >= 0
    rank[together] = np.array([members[0] for members in numbers.groups], dtype=np.int64)[group[together]]
    cost, classes, bytes_ = cost_classes(layout, table, row, piece, group, numbers.spans)
    made = values(Found(layout, steps, table, row, piece, step, phase), lists, numbers.op, bytes_)
    peer = _peers(layout, table)
    holds, lanes, owners, peers = _resources(
        table, row, group, numbers.groups, peer, one_by_one=plan.exchange in ASYNCHRONOUS
    )
    overlap = "off" if layout.service is not None and layout.service.at_root else plan.overlap
    return Program(
        world=len(lists.start) - 1, steps=steps, kind=kind.astype(np.uint8), job=zeros, step=step,
        # A sum over copies belongs to no one pipeline, what the ranks of one replica do together to no one stage.
        pipeline=_pipeline(layout, table)[row], stage=np.where(_PER_REPLICA[kind], 0, table.stage[row]),
        unit=table.unit[row] + phase, micro_batch=micro, slice=part, peer_stage=table.peer[row], rank=rank,
        peer=peer[row], bytes=bytes_, group=group, version=step, cost=cost,
        waits=_waits(table.kind, layout.backend, overlap, plan.preload)[row], lists=Ragged(lists.start, numbers.op),
        holds=holds, reads=made.reads, resource_lane=lanes, resource_rank=owners, resource_peer=peers,
        value_kind=made.kind, value_bytes=made.bytes, value_rank=made.rank, value_maker=made.maker,
        value_end=made.end, value_late=made.late, value_early=made.early, classes=classes, groups=numbers.groups,
        replicas=plan.dp if fold else 1, title=brief(plan),
        policy=(Policy.LIST,) * plan.workers + (Policy.PUSH,) * plan.servers if layout.by_push else (),
        bound=bound_of(plan.exchange, plan.bound) if layout.by_push else None, slicers=plan.tp,
        priority=table.replica[row] if layout.by_push else None,  # of two pushes at one moment, the lower worker's
    )  # fmt: skip


def _pipeline(layout: Layout, table: Table) -> Ints:
    pipeline = table.replica * layout.plan.lines + table.line
    own = _PER_REPLICA[table.kind]
    pipeline[own] = (table.replica * layout.plan.lines)[own]
    pipeline[_COLLECTIVE[table.kind] & ~own] = 0
    if layout.plan.zero:  # groups of replicas do these side by side: they are told apart by the first of each
        size, kind = layout.plan.sharers, table.kind
        several = _SHARED_OUT[kind] | (kind == Kind.NORM)
        pipeline[several] = (table.replica // size * size)[several]
        across = (kind == Kind.REDUCE_GRAD) & (table.unit < layout.first_tie)
        pipeline[across] = (table.replica % size)[across]
    return pipeline


def _waits(kind: Ints, backend: Backend, overlap: str, preload: str) -> np.ndarray:
    """What keeps the host until it is over."""
    waits = (_COMPUTE[kind] & backend.host_computes) | (kind == Kind.BARRIER)
    waits |= _AWAITED[kind] & backend.receives_wait
    waits |= (kind == Kind.LOAD) & (preload == "off")
    if overlap == "off":
        waits |= _SEND[kind] | _COLLECTIVE[kind] | _COPY[kind]
    return waits


def _peers(layout: Layout, table: Table) -> Ints:
    """The rank at the other end of a message; -1 of other rows."""
    found = np.full(len(table.kind), -1, dtype=np.int64)
    served = _WITH_SERVER[table.kind] & (layout.service is not None)
    plain = nonzero((table.peer >= 0) & ~served)
    replica = np.searchsorted(layout.replicas, table.replica[plain])
    found[plain] = layout.local_ranks[replica, table.line[plain], table.peer[plain]]
    if layout.service is not None:
        servers = [layout.service.server(stage) for stage in table.peer[served].tolist()]
        found[served] = [layout.service.rank(server) for server in servers]
    return found


@dataclass(frozen=True)
class _Numbers:
    """Operations from entries: a collective has one entry for each member, everything else just one."""

    op: Ints  # of each entry
    entry: Ints  # of each operation: of a collective that of the first replica and the first stage
    group: Ints  # of each operation, -1: not a collective
    groups: tuple[tuple[int, ...], ...]  # as ranks of the program
    spans: tuple[tuple[int, ...], ...]  # as ranks of the cluster


def _number(layout: Layout, lists: Entries) -> _Numbers:
    table = lists.table
    collective = _COLLECTIVE[table.kind][lists.row]
    alone = nonzero(~collective)
    op = np.cumsum(~collective) - 1
    together: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    barrier = (table.kind == Kind.BARRIER)[lists.row]
    shared = _SHARED_OUT[table.kind][lists.row]
    sums = nonzero(collective & ~barrier & ~shared)
    columns = [column[lists.row[sums]] for column in (table.kind, table.stage, table.unit, table.replica)]
    rows = (column.tolist() for column in (sums, lists.step[sums], *columns))
    for e, step, kind, stage, unit, replica in zip(*rows, strict=True):
        name = (kind, _named_after(layout, kind, stage, unit), unit, step)
        together.setdefault((*name, _apart(layout, kind, stage, unit, replica)), []).append((replica, stage, e))
    number: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    of_stage: dict[int, Group] = {}  # the ranks of a stage, over all replicas, which most exchanges are of
    entry: list[int] = []
    group: list[int] = []
    for (kind, stage, unit, _, replica), members in together.items():
        op[[e for _, _, e in members]] = len(alone) + len(entry)
        entry.append(min(members)[2])
        # An exchange that is decided while running has groups of its own: one to tell what is ready, one to sum it.
        decided = kind == Kind.NEGOTIATE or (kind == Kind.REDUCE_GRAD and layout.decides and unit < layout.first_tie)
        apart = stage * len(Kind) + kind if decided else -1
        members_of = _members(layout, kind, stage, unit, replica)
        if members_of is None:
            if stage not in of_stage:
                of_stage[stage] = stage_group(layout, (stage,))
            members_of = of_stage[stage]
        key = (*members_of, apart)
        group.append(number.setdefault(key, len(number)))
    # Gathers and scatters are many: one for each group of replicas, step, micro-batch, stage and unit.
    met = nonzero(shared)
    if len(met):
        own = lists.row[met]
        sharing, stages = table.replica[own] // layout.plan.sharers, table.stage[own]
        number_of = np.zeros(len(met), dtype=np.int64)
        for column in (sharing, stages, table.kind[own], table.unit[own], lists.step[met], lists.piece[met]):
            number_of = number_of * (int(column.max()) + 1) + column
        _names, first, which = np.unique(number_of, return_index=True, return_inverse=True)
        op[met] = len(alone) + len(entry) + which
        entry += met[first].tolist()
        pairs = stages[first] * layout.plan.dp + sharing[first]  # few groups do all of them
        of_pair = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
        for pair in dict.fromkeys(pairs.tolist()):
            together_of = share_group(layout, *divmod(pair, layout.plan.dp))
            of_pair[pair] = number.setdefault((*together_of, -1), len(number))
        group += of_pair[pairs].tolist()
    # So are barriers: one for each replica, step and phase.
    met = nonzero(barrier) if layout.in_phases else met[:0]
    if len(met):
        replicas, steps, phases = table.replica[lists.row[met]], lists.step[met], lists.phase[met]
        number_of = (replicas * (steps.max() + 1) + steps) * (phases.max() + 1) + phases
        _names, first, which = np.unique(number_of, return_index=True, return_inverse=True)
        op[met] = len(alone) + len(entry) + which
        entry += met[first].tolist()
        for replica in np.unique(replicas).tolist():
            of = number.setdefault((*replica_group(layout, replica), -1), len(number))
            group += [of] * int((replicas[first] == replica).sum())  # names are in the order of replicas
    return _Numbers(
        op, np.concatenate([alone, np.array(entry, dtype=np.int64)]),
        np.concatenate([np.full(len(alone), -1, dtype=np.int64), np.array(group, dtype=np.int64)]),
        tuple(here for here, _, _ in number), tuple(span for _, span, _ in number),
    )  # fmt: skip


def _named_after(layout: Layout, kind: int, stage: int, unit: int) -> int:
    """The stage whose name a collective bears: the first of its holders."""
    if kind == Kind.NORM:
        return 0
    if kind == Kind.REDUCE_GRAD and unit >= layout.first_tie:
        return layout.ties[unit - layout.first_tie].stages[0]
    return stage


def _apart(layout: Layout, kind: int, stage: int, unit: int, replica: int) -> int:
    """What tells a collective of some replicas from that of others: the first of them, or the place of their share."""
    if kind == Kind.NORM:
        return layout.answering(replica)
    if kind == Kind.REDUCE_GRAD and layout.units[stage] and unit < layout.first_tie:
        return replica % layout.plan.sharers
    return 0


def _members(layout: Layout, kind: int, stage: int, unit: int, replica: int) -> Group | None:
    """Who takes part in a collective: ranks of the program, and of the cluster; None: all that hold its stage."""
    if kind == Kind.NORM:
        return norm_group(layout, replica)
    if kind == Kind.REDUCE_GRAD and unit >= layout.first_tie:
        return stage_group(layout, layout.ties[unit - layout.first_tie].stages)
    if kind == Kind.REDUCE_GRAD and layout.units[stage]:
        return across_group(layout, stage, replica)
    return None


def _resources(
    table: Table, row: Ints, group: Ints, groups: tuple[tuple[int, ...], ...], peer: Ints, one_by_one: bool
) -> tuple[Ragged, np.ndarray, Ints, Ints]:
    """What each operation holds: its device, a way between that and its host, the link that it sends over, or a place
    in its group's queue on each rank.

    A receive holds nothing: the message is on the link, which the sender holds. An asynchronous server gives weights to
    one worker after the other, since gloo writes what a thread sends in that thread: these hold its links to all.
    """
    world = int(table.rank.max()) + 1
    compute, send, copy = _COMPUTE[table.kind], _SEND[table.kind], _WAY[table.kind]
    to_all = one_by_one & (table.kind[send] == Kind.SEND_W)
    links, link = np.unique(table.rank[send] * (world + 1) + np.where(to_all, world, peer[send]), return_inverse=True)
    ways, way = _LANE[table.kind[copy]] * world + table.rank[copy], np.zeros(0, dtype=np.int64)
    if len(ways):
        ways, way = np.unique(ways, return_inverse=True)
    held = np.where(compute, table.rank, -1)  # by a row
    held[send] = world + link
    held[copy] = world + len(links) + way
    members = Ragged.of(groups)
    start, items = _held(row, held, group, members.start, world + len(links) + len(ways))
    lanes = np.concatenate([
        np.full(world, Lane.COMPUTE, dtype=np.uint8), np.full(len(links), Lane.LINK, dtype=np.uint8),
        (ways // world).astype(np.uint8), np.full(len(members.items), Lane.GROUP, dtype=np.uint8),
    ])  # fmt: skip
    owners = np.concatenate([np.arange(world), links // (world + 1), ways % world, members.items])
    to = links % (world + 1)
    others = np.concatenate([np.full(world, -1), np.where(to < world, to, -1), np.full(len(ways), -1), members.owner])
    return Ragged(start, items), lanes, owners, others


@njit(cache=True)
def _held(row: Ints, held: Ints, group: Ints, queue_start: Ints, queues: int) -> tuple[Ints, Ints]:
    """Operation → resources, as a ragged array: what its row holds, if anything; or of a collective its group's queues,
    which are those from `queues` on."""
    start = np.zeros(len(row) + 1, np.int64)
    for op in range(len(row)):
        g = group[op]
        many = queue_start[g + 1] - queue_start[g] if g >= 0 else np.int64(held[row[op]] >= 0)
        start[op + 1] = start[op] + many
    items = np.empty(start[-1], np.int64)
    for op in range(len(row)):
        for k in range(start[op + 1] - start[op]):
            items[start[op] + k] = queues + queue_start[group[op]] + k if group[op] >= 0 else held[row[op]]
    return start, items
