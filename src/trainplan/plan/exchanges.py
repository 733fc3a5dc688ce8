"""Which exchanges of gradients a plan may ask for. (How each is done: `program/exchanges/`.)"""

from __future__ import annotations

from collections import Counter

from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.plan.served import SERVED
from trainplan.units import some

HIERARCHICAL = "hierarchical"
BY_BACKEND = "all-reduce"  # the backend's own collective


def check_exchange(plan: Plan, asked: str) -> None:
    """Refused where an exchange does not go with the ranks of a plan, or with its nodes."""
    if plan.exchange in (BY_BACKEND, *SERVED) or plan.replicated:  # of the latter see `served.py`
        check_nodes(plan, asked)
        return
    why = f"exchange={plan.exchange} sums gradients over replicas, and every stage is on one rank only"
    raise PlanError(asked, why, "dp=2 or more, or leaving exchange out")


def check_nodes(plan: Plan, asked: str, given: bool = False) -> None:
    """Refused where the copies of a stage are not on such nodes as an exchange wants, or where it wants none. `given`:
    the user said how large they are."""
    if plan.exchange != HIERARCHICAL:
        if given or plan.node:
            why = f"exchange={plan.exchange} does not ask which ranks share a node"
            raise PlanError(asked, why, f"leaving node out, or exchange={HIERARCHICAL}")
        return
    fits = [node for node in range(2, plan.world) if uneven(plan, node) is None]
    other = "exchange=ring without node" if given else "exchange=ring"
    instead = f"node={fits[0]}, as if there were such nodes; or {other}" if fits else other
    if plan.node < 1:
        raise PlanError(asked, f"{HIERARCHICAL} must know how many ranks a node has, and node={plan.node}", instead)
    found = uneven(plan, plan.node)
    if found is not None:
        raise PlanError(asked, found, instead)


def uneven(plan: Plan, node: int) -> str | None:
    """Why replicas are not spread over several nodes, as many on each and several on each; None: they are.

    >>> from trainplan.plan.plan import plan
    >>> uneven(plan(dp=4), 2) is None, uneven(plan(dp=4), 3)
    (True, 'with 3 ranks a node the nodes hold 3 and 1 copies of a stage, and all must hold as many')
    """
    for stage in range(plan.wanted):
        ranks = plan.replicas_of(stage)
        held = list(Counter(rank // node for rank in ranks).values())
        whose = f"with {some(node, 'rank')} a node"
        if len(ranks) == 1:
            continue
        if len(held) == 1:
            return f"{whose} all copies of a stage are on one node, and there is nothing between nodes"
        if len(set(held)) > 1:
            return f"{whose} the nodes hold {' and '.join(map(str, held))} copies of a stage, and all must hold as many"
        if held[0] == 1:
            return f"{whose} every copy of a stage is on a node of its own, and there is nothing inside nodes"
    return None
