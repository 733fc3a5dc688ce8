"""What one operation of a schedule becomes in a rank's list, stage by stage.

A schedule says `2F0` and `2B0`. Here the receives before it, the sends after it, recomputation, and the gradient
exchange of the last backward pass are put around it. A template is the same for every micro-batch, so a list is
templates repeated (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainplan.program.agenda import Agenda
from trainplan.program.lower import sharded
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.row import Row
from trainplan.program.lower.service import Service
from trainplan.program.ops import Kind


@dataclass(frozen=True)
class Templates:
    """What the operations of one stage, in one line, become; nothing where a plan has no such operations."""

    forward: tuple[Row, ...]
    first_forward: tuple[Row, ...]  # of a step: it may have to gather weights
    backward: tuple[Row, ...]  # whole
    last_backward: tuple[Row, ...]  # the one that completes the gradients
    input_backward: tuple[Row, ...] = ()  # where backward comes in two parts: the first
    weight_backward: tuple[Row, ...] = ()  # the second
    last_weight_backward: tuple[Row, ...] = ()  # the one that completes the gradients
    recomputed_backward: tuple[Row, ...] = ()  # whole, with forward once more
    last_recomputed_backward: tuple[Row, ...] = ()  # the one that completes the gradients


def templates(layout: Layout, stage: int, line: int) -> Templates:
    """The templates of a stage in a line."""
    ends = messages(layout, stage, line)
    takes, gives, before, after = (
        # In phases, messages go when it is their turn, not around their pass.
        () if layout.in_phases else tuple(row for row in ends if row.kind is kind)
        for kind in (Kind.RECV_F, Kind.SEND_F, Kind.RECV_B, Kind.SEND_B)
    )
    first_forward, forward = (sharded.forward(layout, stage, line, takes, gives, first) for first in (True, False))
    whole, last = (_backward(layout, stage, line, before, last) for last in (False, True))
    found = Templates(forward, first_forward, (*whole, *after), (*last, *after))
    if layout.recomputes:
        again, last_again = (_recomputed(layout, stage, line, before, last) for last in (False, True))
        return replace(found, recomputed_backward=(*again, *after), last_recomputed_backward=(*last_again, *after))
    if not layout.splits:
        return found
    weights = Row(Kind.W, stage, line)
    buckets = 0 if stage in layout.late else len(layout.buckets[stage])
    sums = tuple(row for unit in range(buckets) for row in exchange(layout, stage, line, unit))
    sums += sharded.scatters(layout, stage, line, range(len(layout.sections[stage])), last=True)
    return replace(
        found,
        input_backward=(*before, Row(Kind.I, stage, line), *after),
        weight_backward=(weights,),
        last_weight_backward=(weights, *sums),
    )


def messages(layout: Layout, stage: int, line: int) -> tuple[Row, ...]:
    """The sends and receives of a stage for a micro-batch."""
    comes = [e for e in layout.incoming[stage] if layout.is_message(e, line)]
    goes = [e for e in layout.outgoing[stage] if layout.is_message(e, line)]
    return (
        *(Row(Kind.RECV_F, stage, line, peer=e.source) for e in comes),
        *(Row(Kind.SEND_F, stage, line, peer=e.target) for e in goes),
        *(Row(Kind.RECV_B, stage, line, peer=e.target) for e in goes if e.gradients),
        *(Row(Kind.SEND_B, stage, line, peer=e.source) for e in comes if e.gradients),
    )


def _backward(layout: Layout, stage: int, line: int, before: tuple[Row, ...], last: bool) -> tuple[Row, ...]:
    if layout.cut(stage, Kind.B, last):
        return sharded.backward(layout, stage, line, before, last, _completed(layout, stage, line, last))
    rows = [*before]
    buckets = len(layout.buckets[stage]) if last and stage not in layout.late else 0
    for unit in range(max(1, buckets)):
        rows.append(Row(Kind.B, stage, line, unit))
        if buckets:
            rows += exchange(layout, stage, line, unit)
    return tuple(rows)


def exchange(layout: Layout, stage: int, line: int, bucket: int) -> list[Row]:
    """What becomes of a bucket of gradients that is complete: a sum over the copies, or messages to servers."""
    if layout.service is None:
        return [Row(Kind.REDUCE_GRAD, stage, line, bucket)]
    loads = layout.service.of_bucket(stage, bucket)
    return [Row(Kind.SEND_G, stage, line, load.unit, layout.service.stage(load.server)) for load in loads]


def _recomputed(layout: Layout, stage: int, line: int, before: tuple[Row, ...], last: bool) -> tuple[Row, ...]:
    """Block by block from the last: forward again, then backward. The gradient is awaited only after the first R."""
    first, end = layout.plan.bounds[stage]
    rows: list[Row] = []
    if layout.units[stage]:
        return sharded.recomputed(layout, stage, line, before, last)
    complete = _completed(layout, stage, line, last)
    for block in reversed(range(first, end)):
        rows.append(Row(Kind.R, stage, line, block))
        if block == end - 1:
            rows += before
        rows += [Row(Kind.B, stage, line, block), *complete(block)]
    return tuple(rows)


def _completed(layout: Layout, stage: int, line: int, last: bool) -> Callable[[int], list[Row]]:
    """A function that says, when backward has come to a block, which buckets are complete since it was last asked: what
    becomes of them."""
    waiting = list(enumerate(layout.buckets[stage])) if last and stage not in layout.late else []

    def complete(block: int) -> list[Row]:
        rows: list[Row] = []
        while waiting and waiting[0][1].block >= block:
            rows += exchange(layout, stage, line, waiting.pop(0)[0])
        return rows

    return complete


def decided_backward(layout: Layout, stage: int, line: int, own: int, kind: Kind, agenda: Agenda) -> tuple[Row, ...]:
    """The backward pass that completes the gradients of a stage, where the exchange is decided while running: every
    operation of an agenda stands as early as it can, behind the piece that completes what it sends.

    A whole pass (B) has a piece for every gradient, one that is recomputed (R) one for every block, and the second part
    of one (W) is one piece. `own`: the line whose name the exchange bears.
    """
    decided = layout.decided[stage]
    before, passes, after = _pieces(layout, stage, line, kind)
    if kind is Kind.R:  # block by block from the last: the piece that completes each gradient
        last = layout.plan.bounds[stage][1]
        completed = [last - 1 - bucket.block for bucket in layout.buckets[stage]]
    else:
        completed = [0 if kind is Kind.W else number for number in range(len(layout.buckets[stage]))]
    behind: list[list[Row]] = [[] for _ in range(len(passes) + 1)]  # the first: before all pieces
    place = 0
    for number, buffers in enumerate(agenda):
        if decided.rule.fuses:
            behind[place].append(Row(Kind.TICK, stage, own, number))
        sent = [decided.parts[part] for buffer in buffers for part in buffer]
        place = max([place, *(completed[part.bucket] + 1 for part in sent)])
        behind[place].append(Row(Kind.NEGOTIATE, stage, own, number))
        for buffer in buffers:
            size = sum(decided.parts[part].bytes for part in buffer)
            behind[place].append(Row(Kind.REDUCE_GRAD, stage, own, min(buffer), size=size))
    rows = [*before, *behind[0]]
    for piece, following in zip(passes, behind[1:], strict=True):
        rows += [*piece, *following]
    return (*rows, *after)


def _pieces(
    layout: Layout, stage: int, line: int, kind: Kind
) -> tuple[tuple[Row, ...], list[tuple[Row, ...]], tuple[Row, ...]]:
    """A backward pass that completes gradients, in pieces; with what comes before and after it."""
    ends = messages(layout, stage, line)
    before, after = (tuple(row for row in ends if row.kind is end) for end in (Kind.RECV_B, Kind.SEND_B))
    if kind is Kind.W:
        return (), [(Row(Kind.W, stage, line),)], ()
    if kind is Kind.B:
        return before, [(Row(Kind.B, stage, line, unit),) for unit in range(len(layout.buckets[stage]))], after
    first, last = layout.plan.bounds[stage]
    found: list[tuple[Row, ...]] = []
    for block in reversed(range(first, last)):  # the gradient is awaited only after the first R
        found.append((Row(Kind.R, stage, line, block), *(before if not found else ()), Row(Kind.B, stage, line, block)))
    return (), found, after


def stepping_forward(layout: Layout, stage: int, line: int, steps: bool) -> tuple[Row, ...]:
    """A forward pass block by block; each waits for its own weights alone, and takes the step that they lack first."""
    ends = messages(layout, stage, line)
    rows = [row for row in ends if row.kind is Kind.RECV_F]
    first, last = layout.plan.bounds[stage]
    for block in range(first, last):
        if steps and block in layout.stepping[stage]:
            rows.append(Row(Kind.STEP, stage, line, block))
        rows.append(Row(Kind.F, stage, line, block - first))
    return (*rows, *(row for row in ends if row.kind is Kind.SEND_F))


def head(layout: Layout, holdings: Sequence[Holding]) -> tuple[Row, ...]:
    """Once, before everything that a rank does."""
    final = [h for h in holdings if h.stage == layout.stages[-1]]
    return tuple(Row(Kind.COUNT, h.stage, h.lines[0]) for h in final) if layout.counts else ()


def tail(layout: Layout, holdings: Sequence[Holding], final: bool = True) -> tuple[Row, ...]:
    """Once, after everything: what a rank with these stages sums, and the steps that it takes. (Where steps of blocks
    wait for the next forward pass, only after the final one of the program.)"""
    rows: list[Row] = []
    if layout.service is not None:
        return served_tail(layout, layout.service, holdings)
    late = [h for h in holdings if h.stage in layout.late]
    rows += [Row(Kind.REDUCE_GRAD, h.stage, h.lines[0], u) for h in late for u in range(len(layout.buckets[h.stage]))]
    for number, tie in enumerate(layout.ties):
        sharing = [h for h in holdings if h.stage in tie.stages]
        if sharing:  # once, also where this rank holds several of the stages
            rows.append(Row(Kind.REDUCE_GRAD, sharing[0].stage, sharing[0].lines[0], layout.first_tie + number))
    for holding in holdings:
        if holding.stage == layout.stages[-1] and layout.copies[-1] > 1:
            rows.append(Row(Kind.LOSS, holding.stage, holding.lines[0]))
    if layout.clips:
        rows.append(Row(Kind.NORM, holdings[0].stage, holdings[0].lines[0]))
    if layout.crosses:
        blocks = [(h, block) for h in holdings for block in layout.stepping[h.stage] if final]
        return tuple(rows + [Row(Kind.STEP, h.stage, h.lines[0], block) for h, block in blocks])
    rows += [Row(Kind.STEP, holding.stage, holding.lines[0]) for holding in holdings]
    return tuple(rows)


def served_tail(layout: Layout, service: Service, holdings: Sequence[Holding]) -> tuple[Row, ...]:
    """The same of a worker whose gradients go to where the optimizer is."""
    rows: list[Row] = []
    worker, final = holdings[0], layout.stages[-1]
    stages = {h.stage for h in holdings}
    if service.at_root:
        buckets = range(len(layout.buckets[0])) if worker.replica in service.pushers else ()
        rows += [row for bucket in buckets for row in exchange(layout, 0, 0, bucket)]
    takes_gradients_first = service.at_root and worker.rank == service.rank(0)
    if layout.sums_loss and final in stages and not takes_gradients_first:
        rows.append(Row(Kind.LOSS, final, 0))
    if not service.at_root:
        pulls = [(load, stage) for load in service.loads for stage in load.stages if stage in stages]
        rows += [Row(Kind.RECV_W, stage, 0, load.unit, service.stage(load.server)) for load, stage in pulls]
    return tuple(rows)
