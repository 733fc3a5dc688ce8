"""Which plans differ so little that a table shows one of them.

Thirteen, fourteen and fifteen replicas of a batch of 64 take the same time, since the largest share of the batch is
five samples in each: three rows would say one thing. Plans are of one kind where they differ in nothing but the number
of replicas. Of those of one kind whose times hardly differ, that with the fewest devices stands for all. Two are shown
in any case: the fastest of all, and plans that use every device, which is what people try first.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainplan.predict.predict import Prediction

HARDLY = 0.01  # a difference of time that is not worth a row
Kind = tuple[int, str, str, bool]


def kind(p: Prediction, world: int) -> Kind:
    """What plans have in common that differ in the number of their replicas only."""
    return p.plan.pp, p.plan.schedule, p.plan.recompute, p.plan.world == world


def groups(ordered: Sequence[Prediction], world: int) -> list[list[Prediction]]:
    """Plans, fastest first, put together where they are of one kind and hardly slower than the first of their group."""
    found: list[list[Prediction]] = []
    latest: dict[Kind, list[Prediction]] = {}
    for p in ordered:
        group = latest.get(kind(p, world))
        if group is None or p.step_s > group[0].step_s * (1 + HARDLY):
            group = latest[kind(p, world)] = []
            found.append(group)
        group.append(p)
    return found


def shown(grouped: Sequence[Sequence[Prediction]]) -> list[Prediction]:
    """The fastest of all, and of each group the one with the fewest devices."""
    rows = [min(group, key=lambda p: p.plan.world) for group in grouped]
    fastest = [group[0] for group in grouped[:1]]
    return fastest + [row for row in rows if row not in fastest]
