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
from trainplan.program.lower.distinct import distinct
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
from trainplan.program.program import Bools, Ints, Program, Ragged, are, nonzero
from trainplan.program.staleness import bound_of

_COMPUTE, _SEND, _COLLECTIVE, _PER_REPLICA = map(are, (COMPUTES, SENDS, COLLECTIVES, PER_REPLICA))
_SHARED_OUT, _COPY = are(SHARED_OUT), are(COPIES)
_LANE = np.array([SPECS[kind].lane for kind in Kind], dtype=np.int64)
_WAY = np.isin(_LANE, (Lane.COPY_IN, Lane.COPY_OUT))  # between a device and its host
_AWAITED = are((*RECEIVES, Kind.COUNT, Kind.NORM))  # by their hosts, where receiving keeps these
# As numbers: whatever numpy compares with a member of an enumeration it first asks for five attributes in vain.
_NORM, _REDUCE_GRAD, _NEGOTIATE = int(Kind.NORM), int(Kind.REDUCE_GRAD), int(Kind.NEGOTIATE)
_BARRIER, _LOAD, _SEND_W = int(Kind.BARRIER), int(Kind.LOAD), int(Kind.SEND_W)
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
    waits = _waits(table.kind, layout.backend, overlap, plan.preload)[row]
    if layout.backend.hosts_attend:
        waits[_last_of_steps(Ragged(lists.start, numbers.op), kind, step)] = True
    return Program(
        world=len(lists.start) - 1, steps=steps, kind=kind.astype(np.uint8), job=zeros, step=step,
        # A sum over copies belongs to no one pipeline, what the ranks of one replica do together to no one stage.
        pipeline=_pipeline(layout, table)[row], stage=np.where(_PER_REPLICA[kind], 0, table.stage[row]),
        unit=table.unit[row] + phase, micro_batch=micro, slice=part, peer_stage=table.peer[row], rank=rank,
        peer=peer[row], bytes=bytes_, group=group, version=step, cost=cost,
        waits=waits, lists=Ragged(lists.start, numbers.op),
        holds=holds, reads=made.reads, resource_lane=lanes, resource_rank=owners, resource_peer=peers,
        value_kind=made.kind, value_bytes=made.bytes, value_rank=made.rank, value_maker=made.maker,
        value_end=made.end, value_late=made.late, value_early=made.early, classes=classes, groups=numbers.groups,
        replicas=plan.dp if fold else 1, title=brief(plan),
        policy=(Policy.LIST,) * plan.workers + (Policy.PUSH,) * plan.servers if layout.by_push else (),
        bound=bound_of(plan.exchange, plan.bound) if layout.by_push else None, slicers=plan.tp,
        hosts_attend=layout.backend.hosts_attend,
        priority=table.replica[row] if layout.by_push else None,  # of two pushes at one moment, the lower worker's
    )  # fmt: skip


