"""Exchanges in which gradients go to where the optimizer is, and weights come back: what is legal of them.

dataparallel      to the first worker, which has the only optimizer (nn.DataParallel)
ps-bsp            to servers, which wait for all workers
ps-asp ssp dssp   to servers, which apply what each worker pushes by itself; who may go on: `program/staleness.py`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainplan.errors import PlanError
from trainplan.plan.keys import deal, idle, most_servers
from trainplan.units import some

if TYPE_CHECKING:
    from trainplan.plan.plan import Plan
    from trainplan.profile.profile import Profile

AT_ROOT = "dataparallel"
AT_SERVERS = ("ps-bsp", "ps-asp", "ssp", "dssp")
SERVED = (AT_ROOT, *AT_SERVERS)
ASYNCHRONOUS = ("ps-asp", "ssp", "dssp")  # a worker does not wait for what the others push in the same step
USUAL_BOUND: dict[str, tuple[int, ...]] = {"ssp": (3,), "dssp": (3, 15)}  # those of the DSSP paper
_FURTHEST = 10_000  # steps: between its two bounds, DSSP's controller looks at every pair of futures
ROOT_BUCKET = 10 * 2**20  # nn.DataParallel's


def check_served(plan: Plan, asked: str) -> None:
    """Refused where servers, bounds and the rest of a plan do not go together."""
    exchange = plan.exchange
    if exchange in AT_SERVERS and plan.servers < 1:
        raise PlanError(asked, f"{exchange} has servers, and servers={plan.servers}", "servers=1")
    if exchange not in AT_SERVERS and plan.servers:
        why = f"servers={plan.servers}, and exchange={exchange} has none"
        raise PlanError(asked, why, "leaving servers out" if plan.zero else "exchange=ps-bsp")
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
        instead = f"bound={','.join(map(str, usual))}" if usual else "leaving bound out, or exchange=ssp"
        raise PlanError(asked, f"exchange={plan.exchange} has {what}, not {bound or 'none'}", instead)
    instead = f"bound={','.join(str(steps) for steps in sorted(min(max(0, steps), _FURTHEST) for steps in plan.bound))}"
    if any(steps < 0 for steps in plan.bound):
        why = f"a bound of {min(plan.bound)}: it counts the steps that a worker may be ahead, from 0"
        raise PlanError(asked, why, instead)
    if any(steps > _FURTHEST for steps in plan.bound):
        why = f"a bound of {max(plan.bound):,}: {_FURTHEST:,} steps are the most that a worker may be ahead"
        raise PlanError(asked, why, f"{instead}, or exchange=ps-asp, where nobody waits")
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
        most, largest = most_servers([count for _, count in sizes], plan.split), max(count for _, count in sizes)
        why = f"{some(plan.servers, 'server')} for {some(len(sizes), 'parameter')}: {len(left)} would have nothing"
        smaller = f", or split={largest}" if plan.servers <= largest < plan.split else ""
        raise PlanError(asked, why, f"servers={most}{smaller}")


def fewer_devices(plan: Plan, world: int, keys: int = 0) -> tuple[str, str]:
    """Why workers and servers do not fit on so many devices, and what does: the same workers with fewer servers, or
    fewer of both. `keys`: servers that have something to serve, where the model is known.

    >>> from trainplan.plan.plan import plan
    >>> fewer_devices(plan(dp=2, servers=100, exchange="ps-bsp"), 4)
    ('2 workers and 100 servers are 102 devices, and there are 4', 'servers=2')
    >>> fewer_devices(plan(dp=9, servers=9, exchange="ps-bsp"), 8, keys=3)[1]
    'dp=5 servers=3'
    """
    replica = plan.workers // plan.dp
    why = f"{some(plan.workers, 'worker')} and {some(plan.servers, 'server')} are {plan.world} devices"
    why += f", and there are {world}"
    wanted = min(plan.servers, keys or plan.servers)
    if plan.workers < world:
        return why, f"servers={min(wanted, world - plan.workers)}"
    if replica < world:
        servers = min(wanted, world - replica)
        return why, f"dp={(world - servers) // replica} servers={servers}"
    return why, f"pp={world - 1} dp=1 servers=1" if world > 1 else "single"
