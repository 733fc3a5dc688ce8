"""The rows that the passes of one stage become, as arrays: worked out once for all stages that are alike.

What a stage's templates say depends on the stage alone, and on nothing that plans differ in most: not on the order of
work, the number of micro-batches or of replicas, the precision, or how many ranks share its blocks. `StageKey` names
what they do depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainplan.program.lower.layout import Layout
from trainplan.program.lower.row import Row
from trainplan.program.lower.templates import templates
from trainplan.program.ops import COPIES, Kind
from trainplan.program.program import Ints, are

STAGE, REPLICA, LINE, RANK, UNIT, PEER = 1, 2, 3, 4, 5, 6  # columns of `rows.Table`
_BACKWARD = are((Kind.B, Kind.I, Kind.W)).tolist()
_PASS, _AGAIN = are((Kind.F, Kind.B, Kind.I, Kind.W)).tolist(), are((Kind.B, Kind.I, Kind.W, *COPIES)).tolist()
_NUMBER = [int(kind) for kind in Kind]
_B, _R = int(Kind.B), int(Kind.R)
_AGAIN_COLUMN, _ALIKE = 9, 12
_WIDTH = _ALIKE + 3
MOST_KNOWN = 50_000  # stages; beyond them all are forgotten


class StageKey(NamedTuple):
    """What the templates of a stage in a line depend on, and nothing else. Stages and blocks are counted from its own:
    where else in a model the same comes again, it is the same."""

    takes: tuple[tuple[int, bool], ...]  # messages: the stages that they are from (or for), and whether gradients flow
    gives: tuple[tuple[int, bool], ...]
    blocks: int  # how many, where passes go through them one by one
    pieces: tuple[tuple[int, int], ...]  # sections; without that only how many
    units: tuple[tuple[int, int], ...]  # the first and the last section that reads each
    buckets: tuple[int, ...]  # the block that completes each; without that only how many
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


class StageRows(NamedTuple):
    """The rows of all variants of a stage's passes, one after the other, but for replica and rank; stages, lines and
    blocks are counted from its own."""

    # One column a row: those of `rows.Table`, the first row that says the same, and whether `peer` is the number of a
    # stage, and `unit` that of a block.
    columns: Ints
    lengths: tuple[int, ...]  # of each variant


_known: dict[StageKey, StageRows] = {}


def stage_rows(layout: Layout) -> dict[tuple[int, int], StageRows]:
    """The rows of every stage in every line."""
    if layout.service is not None:  # its messages to servers are the plan's own
        return {way: _made(layout, *way) for way in _ways(layout)}
    found = {}
    for way, key in zip(_ways(layout), _keys(layout), strict=True):
        if key not in _known:
            if len(_known) >= MOST_KNOWN:
                forget()
            _known[key] = _made(layout, *way)
        found[way] = _known[key]
    return found


def _ways(layout: Layout) -> list[tuple[int, int]]:
    return [(stage, line) for stage in layout.stages for line in range(layout.plan.lines)]


def forget() -> None:
    """All that is known of stages."""
    _known.clear()


def _keys(layout: Layout) -> Iterator[StageKey]:
    """That of every way."""
    plan = layout.plan
    exact, late, turning = layout.recomputes or layout.offloads, layout.late, layout.turning
    flags = layout.offloads, layout.splits, layout.recomputes, layout.in_phases
    whole, observed = plan.sharers == plan.dp, layout.observed
    ranks = [[stage[0] for stage in plan.placement[line]] for line in range(plan.lines)]
    for stage, (first, last) in enumerate(plan.bounds):
        pieces, buckets, units = layout.sections[stage], layout.buckets[stage], layout.units[stage]
        cuts = tuple([(a - first, b - first) for a, b in pieces]) if exact else ((0, 0),) * len(pieces)
        full = tuple([bucket.block - first for bucket in buckets]) if exact else (0,) * len(buckets)
        read = tuple([(unit.first, unit.last) for unit in units])
        kept = not observed and layout.bucketed(stage)
        for own in ranks:
            here = own[stage]
            yield StageKey(
                tuple([(e.source - stage, bool(e.gradients)) for e in layout.incoming[stage] if own[e.source] != here]),
                tuple([(e.target - stage, bool(e.gradients)) for e in layout.outgoing[stage] if own[e.target] != here]),
                last - first if exact else 0, cuts, read, full, plan.zero, whole, stage in late, stage in turning,
                *flags, kept, observed,
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
    columns = _columns(rows, 0)
    *_, peers, blocks = columns
    peers[:] = columns[PEER] >= 0
    blocks[:] = (columns[0] == _R) | ((columns[0] == _B) & (columns[_AGAIN_COLUMN] > 0))
    columns[STAGE] -= stage
    columns[LINE] -= line
    columns[PEER] -= stage * peers
    columns[UNIT] -= layout.plan.bounds[stage][0] * blocks
    return StageRows(columns, tuple(map(len, bodies)))


def _columns(rows: Sequence[tuple[int, ...]], begin: int) -> Ints:
    """Rows that stand from `begin` on as columns, with the first that says the same; nothing in them is counted from
    anywhere."""
    found = np.zeros((_WIDTH, len(rows)), dtype=np.int64)
    if rows:
        found[:_ALIKE] = np.array(rows, dtype=np.int64).T
        found[_ALIKE] = np.array(first_alike(rows)) + begin
    return found


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
    """Templates, one after the other, and how many rows each has."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.length: list[int] = []
        self._parts: list[Ints] = []
        # Of every part: what is to be added to its stages, replicas, lines, ranks, blocks and places.
        self._from: list[tuple[int, int, int, int, int, int]] = []
        self._loose: list[tuple[int, ...]] = []  # rows behind the last part
        self._count = 0

    def add(
        self, template: Sequence[Row], replica: int, rank: int, adds: int = 0, last: bool = False, again: bool = False,
        cut: bool = False,
    ) -> int:  # fmt: skip
        """One more body; its number."""
        self._loose += as_rows(template, replica, rank, adds, last, again, cut)
        self.length.append(len(template))
        self._count += len(template)
        return len(self.length) - 1

    def add_stage(self, rows: StageRows, stage: int, line: int, replica: int, rank: int) -> int:
        """All bodies of a stage in a line; the number of the first."""
        self._close()
        first = len(self.length)
        self._parts.append(rows.columns)
        self._from.append((stage, replica, line, rank, self.layout.plan.bounds[stage][0], self._count))
        self.length += rows.lengths
        self._count += rows.columns.shape[1]
        return first

    def rows(self) -> Ints:
        """The columns of all rows; and as the last one the first row of its part that says the same."""
        self._close()
        found = np.concatenate(self._parts, axis=1)
        sizes = [part.shape[1] for part in self._parts]
        stage, replica, line, rank, block, place = np.repeat(np.array(self._from, dtype=np.int64).T, sizes, axis=1)
        *_, peers, blocks = found
        for column, more in ((STAGE, stage), (REPLICA, replica), (LINE, line), (RANK, rank), (_ALIKE, place)):
            found[column] += more
        found[PEER] += stage * peers
        found[UNIT] += block * blocks
        return found[: _ALIKE + 1]

    def _close(self) -> None:
        if self._loose:
            self._parts.append(_columns(self._loose, self._count - len(self._loose)))
            self._from.append((0,) * 6)
            self._loose = []
