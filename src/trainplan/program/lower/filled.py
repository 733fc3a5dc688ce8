"""Which gradients of a plan are in which buckets (`buckets.py` fills those of a stage).

By the size that the plan gives; or each by itself, or as many as are fused, where it is decided while running what goes
when; and for servers with what several stages hold, so that each gets its pieces in few segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainplan.plan.keys import deal
from trainplan.plan.plan import Plan
from trainplan.plan.served import SERVED
from trainplan.profile.profile import Parameter
from trainplan.program.lower.buckets import Bucket, Tie, stage_buckets

if TYPE_CHECKING:
    from trainplan.program.lower.layout import Layout


def filled(layout: Layout) -> list[list[Bucket]]:
    """For every stage its gradient buckets; none where there is one copy and nothing to exchange."""
    plan, profile, samples = layout.plan, layout.profile, max(layout.sizes[0])
    found: list[list[Bucket]] = [[] for _ in layout.stages]
    if plan.zero:  # gradients are exchanged by units
        return found
    limit = 1 if layout.decides else plan.bucket
    for stage, own in enumerate(layout.parameters):
        if layout.bucketed(stage):
            fused = _fused(plan.fused, profile.parameters, own)
            found[stage] = stage_buckets(profile, own, *plan.bounds[stage], limit, samples, fused)
    if plan.exchange not in SERVED:
        return found
    found = _with_ties(found, layout.ties, plan.bounds)
    return [_arranged(plan, profile.parameters, own) for own in found] if plan.servers > 1 else found


def _fused(counts: Sequence[int], parameters: Sequence[Parameter], own: Sequence[Parameter]) -> list[int]:
    """Of tensors into which so many gradients of a model are fused each: how many are a stage's own, where any are.
    (One that two stages have gradients of is two.)

    >>> of = [Parameter(name, (), 1, 4) for name in "abcde"]
    >>> _fused((1, 3, 1), of, of[:3]), _fused((1, 3, 1), of, of[3:]), _fused((), of, of)
    ([1, 2], [1, 1], [])
    """
    if not counts:
        return []
    names, mine = [p.name for p in parameters if p.trainable], {p.name for p in own}
    ends = list(itertools.accumulate(counts))
    found = [sum(name in mine for name in names[end - n : end]) for end, n in zip(ends, counts, strict=True)]
    return [count for count in found if count]


def _with_ties(
    buckets: Sequence[Sequence[Bucket]], ties: Sequence[Tie], bounds: Sequence[tuple[int, int]]
) -> list[list[Bucket]]:
    """The buckets of every stage, with one more for the weights that it holds together with others."""
    found = [list(own) for own in buckets]
    for tie in ties:
        for stage in tie.stages:
            found[stage].append(Bucket(tie.names, tie.bytes, bounds[stage][0], 1.0, tie.element))
    return found


def _arranged(plan: Plan, parameters: Sequence[Parameter], buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets with their parameters in the order of servers, those that are split last: so that what goes to one
    server is in few segments."""
    own = [(p.name, p.count) for p in parameters if p.trainable]
    place = {p.name: p.server if p.whole else plan.servers for p in deal(own, plan.servers, plan.split)}
    return [replace(bucket, names=tuple(sorted(bucket.names, key=place.__getitem__))) for bucket in buckets]
