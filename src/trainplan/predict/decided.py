"""The agenda that the clock expects of an exchange whose order is decided while running.

The backward pass does not wait for the exchange of its own step, so it is played first, and says when the gradients
are ready on every rank; from that the rounds follow (`rounds.py`). Where communication slows compute down, the pass is
played once more with that agenda, and the rounds once more after it. All steps have the same agenda: when the gradients
of one are ready, those of the step before have been summed, since its forward pass waited for them.
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
from trainplan.program.agenda import Agenda
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.program.program import CostClass


def expected_agenda(
    plan: Plan, profile: Profile, cluster: Cluster, batch: int, setting: Setting, fold: bool
) -> tuple[Agenda, ...]:
    """Of one step."""
    replicas = (0,) if fold else tuple(range(plan.dp))
    layout = Layout(plan, profile, batch, backend(cluster.backend), replicas)
    members = tuple(sorted(plan.replicas_of(0)))

    def seconds(size: int) -> float:
        tensors = 1 if size in sizes else 2
        c = CostClass(Kind.REDUCE_GRAD, 0, -1, 0, plan.blocks, 0, size, members, tensors=tensors, background=True)
        return RULES[Kind.REDUCE_GRAD](c, setting)[0]

    rule = layout.rule
    sizes = set(rule.sizes)
    told = CostClass(Kind.NEGOTIATE, 0, -1, 0, plan.blocks, 0, rule.bits_bytes, members, background=True)
    bits = RULES[Kind.NEGOTIATE](told, setting)[0]
    agenda: Agenda | None = None
    for _ in range(1 if cluster.slowdown == Slowdown() else 2):
        program = lower(plan, profile, batch, cluster.backend, fold=fold, agendas=() if agenda is None else (agenda,))
        run, issue = costs(program, setting)
        played = play(program, run, issue, cluster.slowdown, flows=flows_of(program, plan, cluster))
        ready, begin = _ready(played, layout)
        agenda = rounds(rule, ready, begin, seconds, bits).agenda
    assert agenda is not None
    return (agenda,)


def _ready(played: Played, layout: Layout) -> tuple[list[list[float]], Sequence[float]]:
    """When each part is ready on each rank, and when the pass began that completes them."""
    program = played.program
    last = layout.plan.micro - 1
    ready, begin = [], []
    for rank in range(program.world):
        pieces = np.flatnonzero((program.kind == Kind.B) & (program.rank == rank) & (program.micro_batch == last))
        end = dict(zip(program.unit[pieces].tolist(), played.end[pieces].tolist(), strict=True))
        ready.append([end[part.bucket] for part in layout.parts])
        begin.append(float(played.start[pieces].min()))
    return ready, begin
