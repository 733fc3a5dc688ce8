"""Parcels that go away: where the copies stand in a rank's list.

A parcel is what the forward pass of a section leaves (`profile/parcels.py`). Its copy to the host starts behind that
section, while the next one computes; then its memory is given up. It comes back while the section before its own goes
back (the one that follows it in the model), so that there are never more than two on their way.

    F.0  OFFLOAD.0  F.1  F.2  …  FETCH.0  B.1 (of section 1)  B.2 (of section 0)
                         └ here the parcel of section 0 is gone

So it is really away only if something is computed between: of a micro-batch that goes back at once, the last two
sections stay. And so does the last section of a model: the loss holds on to what it made.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainplan.errors import PlanError
from trainplan.plan.offload import Away, away_text, shortest
from trainplan.plan.text import brief
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.rows import Entries, Table
from trainplan.program.ops import COMPUTES, Kind
from trainplan.program.program import Ints, are, nonzero

_COMPUTE = are(COMPUTES)
BEHIND = 2  # the computation behind its copy that finds a parcel gone: one goes on beside it


def piece_of(layout: Layout, stage: int, block: int) -> int:
    """The piece of a backward pass in sections that a block is in."""
    cut = layout.sections[stage]
    return next(place for place, (first, _) in enumerate(reversed(cut)) if first <= block)


def depths(layout: Layout, stage: int) -> Ints:
    """Of every micro-batch, how many sections of a stage go away."""
    own = np.array(layout.plan.away[stage] if layout.plan.away else (0,), dtype=np.int64)
    return np.broadcast_to(own, (layout.plan.micro,))


def most_away(layout: Layout) -> Away:
    """Of every stage and micro-batch, how many sections can go away. (Of a layout that offloads something.)"""
    found = np.zeros((layout.plan.depth, layout.plan.micro), dtype=np.int64)
    for order in layout.orders:
        computes: list[tuple[int, int, int, int]] = []  # forward or backward, stage, micro-batch, section
        for kind, _, stage, micro, _ in order.tolist():
            cut = list(enumerate(layout.sections[stage]))
            for number, (first, last) in cut if kind == Kind.F else reversed(cut):
                pieces = 2 * (last - first) if kind != Kind.F and layout.recomputed[micro] else 1
                computes += [(int(kind != Kind.F), stage, micro, number)] * pieces
        begins: dict[tuple[int, int, int, int], int] = {}
        for place, what in enumerate(computes):
            begins.setdefault(what, place)
        for (back, stage, micro, number), place in begins.items():
            last = stage == layout.plan.depth - 1 and number == len(layout.sections[stage]) - 1
            if back or last:
                continue
            following = begins.get((1, stage, micro, number + 1), begins[1, stage, micro, number] - 1)
            if place + BEHIND < following:
                found[stage, micro] = max(found[stage, micro], number + 1)
    return tuple(tuple(row) for row in found.tolist())


def check_away(layout: Layout) -> None:
    """Refused where more is to go away than can."""
    most = most_away(layout)
    for stage, can in enumerate(most):
        if (depths(layout, stage) > np.array(can)).any():
            why = (
                f"of stage {stage} it sends {away_text((tuple(depths(layout, stage).tolist()),))} sections away, and "
                f"of its {len(layout.sections[stage])} sections {away_text((can,))} can be: those that are read again "
                "at once stay"
            )
            instead = f"away={away_text(shortest(most))}" if any(map(any, most)) else "offload=none"
            raise PlanError(f"plan {brief(layout.plan)!r}", why, instead)


def with_copies(layout: Layout, lists: Entries) -> Entries:
    """The lists of all ranks, with the copies in their places."""
    if not layout.offloads:
        return lists
    check_away(layout)
    table = lists.table
    kind, stage, unit = (column[lists.row] for column in (table.kind, table.stage, table.unit))
    away = np.zeros((layout.plan.depth, layout.plan.micro), dtype=np.int64)
    for number in layout.stages:
        away[number] = depths(layout, number)
    own = away[stage, lists.piece]
    rows = _Rows(table)
    extra: list[tuple[int, int, int]] = []  # before which entry, row, like which entry
    compute = nonzero(_COMPUTE[kind])
    section = _sections(layout, kind, stage, unit, lists.piece)
    begin: dict[tuple[int, int, int, int], int] = {}  # replica and stage, piece, step, section → its backward begins
    line = table.replica[lists.row] * layout.plan.depth + stage
    again = layout.recomputed[lists.piece]
    back = nonzero((section >= 0) & (kind != Kind.F))
    columns = (column[back].tolist() for column in (line, lists.piece, lists.step, section))
    for entry, what in zip(back.tolist(), zip(*columns, strict=True), strict=True):
        begin.setdefault(what, entry)
    for entry in nonzero((kind == Kind.F) & (unit < own)).tolist():
        extra.append((entry + 1, rows.copy(Kind.OFFLOAD, lists.row[entry], unit[entry], again[entry]), entry))
    for (of, piece, step, number), entry in begin.items():
        if number < own[entry]:
            before = int(compute[np.searchsorted(compute, entry) - 1])
            place = begin.get((of, piece, step, number + 1), before)
            extra.append((place, rows.copy(Kind.FETCH, lists.row[entry], number, again[entry]), entry))
    extra.sort(key=lambda one: one[0])
    at, row, like = np.array(extra, dtype=np.int64).reshape(-1, 3).T

    def inserted(column: Ints, new: Ints) -> Ints:
        return np.insert(column, at, new)

    added = np.zeros(len(lists.row) + 1, dtype=np.int64)
    np.add.at(added, at, 1)
    return replace(
        lists, table=rows.table, row=inserted(lists.row, row), piece=inserted(lists.piece, lists.piece[like]),
        step=inserted(lists.step, lists.step[like]), phase=inserted(lists.phase, lists.phase[like]),
        start=lists.start + np.concatenate([[0], np.cumsum(added)])[lists.start],
    )  # fmt: skip


def _sections(layout: Layout, kind: Ints, stage: Ints, unit: Ints, piece: Ints) -> Ints:
    """Of every entry of a pass the section that it computes; -1 of others."""
    again = layout.recomputed[piece]
    found = np.full(len(kind), -1, dtype=np.int64)
    for number in layout.stages:
        cut = layout.sections[number]
        of_block = np.full(layout.plan.blocks, -1, dtype=np.int64)
        for place, (first, last) in enumerate(cut):
            of_block[first:last] = place
        here = stage == number
        forward, back = here & (kind == Kind.F), here & (kind == Kind.B)
        found[forward] = unit[forward]
        found[back & ~again] = len(cut) - 1 - unit[back & ~again]
        blocks = here & ((kind == Kind.R) | (back & again))
        found[blocks] = of_block[unit[blocks]]
    return found


class _Rows:
    """A table to which rows are added that are others', with another kind."""

    def __init__(self, table: Table) -> None:
        self._columns = {name: column.tolist() for name, column in vars(table).items()}
        self._known: dict[tuple[int, ...], int] = {}

    def copy(self, kind: Kind, row: int, unit: int, again: bool) -> int:
        """The row of a copy of what is computed in another."""
        new = {"kind": int(kind), "unit": int(unit), "again": int(again)}
        key = (int(row), *new.values())
        if key not in self._known:
            self._known[key] = new["alike"] = len(self._columns["kind"])
            for name, column in self._columns.items():
                column.append(new.get(name, column[row]))
        return self._known[key]

    @property
    def table(self) -> Table:
        return Table(**{name: np.array(column, dtype=np.int64) for name, column in self._columns.items()})
