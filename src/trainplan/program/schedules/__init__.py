"""Orders of work: pure functions of a `Size` (ranks, micro-batches, chunks …) to compute-only lists, one file each.

An order may also be given operation by operation (`given.py`), and one that has a list for each stage goes with any
placement of stages on ranks (`merged.py`).

Sending, recomputing, exchanging gradients and stepping are added by the passes in `program.lower`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from trainplan.plan.order import known
from trainplan.plan.plan import Plan
from trainplan.program.schedules.bidirectional import chimera, chimera_doubled, gems
from trainplan.program.schedules.given import orders as given_orders
from trainplan.program.schedules.gpipe import gpipe
from trainplan.program.schedules.interleaved import interleaved
from trainplan.program.schedules.merged import merged
from trainplan.program.schedules.naive import naive
from trainplan.program.schedules.one_forward_one_backward import (
    early_one_forward_one_backward,
    one_forward_one_backward,
)
from trainplan.program.schedules.order import Order, Orders, Size
from trainplan.program.schedules.terapipe import terapipe
from trainplan.program.schedules.zb_v import zb_v
from trainplan.program.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Callable[[Size], list[Order]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "lockstep": gpipe,  # in ticks that `program.lower.phases` sets apart
    "looped": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b-early": early_one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "gems": gems,
    "chimera": chimera,
    "chimera-doubled": chimera_doubled,
    "terapipe": terapipe,
}


def orders_of(plan: Plan) -> Orders:
    """What each rank of a replica computes, in order."""
    if plan.order:
        return Orders(given_orders(known(plan.order)))
    if plan.wanted != plan.pp * plan.chunks:
        alone = SCHEDULES[plan.schedule](Size(plan.wanted, plan.micro))
        return Orders(merged(alone, [plan.ranks(0).index(rank) for rank, *_ in plan.placement[0]]))
    slices = max(1, len(plan.slices))
    return _scheduled(SCHEDULES[plan.schedule], Size(plan.pp, plan.micro, plan.chunks, plan.pairs, slices, plan.spread))


@lru_cache(maxsize=1024)
def _scheduled(schedule: Callable[[Size], list[Order]], size: Size) -> Orders:
    """Kept, since most plans differ in other things; nobody may write to them."""
    found = Orders(schedule(size))
    for order in found:
        order.flags.writeable = False
    return found
