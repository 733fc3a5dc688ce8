"""Passes of a stage whose states are shared out: what is gathered before, and scattered behind, its pieces.

zero=1   the first forward pass of a step gathers all weights, unit by unit, and each piece waits for its own; the last
         backward pass scatters the sums of the gradients
zero=2   every backward pass does, and no whole gradients are kept
zero=3   every pass gathers the weights of a piece while pieces before it compute, and gives them up behind it

A unit is gathered before anything that its first piece has to wait for, and two pieces ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.row import Row
from trainplan.program.ops import Kind

Exchange = Callable[[int], list[Row]]
AHEAD = 2  # pieces: one is on its way while the next one waits for the link, so that this never rests


def forward(
    layout: Layout, stage: int, line: int, takes: tuple[Row, ...], gives: tuple[Row, ...], first: bool
) -> tuple[Row, ...]:
    """A forward pass, the first of its step or another."""
    if not layout.cut(stage, Kind.F, first):
        return (*takes, Row(Kind.F, stage, line), *gives)
    count = len(layout.sections[stage])
    ahead = AHEAD if layout.plan.zero == 3 else count  # what stays anyway is gathered at once
    gathers = _Gathers(layout, stage, line, Kind.GATHER_F, ahead)
    if layout.plan.zero < 3 and not first:
        gathers.left = []
    rows = [*gathers.before(0), *takes]
    for piece in range(count):
        rows += gathers.before(piece) if piece else []
        if piece == count - 1 and stage in layout.turning:  # backward follows at once
            rows += _Gathers(layout, stage, line, Kind.GATHER_B).before(0)
        rows.append(Row(Kind.F, stage, line, piece))
    return (*rows, *gives)


def backward(
    layout: Layout, stage: int, line: int, before: tuple[Row, ...], last: bool, complete: Exchange | None = None
) -> tuple[Row, ...]:
    """A backward pass that scatters on its way; the last of its step or another. `complete`: what is exchanged behind
    a section of gradients that are not shared out, by the first block that the pass has come to."""
    count = len(layout.sections[stage])
    gathers = _Gathers(layout, stage, line, Kind.GATHER_B)
    due = gathers.before(0)
    rows = [*([] if stage in layout.turning else due), *before]
    for place, piece in enumerate(reversed(range(count))):
        rows.append(Row(Kind.B, stage, line, place))
        if last or layout.plan.zero > 1:
            rows += scatters(layout, stage, line, [piece], last)
        if complete is not None:
            rows += complete(layout.sections[stage][piece][0])
        rows += gathers.before(place + 1)
    return tuple(rows)


def recomputed(layout: Layout, stage: int, line: int, before: tuple[Row, ...], last: bool) -> tuple[Row, ...]:
    """The same block by block: forward again, then backward. The gradient is awaited only after the first R."""
    gathers = _Gathers(layout, stage, line, Kind.GATHER_B)
    due = gathers.before(0)
    rows: list[Row] = [] if stage in layout.turning else due
    pieces = layout.sections[stage]
    for place, (first, end) in enumerate(reversed(pieces)):
        for block in reversed(range(first, end)):
            rows.append(Row(Kind.R, stage, line, block))
            if block == pieces[-1][1] - 1:
                rows += before
            rows.append(Row(Kind.B, stage, line, block))
        if last or layout.plan.zero > 1:
            rows += scatters(layout, stage, line, [len(pieces) - 1 - place], last)
        rows += gathers.before(place + 1)
    return tuple(rows)


def scatters(layout: Layout, stage: int, line: int, pieces: Iterable[int], last: bool) -> tuple[Row, ...]:
    """The sums of the gradients that the backward passes of these pieces complete; after the last pass of a step over
    all groups of replicas."""
    done = set(pieces)
    rows: list[Row] = []
    for number, unit in enumerate(layout.units[stage]):
        if unit.first in done:
            rows.append(Row(Kind.SCATTER_GRAD, stage, line, number))
            if last and layout.plan.sharers < layout.plan.dp:
                rows.append(Row(Kind.REDUCE_GRAD, stage, line, number))
    return tuple(rows)


class _Gathers:
    """The gathers of a pass, as they are due."""

    def __init__(self, layout: Layout, stage: int, line: int, kind: Kind, ahead: int = AHEAD) -> None:
        self.stage, self.line, self.kind, self.ahead = stage, line, kind, ahead
        units, count = layout.units[stage], len(layout.sections[stage])
        # How many pieces of the pass come before the one that reads it first.
        self.left = [
            (number, units[number].first if kind is Kind.GATHER_F else count - 1 - units[number].last)
            for number in layout.gathers_in(stage, kind)
        ]

    def before(self, place: int) -> list[Row]:
        """Those that are due before the piece that is the pass's so-many-th."""
        due = [number for number, at in self.left if at <= place + self.ahead]
        self.left = self.left[len(due) :]
        return [Row(self.kind, self.stage, self.line, number) for number in due]
