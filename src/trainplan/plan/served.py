"""Exchanges in which gradients go to where the optimizer is, and weights come back: what is legal of them.

dataparallel      to the first worker, which has the only optimizer (nn.DataParallel)
ps-bsp            to servers, which wait for all workers
ps-asp ssp dssp   to servers, which apply what each worker pushes by itself; who may go on: `program/staleness.py`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainplan.errors import PlanError
from trainplan.plan.keys import deal, idle
from trainplan.units import some

if TYPE_CHECKING:
    from trainplan.plan.plan import Plan
    from trainplan.profile.profile import Profile

AT_ROOT = "dataparallel"
AT_SERVERS = ("ps-bsp", "ps-asp", "ssp", "dssp")
SERVED = (AT_ROOT, *AT_SERVERS)
ASYNCHRONOUS = ("ps-asp", "ssp", "dssp")  # a worker does not wait for what the others push in the same step
USUAL_BOUND: dict[str, tuple[int, ...]] = {"ssp": (3,), "dssp": (3, 15)}  # those of the DSSP paper
ROOT_BUCKET = 10 * 2**20  # nn.DataParallel's


def check_served(plan: Plan, asked: str) -> None:
    """Refused where servers, bounds and the rest of a plan do not go together."""
    exchange = plan.exchange
    if exchange in AT_SERVERS and plan.servers < 1:
        raise PlanError(asked, f"{exchange} has servers, and servers={plan.servers}", "servers=1")
    if exchange not in AT_SERVERS and plan.servers:
        raise PlanError(asked, f"servers={plan.servers}, and exchange={exchange} has none", "exchange=ps-bsp")
    if plan.split < 1:
        raise PlanError(asked, f"a parameter is split from some number of elements on, not {plan.split}", "split=1")
    _bound(plan, asked)
    if exchange not in SERVED:
        return
    if plan.pp > 1:
        _stages(plan, asked)
    if exchange == AT_ROOT and plan.dp < 2:
        raise PlanError(asked, "dataparallel is for several workers, and dp=1", "dp=2")


def _stages(plan: Plan, asked: str) -> None:
    """What a pipeline asks of such an exchange."""
    exchange, instead = plan.exchange, f"exchange=ps-bsp, or exchange=all-reduce pp={plan.pp}"
    if exchange == AT_ROOT:
        why = (
            f"under dataparallel the first worker has the only optimizer, and with pp={plan.pp} one stage of the model"
        )
        raise PlanError(asked, why, instead)
    if exchange in ASYNCHRONOUS:
        why = f"servers apply what one worker pushes as a whole, and with pp={plan.pp} a push comes in parts from"
        raise PlanError(asked, f"{why} {plan.pp} ranks, which are at different micro-batches", instead)
    if plan.lines > 1:
        what = "with different numbers of ranks a stage" if plan.spread else f"under {plan.schedule}"
        why = f"a server takes one push of a stage from each replica, and {what} a replica has several copies of one"
        raise PlanError(asked, why, f"schedule=1f1b, or exchange=all-reduce schedule={plan.schedule}")


def _bound(plan: Plan, asked: str) -> None:
    usual = USUAL_BOUND.get(plan.exchange, ())
    bound = ",".join(map(str, plan.bound))
    if len(plan.bound) != len(usual):
        what = {0: "no bound", 1: "one bound", 2: "a lower and an upper bound"}[len(usual)]
        instead = f"bound={','.join(map(str, usual))}" if usual else "exchange=ssp, or leaving the bound out"
        raise PlanError(asked, f"exchange={plan.exchange} has {what}, not {bound or 'none'}", instead)
    if any(number < 0 for number in plan.bound):
        instead = ",".join(str(max(0, number)) for number in plan.bound)
        raise PlanError(asked, f"a bound of {min(plan.bound)}: it counts steps ahead, from 0", f"bound={instead}")
    if len(plan.bound) == 2 and plan.bound[1] < plan.bound[0]:
        lower, upper = plan.bound
        raise PlanError(asked, f"the upper bound {upper} is below the lower one, {lower}", f"bound={upper},{lower}")


def check_served_model(plan: Plan, profile: Profile, asked: str) -> None:
    """Refused where a model does not go with servers."""
    if plan.exchange not in SERVED:
        return
    if plan.exchange in AT_SERVERS and profile.clip_norm > 0:
        why = f"gradients are clipped by their norm ({profile.clip_norm:g}), and no server sees all of them"
        raise PlanError(asked, why, "exchange=dataparallel or all-reduce")
    sizes = [(p.name, p.count) for p in profile.parameters if p.trainable]
    if plan.servers and (left := idle(deal(sizes, plan.servers, plan.split), plan.servers)):
        why = f"{some(plan.servers, 'server')} for {some(len(sizes), 'parameter')}: {len(left)} would have nothing"
        raise PlanError(asked, why, f"servers={len(sizes)}, or split={max(1, max(count for _, count in sizes))}")
