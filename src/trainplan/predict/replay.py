"""A plan that is predicted many times, on clusters that differ in their constants alone.

Nine tenths of a prediction are lowering, which does not ask how fast anything is. So the program is made once, and
played with other seconds each time. Where an exchange decides while running what goes when, it keeps the agenda that
was expected on the first cluster; whoever wants to know the last percent there predicts anew.
"""

from __future__ import annotations

from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.plan import rules
from trainplan.plan.plan import Plan
from trainplan.predict.cards import flows_of
from trainplan.predict.clock import play
from trainplan.predict.contention import alike
from trainplan.predict.cost import Setting, costs, inside
from trainplan.predict.decided import expected_agendas
from trainplan.predict.flows import Flows
from trainplan.predict.planned import planned
from trainplan.predict.predict import beside_others, by_kind, replicas_alike, step_seconds, steps_of
from trainplan.predict.speeds import speeds
from trainplan.profile.profile import Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.wiring import wire


class Replay:
    """The program of a plan, to be played on one cluster after another."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, batch: int) -> None:
        self.plan = plan
        self.profile = planned(plan, profile, cluster)
        uneven = replace(cluster, spread=max(cluster.spread, 0.01))  # one replica stands for all also where they differ
        fold = plan.dp > 1 and replicas_alike(plan, cluster, self.profile) and alike(plan, uneven, batch)
        self.program = lower(plan, self.profile, batch, cluster.backend, steps=steps_of(plan), fold=fold)
        self.wiring = wire(self.program)
        if plan.exchange in rules.DECIDED:
            setting = self._setting(cluster, flows_of(self.program, plan, cluster))
            agendas = expected_agendas(plan, self.profile, cluster, batch, setting, fold)
            self.program = lower(
                plan, self.profile, batch, cluster.backend, steps=2, fold=fold, agendas=(agendas,) * 2
            )  # fmt: skip
            self.wiring = wire(self.program)
        check(self.program, self.wiring)

    def on(self, cluster: Cluster) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and of every kind of operation in it, of a mean rank."""
        flows = flows_of(self.program, self.plan, cluster)
        setting = self._setting(cluster, flows)
        run, issue = costs(self.program, setting)
        played = play(self.program, run, issue, cluster.slowdown_of(self.plan.world), self.wiring, flows)
        spent = by_kind(played, inside(self.program, setting))
        return step_seconds(played), {kind: seconds / self.plan.world for kind, seconds in spent.items()}

    def _setting(self, cluster: Cluster, flows: Flows | None) -> Setting:
        alone = Setting(self.profile, cluster, speeds(self.profile, cluster), world=self.plan.world)
        return beside_others(self.plan, self.program, alone, self.wiring, flows)
