"""TeraPipe's slices for a plan: where its sequences are cut, if that was left open.

Seconds by length and by what came before are the profile's, on the slowest stage; the dynamic program is
`partition/terapipe.py`'s. Its answer and equal slices are then played by the clock, which knows messages and hosts as
well, and the best is kept.
"""

from __future__ import annotations

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief
from trainplan.predict import collectives
from trainplan.profile.profile import Profile
from trainplan.program.lower.edges import edges, message_bytes
from trainplan.solve.partition.instance import Floats
from trainplan.solve.partition.terapipe import slices
from trainplan.units import some

UNITS = 32  # places where a sequence may be cut; each slice costs calls and messages, so more would gain little
EQUAL = (2, 4, 8, 16)  # numbers of equal slices that are tried beside


def slicings(plan: Plan, count: int | None, profile: Profile, cluster: Cluster, batch: int) -> list[tuple[int, ...]]:
    """The ways to cut the sequences of a plan that are worth simulating; `count`: into just so many slices."""
    rules.check_model(plan, profile)
    length = profile.tokens_per_sample
    if not 2 <= (count or 2) <= length:
        asked = f"plan {brief(plan)!r} with slices={count or 2}"
        why = f"a sequence of {some(length, 'token')} is cut into 2 slices or more, of at least one token"
        raise PlanError(asked, why, f"slices={length}" if length > 1 and count != 1 else "schedule=gpipe")
    units = min(length, max(UNITS, count or 0))
    table = _seconds(plan, profile, cluster, batch, units)
    found = slices(table, plan.pp, batch=plan.micro, count=count or 0).slices[0]
    ends = _ends(length, units)[np.cumsum(found)]
    best = tuple(int(n) for n in np.diff(ends, prepend=0))
    equal = [rules.split(length, n) for n in ((count,) if count else EQUAL) if 2 <= n <= length]
    return list(dict.fromkeys([*([best] if len(best) > 1 else []), *equal]))


def _ends(length: int, units: int) -> np.ndarray:
    """The token at which each unit of a sequence begins, and its end."""
    return np.round(np.arange(units + 1) * length / units).astype(np.int64)


def _seconds(plan: Plan, profile: Profile, cluster: Cluster, batch: int, units: int) -> Floats:
    """[l − 1, c]: a slice of l units after c others, there and back, on the stage that takes longest."""
    samples = max(rules.split(max(rules.split(batch, plan.dp)), plan.micro))
    share = np.arange(1, units + 1)[:, None] / units
    reach = share + np.arange(units)[None, :] / units
    forwards = 1 if plan.recompute == "none" else 2
    stages = []
    for first, last in plan.bounds:
        there, back = (profile.slice_terms(name, first, last, samples) for name in ("forward_s", "backward_s"))
        fixed, by_length, by_reach = (forwards * a + b for a, b in zip(there, back, strict=True))
        issue = forwards * profile.total("forward_issue_s", first, last, samples)
        issue += profile.total("backward_issue_s", first, last, samples)
        work = fixed + share * (by_length + by_reach * reach)
        stages.append(np.maximum(work, issue) + 2 * cluster.dispatch_s)
    size = max((message_bytes(profile, edge.crossings, samples) for edge in edges(profile, plan.bounds)), default=0)
    sent = [
        2 * collectives.message(cluster, plan.rank(0, 0), plan.rank(0, 1), round(size * part)).seconds
        for part in share[:, 0]
    ]
    return np.max(stages, axis=0) + np.array(sent)[:, None]
