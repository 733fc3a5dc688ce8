"""What an order of work says of its stages: where backward follows forward at once, and which sums have to wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trainplan.program.ops import Kind
from trainplan.program.program import are
from trainplan.program.schedules import Order

_F, _GATHERS = int(Kind.F), are((Kind.B, Kind.W))


def turning_later(orders: Sequence[Order]) -> frozenset[int]:
    """Stages in which some forward pass is not followed by its backward pass at once.

    >>> from trainplan.plan.plan import plan
    >>> from trainplan.program.schedules import orders_of
    >>> sorted(turning_later(orders_of(plan(pp=3, micro=4, schedule="1f1b", blocks=3, stages=(1, 2)))))
    [0, 1]
    """
    found: set[int] = set()
    for order in orders:
        rows = order[:, [0, 2, 3, 4]].tolist()
        for (kind, *what), following in zip(rows, [*rows[1:], None], strict=True):
            if kind == _F and (following is None or following[0] == _F or following[1:] != what):
                found.add(what[0])
    return frozenset(found)


def completed_crosswise(orders: Sequence[Order]) -> frozenset[int]:
    """Stages whose gradients can be summed only after all passes of their ranks.

    All ranks must come to the sums that they share in one order: that of backward, from the last stage down. Where a
    rank completes two stages the other way round, as one of every two does in GEMS, both have to wait. Chimera
    completes its later stages on all their ranks first, and sums them during the last passes of the others.
    """
    found: set[int] = set()
    for order in orders:
        backward = order[_GATHERS[order[:, 0]], 2].tolist()
        completed = list(dict.fromkeys(reversed(backward)))[::-1]
        found |= {stage for a, b in itertools.combinations(completed, 2) if a < b for stage in (a, b)}
    return frozenset(found)
