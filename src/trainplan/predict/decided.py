"""The agendas that the clock expects of an exchange whose order is decided while running, one for every stage.

Backward passes do not wait for the exchange of their own step, so they are played first, and say when the gradients of
every stage are ready on every rank; from that the rounds follow (`rounds.py`). Where communication slows compute down,
the passes are played once more with these agendas, and the rounds once more after them. All steps have the same
agendas: when the gradients of one are ready, those of the step before have been summed, since its forward pass waited
for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainplan.cluster.cluster import Cluster, Slowdown
from trainplan.plan.plan import Plan
from trainplan.predict.cards import flows_of
from trainplan.predict.clock import Played, play
from trainplan.predict.cost import RULES, Setting, costs
from trainplan.predict.rounds import rounds
from trainplan.profile.profile import Profile
from trainplan.program.agenda import Agenda, Agendas
from trainplan.program.exchanges import TELLING
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.program.program import CostClass, are

_BACKWARD = are((Kind.B, Kind.W, Kind.R))


def expected_agendas(
    plan: Plan, profile: Profile, cluster: Cluster, batch: int, setting: Setting, fold: bool
) -> Agendas:  # fmt: skip
    """Of one step."""
    replicas = (0,) if fold else tuple(range(plan.dp))
    layout = Layout(plan, profile, batch, backend(cluster.backend), replicas)
    agendas: Agendas = {}
    slowdown = cluster.slowdown_of(plan.world)
    for _ in range(1 if slowdown == Slowdown() else 2):
        program = lower(plan, profile, batch, cluster.backend, fold=fold, agendas=(agendas,) if agendas else ())
        run, issue = costs(program, setting)
        played = play(program, run, issue, slowdown, flows=flows_of(program, plan, cluster))
        agendas = {
            stage: _expected(played, layout, stage, setting, slowdown.slowed_collective)
            for stage in layout.stages
            if layout.buckets[stage]
        }
    return agendas


def _expected(played: Played, layout: Layout, stage: int, setting: Setting, slowed: float) -> Agenda:
    """The rounds of a stage whose backward passes have been played; beside these, sums take `slowed` times as long."""
    plan, rule = layout.plan, layout.decided[stage].rule
    members, sizes = tuple(sorted(plan.replicas_of(stage))), set(rule.sizes)

    def seconds(size: int) -> float:
        tensors = 1 if size in sizes else 2
        c = CostClass(Kind.REDUCE_GRAD, 0, -1, 0, plan.blocks, 0, size, members, tensors=tensors, background=True)
        return RULES[Kind.REDUCE_GRAD](c, setting)[0] * slowed

    told = CostClass(
        Kind.NEGOTIATE, 0, -1, 0, plan.blocks, 0, rule.bits_bytes, members, by=TELLING, element=8, background=True
    )
    bits = RULES[Kind.NEGOTIATE](told, setting)[0] * slowed
    return rounds(rule, *_ready(played, layout, stage), seconds, bits).agenda


def _ready(played: Played, layout: Layout, stage: int) -> tuple[list[list[float]], Sequence[float]]:
    """When each part of a stage is ready on each rank that holds it, and when the pass began that completes them."""
    program = played.program
    micro = program.micro_batch * max(1, len(layout.plan.slices)) + program.slice
    ready, begin = [], []
    for holding in (h for h in layout.holdings if h.stage == stage):
        own = np.flatnonzero((program.stage == stage) & (program.rank == holding.rank) & _BACKWARD[program.kind])
        final = own[np.argmax(played.end[own])]  # an operation of the pass that completes them
        of_it = own[micro[own] == micro[final]]
        pieces = of_it[program.kind[of_it] != Kind.R]
        end = dict(zip(program.unit[pieces].tolist(), played.end[pieces].tolist(), strict=True))
        if layout.recomputed[micro[final]]:  # block by block
            units = [bucket.block for bucket in layout.buckets[stage]]
        else:
            units = [0 if program.kind[final] == Kind.W else unit for unit in range(len(layout.buckets[stage]))]
        ready.append([end[units[part.bucket]] for part in layout.decided[stage].parts])
        begin.append(float(played.start[of_it].min()))
    return ready, begin
