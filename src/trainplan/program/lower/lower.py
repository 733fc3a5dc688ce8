"""Lowering: a plan, laid over a model, becomes a program.

    schedule (compute only) ─ templates (messages, recomputation, exchange, step) ─ rows ─ columns + values ─ program

The lowering is a function of the plan *and* of what will run it (`Backend`): pure data parallelism is run by torch's
DDP, pipelines by our own engine, and a CPU host waits for its own arithmetic while a GPU's runs ahead.
"""

from __future__ import annotations

import numpy as np

from trainplan.plan import rules
from trainplan.plan.plan import Plan
from trainplan.plan.text import text
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend as find_backend
from trainplan.program.lower.costs import cost_classes
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.rows import Entries, entries
from trainplan.program.lower.values import values
from trainplan.program.ops import COLLECTIVES, COMPUTES, RECEIVES, SENDS, Kind, Lane
from trainplan.program.program import Ints, Program, Ragged


def lower(
    plan: Plan, profile: Profile, batch: int, backend: str = "gloo", steps: int = 1, fold: bool = False
) -> Program:
    """The program of some steps of training.

    `fold`: replicas are alike, so only the first gets lists; collectives still know all their members.
    """
    rules.check(plan, batch)
    replicas = (0,) if fold else tuple(range(plan.dp))
    layout = Layout(plan, profile, batch, find_backend(backend), replicas)
    rows = entries(layout, steps)
    op_of_entry, first_entry, group, groups, spans = _number(layout, rows)
    world = layout.plan.pp * len(replicas)
    # Columns of operations: those of the first entry of each.
    kind = rows.kind[first_entry]
    stage, replica, step = rows.stage[first_entry], rows.replica[first_entry], rows.step[first_entry]
    unit, micro, peer_stage = rows.unit[first_entry], rows.micro[first_entry], rows.peer[first_entry]
    rank = rows.rank[first_entry]
    ranks_of = (
        np.array([[layout.local(r, s) for s in range(plan.pp)] for r in range(plan.dp)])
        if not fold
        else (np.arange(plan.pp)[None, :])
    )
    message = peer_stage >= 0
    peer = np.where(message, ranks_of[np.where(message, replica, 0), np.where(message, peer_stage, 0)], -1)
    shared = group >= 0
    pipeline = np.where(shared & (kind != Kind.NORM), 0, replica)
    cost, classes, bytes_ = cost_classes(
        layout, kind, stage, unit, micro, peer_stage, replica, rows.adds[first_entry], rows.last[first_entry], group,
        spans,
    )  # fmt: skip
    found = Found(layout, steps, kind, stage, unit, micro, peer_stage, replica, step)
    made = values(found, rank, group, groups, bytes_)
    holds, lanes, owners, peers = _resources(kind, rank, peer, group, groups)
    is_compute, is_receive = np.isin(kind, COMPUTES), np.isin(kind, RECEIVES)
    waits = (is_compute & layout.backend.host_computes) | (is_receive & layout.backend.receives_wait)
    waits |= np.isin(kind, (Kind.COUNT, Kind.NORM)) & layout.backend.receives_wait
    if plan.overlap == "off":
        waits |= np.isin(kind, SENDS + COLLECTIVES)
    lists_start = np.concatenate([[0], np.cumsum(np.bincount(rows.rank, minlength=world))])
    zeros = np.zeros(len(kind), dtype=np.int64)
    return Program(
        world=world, steps=steps, kind=kind.astype(np.uint8), job=zeros, step=step, pipeline=pipeline, stage=stage,
        unit=unit, micro_batch=micro, slice=zeros, peer_stage=peer_stage, rank=rank, peer=peer, bytes=bytes_,
        group=group, version=step, cost=cost, waits=waits, lists=Ragged(lists_start, op_of_entry), holds=holds,
        reads=made.reads, resource_lane=lanes, resource_rank=owners, resource_peer=peers, value_kind=made.kind,
        value_bytes=made.bytes, value_rank=made.rank, value_maker=made.maker, value_end=made.end, classes=classes,
        groups=groups, replicas=plan.dp if fold else 1, title=text(plan),
    )  # fmt: skip