def _pipeline(layout: Layout, table: Table) -> Ints:
    pipeline = table.replica * layout.plan.lines + table.line
    own = _PER_REPLICA[table.kind]
    pipeline[own] = (table.replica * layout.plan.lines)[own]
    pipeline[_COLLECTIVE[table.kind] & ~own] = 0
    if layout.plan.zero:  # groups of replicas do these side by side: they are told apart by the first of each
        size, kind = layout.plan.sharers, table.kind
        several = _SHARED_OUT[kind] | (kind == _NORM)
        pipeline[several] = (table.replica // size * size)[several]
        across = (kind == _REDUCE_GRAD) & (table.unit < layout.first_tie)
        pipeline[across] = (table.replica % size)[across]
    return pipeline


def _waits(kind: Ints, backend: Backend, overlap: str, preload: str) -> np.ndarray:
    """What keeps the host until it is over."""
    waits = (_COMPUTE[kind] & backend.host_computes) | (kind == _BARRIER)
    waits |= _AWAITED[kind] & backend.receives_wait
    waits |= (kind == _LOAD) & (preload == "off")
    if overlap == "off":
        waits |= _SEND[kind] | _COLLECTIVE[kind] | _COPY[kind]
    return waits


def _last_of_steps(lists: Ragged, kind: Ints, step: Ints) -> Ints:
    """What every rank computes last in each step: its host waits for its device before it begins the next one."""
    ops, rank = lists.items[_COMPUTE[kind[lists.items]]], lists.owner[_COMPUTE[kind[lists.items]]]
    _, latest = np.unique((rank * (step.max() + 1) + step[ops])[::-1], return_index=True)
    return np.asarray(ops[::-1][latest])


def _peers(layout: Layout, table: Table) -> Ints:
    """The rank at the other end of a message; -1 of other rows."""
    found = np.full(len(table.kind), -1, dtype=np.int64)
    served = _WITH_SERVER[table.kind] & (layout.service is not None)
    plain = nonzero((table.peer >= 0) & ~served)
    found[plain] = layout.local_ranks[table.replica[plain], table.line[plain], table.peer[plain]]
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
    table, plan = lists.table, layout.plan
    op, alone, together = _apart(lists.row, _COLLECTIVE[table.kind])
    row = lists.row[together]
    kinds = table.kind[row]
    shared = _SHARED_OUT[kinds]
    numbers, rest = _Groups(layout), together
    entry, group, count = [alone], [np.full(len(alone), -1, dtype=np.int64)], len(alone)
    if shared.any():
        rest, met = together[~shared], together[shared]
        row = lists.row[rest]
        kinds = table.kind[row]
    if layout.in_phases:
        barrier = kinds == _BARRIER
        rest, walls = rest[~barrier], rest[barrier]
        row = lists.row[rest]
        kinds = table.kind[row]
    # Every step has the same sums: a row of the table says which of them it is, and of those of a step the first of the
    # members, by replica, stage and place in the lists, stands for all.
    name_of = np.zeros(len(table.kind), dtype=np.int64)
    names: dict[tuple[int, int, int, int], int] = {}
    own_rows = nonzero(np.bincount(row, minlength=len(name_of)) > 0)
    columns = (own_rows, table.kind[own_rows], table.stage[own_rows], table.unit[own_rows], table.replica[own_rows])
    for at, kind, stage, unit, replica in zip(*[column.tolist() for column in columns], strict=True):
        named, apart = _named(layout, kind, stage, unit, replica)
        name_of[at] = names.setdefault((kind, named, unit, apart), len(names))
    of, first, which = _met(
        rest, lists.step[rest], name_of[row], table.replica[row], table.stage[row], len(names)
    )  # fmt: skip
    op[rest] = of + count
    entry.append(first)
    count += len(first)
    members, of_name = list(names), np.zeros(len(names), dtype=np.int64)
    for name in dict.fromkeys(which.tolist()):
        of_name[name] = numbers.of_sum(*members[name])
    group.append(of_name[which])
    # Gathers and scatters are many: one for each group of replicas, step, micro-batch, stage and unit.
    if shared.any():
        own_rows = lists.row[met]
        sharing, stages = table.replica[own_rows] // plan.sharers, table.stage[own_rows]
        number_of = sharing
        for column in (stages, table.kind[own_rows], table.unit[own_rows], lists.step[met], lists.piece[met]):
            number_of = number_of * (int(column.max()) + 1) + column
        begin, place = distinct(number_of)
        op[met] = count + place
        entry.append(met[begin])
        count += len(begin)
        pairs = stages[begin] * plan.dp + sharing[begin]  # few groups do all of them
        of_pair = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
        for pair in dict.fromkeys(pairs.tolist()):
            of_pair[pair] = numbers.of(share_group(layout, *divmod(pair, plan.dp)))
        group.append(of_pair[pairs])
    # So are barriers: one for each replica, step and phase.
    if layout.in_phases and len(walls):
        replicas, steps, phases = table.replica[lists.row[walls]], lists.step[walls], lists.phase[walls]
        number_of = (replicas * (steps.max() + 1) + steps) * (phases.max() + 1) + phases
        begin, place = distinct(number_of)
        op[walls] = count + place
        entry.append(walls[begin])
        replicas = replicas[begin]
        for replica in np.unique(replicas).tolist():
            of_replica = numbers.of(replica_group(layout, replica))
            group.append(np.full((replicas == replica).sum(), of_replica))  # names are in the order of replicas
    return _Numbers(
        op, np.concatenate(entry), np.concatenate(group),
        tuple([here for here, _, _ in numbers.known]), tuple([span for _, span, _ in numbers.known]),
    )  # fmt: skip


@njit(cache=True)
def _apart(row: Ints, collective: Bools) -> tuple[Ints, Ints, Ints]:
    """Of every entry its operation, where that is no collective; the entries of those, and the others."""
    op, alone, together = np.empty(len(row), np.int64), np.empty(len(row), np.int64), np.empty(len(row), np.int64)
    count = 0
    for entry in range(len(row)):
        if collective[row[entry]]:
            together[entry - count], op[entry] = entry, -1
        else:
            alone[count], op[entry] = entry, count
            count += 1
    return op, alone[:count], together[: len(row) - count]


@njit(cache=True)
def _met(entry: Ints, step: Ints, name: Ints, replica: Ints, stage: Ints, names: int) -> tuple[Ints, Ints, Ints]:
    """Which operation every entry is, of those with the same name and step; and of each of these the entry that stands
    for it and its name. They are counted as they come."""
    steps, stages = (step.max() + 1, stage.max() + 1) if len(step) else (0, 0)
    known, of = np.full(names * steps, -1, np.int64), np.empty(len(entry), np.int64)
    first, which, best = np.empty(len(entry), np.int64), np.empty(len(entry), np.int64), np.empty(len(entry), np.int64)
    count = 0
    for k in range(len(entry)):
        at, own = name[k] * steps + step[k], replica[k] * stages + stage[k]
        if known[at] < 0:
            known[at] = count
            first[count], which[count], best[count] = entry[k], name[k], own
            count += 1
        elif own < best[known[at]] or (own == best[known[at]] and entry[k] < first[known[at]]):
            first[known[at]], best[known[at]] = entry[k], own
        of[k] = known[at]
    return of, first[:count], which[:count]


def _named(layout: Layout, kind: int, stage: int, unit: int, replica: int) -> tuple[int, int]:
    """The stage whose name a collective bears: the first of its holders. And what tells it from that of other replicas:
    the first of them, or the place of their share."""
    if kind == _NORM:
        return 0, layout.answering(replica)
    if kind == _REDUCE_GRAD:
        if unit >= layout.first_tie:
            return layout.ties[unit - layout.first_tie].stages[0], 0
        if layout.units[stage]:
            return stage, replica % layout.plan.sharers
    return stage, 0


class _Groups:
    """The groups of ranks that do something together, each with its number."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
        self._sums: dict[tuple[int, ...], int] = {}  # those of sums, by what they are of: every step has the same
        self._stages: dict[int, Group] = {}

    def of(self, members: Group, apart: int = -1) -> int:
        """The number of a group. `apart`: of those that are the same ranks, and a process group of their own."""
        return self.known.setdefault((*members, apart), len(self.known))

    def of_sum(self, kind: int, stage: int, unit: int, replica: int) -> int:
        """Who takes part in a sum of a stage (which bears that name, and is of these replicas)."""
        layout = self.layout
        tied = kind == _REDUCE_GRAD and unit >= layout.first_tie
        across = kind == _REDUCE_GRAD and not tied and bool(layout.units[stage])
        # An exchange that is decided while running has groups of its own: one to tell what is ready, one to sum it.
        decided = kind == _NEGOTIATE or (kind == _REDUCE_GRAD and layout.decides and not tied)
        key = kind, stage, unit if tied else -1, replica
        if not decided and key in self._sums:
            return self._sums[key]
        if kind == _NORM:
            members = norm_group(layout, replica)
        elif tied:
            members = stage_group(layout, layout.ties[unit - layout.first_tie].stages)
        elif across:
            members = across_group(layout, stage, replica)
        else:
            members = self._of_stage(stage)
        found = self._sums[key] = self.of(members, stage * len(Kind) + kind if decided else -1)
        return found

    def _of_stage(self, stage: int) -> Group:
        """The ranks of a stage, over all replicas, which most sums are of."""
        if stage not in self._stages:
            self._stages[stage] = stage_group(self.layout, (stage,))
        return self._stages[stage]


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
    to_all = one_by_one & (table.kind[send] == _SEND_W)
    links = table.rank[send] * (world + 1) + np.where(to_all, world, peer[send])
    ways = _LANE[table.kind[copy]] * world + table.rank[copy]
    first, link = distinct(links)
    links = links[first]
    first, way = distinct(ways)
    ways = ways[first]
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
