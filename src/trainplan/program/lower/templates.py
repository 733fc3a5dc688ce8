"""What one operation of a schedule becomes in a rank's list, stage by stage.

A schedule says `2F0` and `2B0`. Here the receives before it, the sends after it, recomputation, and the gradient
exchange of the last backward pass are put around it. A template is the same for every micro-batch, so a list is
templates repeated (`rows.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind


@dataclass(frozen=True)
class Row:
    """One operation of a template."""

    kind: Kind
    unit: int = 0
    peer: int = -1  # other stage of a message


@dataclass(frozen=True)
class Templates:
    """The pieces that the list of one stage is made of."""

    head: tuple[Row, ...]  # once, before everything
    forward: tuple[Row, ...]
    backward: tuple[Row, ...]
    last_backward: tuple[Row, ...]  # of the backward pass that completes the gradients
    tail: tuple[Row, ...]  # once, after everything


def templates(layout: Layout, stage: int) -> Templates:
    """The templates of a stage."""
    plan = layout.plan
    incoming, outgoing = layout.incoming[stage], layout.outgoing[stage]
    final = stage == plan.pp - 1
    takes = tuple(Row(Kind.RECV_F, peer=e.source) for e in incoming)
    gives = tuple(Row(Kind.SEND_F, peer=e.target) for e in outgoing)
    forward = (*takes, Row(Kind.F), *gives)
    head = (Row(Kind.COUNT),) if final and layout.counts else ()
    tail = [
        Row(Kind.REDUCE_GRAD, unit=layout.first_tie + n) for n, tie in enumerate(layout.ties) if stage in tie.stages
    ]
    if final and plan.dp > 1:
        tail.append(Row(Kind.LOSS))
    if layout.clips:
        tail.append(Row(Kind.NORM))
    tail.append(Row(Kind.STEP))
    return Templates(head, forward, _backward(layout, stage, False), _backward(layout, stage, True), tuple(tail))


def _backward(layout: Layout, stage: int, last: bool) -> tuple[Row, ...]:
    takes = [Row(Kind.RECV_B, peer=e.target) for e in layout.outgoing[stage] if e.gradients]
    gives = [Row(Kind.SEND_B, peer=e.source) for e in layout.incoming[stage] if e.gradients]
    buckets = layout.buckets[stage] if last else []
    if layout.recomputes:
        return (*_recomputed(layout, stage, takes, last), *gives)
    rows = [*takes]
    for unit in range(max(1, len(buckets))):
        rows.append(Row(Kind.B, unit=unit))
        if buckets:
            rows.append(Row(Kind.REDUCE_GRAD, unit=unit))
    return (*rows, *gives)


def _recomputed(layout: Layout, stage: int, takes: list[Row], last: bool) -> list[Row]:
    """Block by block from the last: forward again, then backward. The gradient is awaited only after the first R."""
    first, end = layout.plan.bounds[stage]
    rows: list[Row] = []
    waiting = list(enumerate(layout.buckets[stage])) if last else []
    for block in reversed(range(first, end)):
        rows.append(Row(Kind.R, unit=block))
        if block == end - 1:
            rows += takes
        rows.append(Row(Kind.B, unit=block))
        while waiting and waiting[0][1].block >= block:
            rows.append(Row(Kind.REDUCE_GRAD, unit=waiting.pop(0)[0]))
    return rows
