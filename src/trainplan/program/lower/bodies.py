"""The rows that the passes of one stage become, as arrays: worked out once for all plans that cut it out alike.

What a stage's templates say depends on the stage alone, and on nothing that plans differ in most: not on the order of
work, the number of micro-batches or of replicas, the precision, or how many ranks share its blocks. `StageKey` names
what they do depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.row import Row
from trainplan.program.lower.templates import templates
from trainplan.program.ops import COPIES, Kind
from trainplan.program.program import Ints, are

REPLICA, RANK = 2, 4  # columns of `rows.Table`
_BACKWARD = are((Kind.B, Kind.I, Kind.W)).tolist()
_PASS, _AGAIN = are((Kind.F, Kind.B, Kind.I, Kind.W)).tolist(), are((Kind.B, Kind.I, Kind.W, *COPIES)).tolist()
_NUMBER = [int(kind) for kind in Kind]
MOST_KNOWN = 50_000  # stages; beyond them all are forgotten


class StageKey(NamedTuple):
    """What the templates of a stage in a line depend on, and nothing else."""

    stage: int
    line: int
    bound: tuple[int, int]
    takes: tuple[tuple[int, bool], ...]  # messages: the stages that they are from (or for), and whether gradients flow
    gives: tuple[tuple[int, bool], ...]
    pieces: tuple[tuple[int, int], ...]  # sections
    units: tuple[tuple[int, int], ...]  # the first and the last section that reads each
    buckets: tuple[int, ...]  # the block that completes each
    zero: int
    whole: bool  # all replicas share out together
    late: bool
    turning: bool
    offloads: bool
    splits: bool
    recomputes: bool
    in_phases: bool
    kept: bool  # gradients are in buckets of our own
    observed: bool


@dataclass(frozen=True)
class StageRows:
    """The rows of all variants of a stage's passes, one after the other, but for replica and rank."""

    rows: Ints  # (row, column of `rows.Table`)
    lengths: tuple[int, ...]  # of each variant
    alike: Ints  # row → the first that says the same


_known: dict[StageKey, StageRows] = {}


def stage_rows(layout: Layout, stage: int, line: int) -> StageRows:
    """The rows of a stage in a line."""
    if layout.service is not None:  # its messages to servers are the plan's own
        return _made(layout, stage, line)
    key = _key(layout, stage, line)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            forget()
        _known[key] = _made(layout, stage, line)
    return _known[key]


def forget() -> None:
    """All that is known of stages."""
    _known.clear()


def _key(layout: Layout, stage: int, line: int) -> StageKey:
    comes, goes = layout.incoming[stage], layout.outgoing[stage]
    return StageKey(
        stage, line, layout.plan.bounds[stage],
        tuple([(e.source, bool(e.gradients)) for e in comes if layout.is_message(e, line)]),
        tuple([(e.target, bool(e.gradients)) for e in goes if layout.is_message(e, line)]),
        tuple(layout.sections[stage]), tuple([(unit.first, unit.last) for unit in layout.units[stage]]),
        tuple([bucket.block for bucket in layout.buckets[stage]]), layout.plan.zero,
        layout.plan.sharers == layout.plan.dp, stage in layout.late, stage in layout.turning, layout.offloads,
        layout.splits, layout.recomputes, layout.in_phases, layout.bucketed(stage) and not layout.observed,
        layout.observed,
    )  # fmt: skip


def _made(layout: Layout, stage: int, line: int) -> StageRows:
    """One body for each variant (`rows.py` counts them)."""
    shape = templates(layout, stage, line)
    # A pass adds to gradients that an earlier pass left, or that our own buckets keep from step to step. In the last
    # pass DDP copies each gradient into its bucket, which costs about the same.
    kept = int(layout.bucketed(stage) and not layout.observed)
    copied = int(layout.observed)
    bodies = [
        as_rows(shape.forward),
        as_rows(shape.first_forward, last=layout.plan.zero > 0),  # else it is like all others
        as_rows(shape.input_backward),
    ]
    ways = [(shape.backward, shape.last_backward)]
    if layout.splits:
        ways.append((shape.weight_backward, shape.last_weight_backward))
    elif layout.recomputes:
        ways.append((shape.recomputed_backward, shape.last_recomputed_backward))
    for way, (usual, last) in enumerate(ways):
        again = bool(way) and layout.recomputes
        bodies.append(as_rows(usual, adds=kept, again=again))
        bodies.append(as_rows(usual, adds=1, again=again))
        bodies.append(as_rows(last, adds=1 + copied, last=True, again=again))
        bodies.append(as_rows(last, adds=kept + copied, last=True, again=again))
    rows = [row for body in bodies for row in body]
    return StageRows(np.array(rows, dtype=np.int64), tuple(map(len, bodies)), np.array(first_alike(rows)))


def as_rows(
    template: Sequence[Row], replica: int = 0, rank: int = 0, adds: int = 0, last: bool = False, again: bool = False,
    cut: bool = False,
) -> list[tuple[int, ...]]:  # fmt: skip
    """A template as rows of a table, in the order of its columns. Which pass it is says something of backward passes,
    and of forward passes whether they are the first; other rows are the same in all of them."""
    return [
        (  # numbers alone: of anything else numpy asks first what it is
            _NUMBER[kind], stage, replica, line, rank, unit, peer, adds if _BACKWARD[kind] else 0,
            last if _PASS[kind] else 0, again if _AGAIN[kind] else 0, size, cut,
        )
        for kind, stage, line, unit, peer, size in template
    ]  # fmt: skip


def first_alike(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """For every row the first that is equal to it.

    >>> first_alike([(1, 2), (3, 4), (1, 2)])
    [0, 1, 0]
    """
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(row, number) for number, row in enumerate(rows)]


class Bodies:
    """Templates, one after the other, and where the rows of each begin."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.start: list[int] = []
        self.length: list[int] = []
        self._parts: list[Ints] = []
        self._alike: list[Ints] = []  # of every part: the first row that says the same, counted from all rows
        self._loose: list[tuple[int, ...]] = []  # rows behind the last part
        self._count = 0

    def add(
        self, template: Sequence[Row], replica: int, rank: int, adds: int = 0, last: bool = False, again: bool = False,
        cut: bool = False,
    ) -> int:  # fmt: skip
        """One more body; its number."""
        self._loose += as_rows(template, replica, rank, adds, last, again, cut)
        self._begin(len(template))
        return len(self.start) - 1

    def add_stage(self, stage: StageRows, replica: int, rank: int) -> int:
        """All bodies of a stage; the number of the first."""
        self._close()
        own = stage.rows.copy()
        own[:, REPLICA], own[:, RANK] = replica, rank
        self._parts.append(own)
        self._alike.append(stage.alike + self._count)
        first = len(self.start)
        self.length += stage.lengths
        for length in stage.lengths:
            self.start.append(self._count)
            self._count += length
        return first

    def rows(self) -> Ints:
        """The columns of all rows; and as the last one the first row of its part that says the same."""
        self._close()
        found = np.empty((self._parts[0].shape[1] + 1, self._count), dtype=np.int64)
        np.concatenate(self._parts, out=found[:-1].T)
        np.concatenate(self._alike, out=found[-1])
        return found

    def _begin(self, length: int) -> None:
        self.start.append(self._count)
        self.length.append(length)
        self._count += length

    def _close(self) -> None:
        if self._loose:
            self._parts.append(np.array(self._loose, dtype=np.int64))
            self._alike.append(np.array(first_alike(self._loose)) + self._count - len(self._loose))
            self._loose = []