def _number(
    layout: Layout, rows: Entries
) -> tuple[Ints, Ints, Ints, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Operations from entries: a collective has one entry for each member, everything else just one.

    Returns the operation of each entry, the first entry of each operation, the group of each operation (-1: none), and
    the groups as ranks of the program and as ranks of the cluster.
    """
    collective = np.isin(rows.kind, COLLECTIVES)
    alone = np.cumsum(~collective) - 1
    count = int((~collective).sum())
    op_of_entry = alone.astype(np.int64)
    first_entry = list(np.flatnonzero(~collective))
    known: dict[tuple[int, ...], int] = {}
    group_number: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    groups_of: list[int] = []
    for e in np.flatnonzero(collective):
        kind, stage, unit, step = Kind(int(rows.kind[e])), int(rows.stage[e]), int(rows.unit[e]), int(rows.step[e])
        replica = int(rows.replica[e])
        members, span, name = _members(layout, kind, stage, unit, replica)
        key = (kind, name, unit, step, replica if kind is Kind.NORM else 0)
        if key not in known:
            known[key] = count + len(groups_of)
            groups_of.append(group_number.setdefault((members, span), len(group_number)))
            first_entry.append(e)
        op_of_entry[e] = known[key]
    group = np.concatenate([np.full(count, -1, dtype=np.int64), np.array(groups_of, dtype=np.int64)])
    groups = tuple(members for members, _ in group_number)
    spans = tuple(span for _, span in group_number)
    return op_of_entry, np.array(first_entry, dtype=np.int64), group, groups, spans


def _members(
    layout: Layout, kind: Kind, stage: int, unit: int, replica: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Who takes part in a collective: ranks of the program, ranks of the cluster, and the stage it is named after."""
    plan = layout.plan
    if kind is Kind.NORM:  # over the stages of one replica
        return (
            tuple(sorted(layout.local(replica, s) for s in range(plan.pp))),
            tuple(sorted(layout.rank(replica, s) for s in range(plan.pp))),
            0,
        )
    most = max((len(buckets) for buckets in layout.buckets), default=0)
    if kind is Kind.REDUCE_GRAD and unit >= most:
        tie = layout.ties[unit - most]
        return (*layout.stage_group(tie.stages), tie.stages[0])
    return (*layout.stage_group((stage,)), stage)


def _resources(
    kind: Ints, rank: Ints, peer: Ints, group: Ints, groups: tuple[tuple[int, ...], ...]
) -> tuple[Ragged, np.ndarray, Ints, Ints]:
    """What each operation holds: its device, the link that it sends over, or a place in its group's queue on each rank.

    A receive holds nothing: the message is on the link, which the sender holds.
    """
    world = int(max(rank.max(), peer.max())) + 1
    compute, send = np.isin(kind, COMPUTES), np.isin(kind, SENDS)
    links, link = np.unique(rank[send] * world + peer[send], return_inverse=True)
    start = np.zeros(len(kind) + 1, dtype=np.int64)
    sizes = np.array([len(g) for g in groups] or [0], dtype=np.int64)
    count = np.where(group >= 0, sizes[np.maximum(group, 0)], (compute | send).astype(np.int64))
    np.cumsum(count, out=start[1:])
    items = np.empty(int(start[-1]), dtype=np.int64)
    items[start[:-1][compute]] = rank[compute]
    items[start[:-1][send]] = world + link
    places = np.concatenate([[0], np.cumsum(sizes)])
    for op in np.flatnonzero(group >= 0):
        g = group[op]
        items[start[op] : start[op + 1]] = world + len(links) + np.arange(places[g], places[g] + sizes[g])
    lanes = np.concatenate(
        [np.full(world, Lane.COMPUTE), np.full(len(links), Lane.LINK), np.full(int(places[-1]), Lane.GROUP)]
    ).astype(np.uint8)
    members = np.array([r for g in groups for r in g], dtype=np.int64)
    owners = np.concatenate([np.arange(world), links // world, members])
    peers = np.concatenate([np.full(world, -1), links % world, np.repeat(np.arange(len(groups)), sizes[: len(groups)])])
    return Ragged(start, items), lanes, owners.astype(np.int64), peers.astype(np.int64)
