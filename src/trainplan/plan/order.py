"""An order of work that is given: what every rank computes, in torch's CSV format.

One line a rank, one cell an operation: `0F0,0F1,0B0,0B1` is stage 0 forward for two micro-batches, then backward. I and
W are the two parts of a backward pass, for the input and for the weights. An overlapped pair, `(1F2;3B0)OVERLAP_F_B`,
becomes its two operations one after the other: our ranks compute one thing at a time. Cells of messages and of sharding
are passed over, since lowering adds those that our engine needs; so torch's files with and without communication are
read alike. Beyond torch, `1F0^1` is in the second pipeline of a replica (two directions, as in Chimera).

Everything else follows from the file: how many ranks, stages and micro-batches there are, and which stage is where. So
it is read whole, and refused whole: with the place, and with what would mend it.

>>> found = read("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\\n1F0,1F1,1B0,1B1", "example.csv")
>>> found.ranks, found.stages, found.micro, found.local
(2, 3, 2, ((0, 1, 0),))
>>> found.held
(2, 2, 2)
>>> read("0F0,0B0\\n1B0,1F0", "example.csv")
Traceback (most recent call last):
    ...
trainplan.errors.InputError: example.csv, line 2, cell 1, »1B0« 1F0: backward comes before 1F0, which is cell 2. Try \
moving 1F0 in front of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from trainplan.errors import InputError, nearest

GIVEN = "given"  # the word for such an order where the others have their names
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})(?:\^(\d{1,9}))?")
_SLICED = re.compile(r"\d+[FBIW]\d+/\d+.*")
_PASSED_OVER = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_PAIR = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
_AROUND = 3  # operations that an error shows on either side
_WORDS = {"F": "forward", "B": "backward", "I": "the input part of backward", "W": "the weights' part of backward"}

Name = tuple[str, int, int]  # kind, stage, micro-batch


class Cell(NamedTuple):
    """One operation, and where it was read."""

    kind: str
    pipeline: int
    stage: int
    micro: int
    rank: int
    line: int
    place: int  # of the cell in its line, from 1

    @property
    def name(self) -> Name:
        return self.kind, self.stage, self.micro

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}" + (f"^{self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True)
class Given:
    """An order of work that was read and found sound."""

    cells: tuple[tuple[Cell, ...], ...]  # of every rank
    local: tuple[tuple[int, ...], ...]  # pipeline → stage → rank
    micro: int

    @property
    def ranks(self) -> int:
        return len(self.cells)

    @property
    def stages(self) -> int:
        return len(self.local[0])

    @property
    def lines(self) -> tuple[str, ...]:
        """The order as a plan keeps it: nothing but what is computed."""
        return tuple(",".join(map(str, row)) for row in self.cells)

    @property
    def held(self) -> tuple[int, ...]:
        """Of every stage the micro-batches that are forward but not back at once, where they are most."""
        most = [0] * self.stages
        for row in self.cells:
            now = [0] * self.stages
            for cell in row:
                now[cell.stage] += {"F": 1, "I": 0}.get(cell.kind, -1)
                most[cell.stage] = max(most[cell.stage], now[cell.stage])
        return tuple(most)


def from_file(path: str) -> Given:
    """The order that a file holds."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        beside = sorted(str(p) for p in Path(path).expanduser().parent.glob("*.csv"))
        instead = nearest(path, beside) if beside else "trainplan timeline MODEL --plan … --csv FILE, which writes one"
        raise InputError(f"schedule={path}", f"it cannot be read ({error.strerror})", instead) from None
    except UnicodeDecodeError:
        raise InputError(f"schedule={path}", "it is not a text file", "lines such as 0F0,0F1,0B0,0B1") from None
    return read(text, path)


@lru_cache(maxsize=64)
def known(lines: tuple[str, ...]) -> Given:
    """The order that a plan keeps."""
    return read("\n".join(lines), "order of work")


def read(text: str, where: str) -> Given:
    """The order of every rank; `where` names the file in errors."""
    try:
        rows = list(csv.reader(text.rstrip().splitlines()))
    except csv.Error as error:
        raise InputError(where, f"it is no CSV ({error})", "lines such as 0F0,0F1,0B0,0B1") from None
    if not rows:
        raise InputError(where, "the file is empty", "one line a rank, such as 0F0,0F1,0B0,0B1")
    cells = tuple(tuple(_cells(row, rank, where)) for rank, row in enumerate(rows))
    for rank, own in enumerate(cells):
        if not own:
            why = "there is nothing to compute, and every line is a rank"
            raise InputError(f"{where}, line {rank + 1}", why, "leaving the line out")
    return _Reading(where, cells).found()


def _cells(row: list[str], rank: int, where: str) -> Iterator[Cell]:
    for place, cell in enumerate(row, start=1):
        pair = _PAIR.fullmatch(cell.strip())
        for part in pair["parts"].split(";") if pair else [cell]:
            word = part.strip()
            if not word or _PASSED_OVER.fullmatch(word):
                continue
            match = _CELL.fullmatch(word)
            if not match:
                at = f"{where}, line {rank + 1}, cell {place}, {_marked(row, place - 1)}"
                if _SLICED.fullmatch(word):
                    raise InputError(at, "parts of a sequence cannot be given", word.partition("/")[0])
                why = "it is not STAGE, one of F, B, I and W, and MICRO-BATCH"
                raise InputError(at, why, "2F0 for stage 2 forward, micro-batch 0")
            stage, kind, micro, pipeline = match.groups()
            yield Cell(kind, int(pipeline or 0), int(stage), int(micro), rank, rank + 1, place)


def _marked(words: Sequence[object], at: int) -> str:
    """A few of a line's words, one of them between » and «.

    >>> _marked("abcdefghij", 4)
    '… b c d »e« f g h …'
    """
    first, last = max(0, at - _AROUND), at + _AROUND + 1
    shown = [f"»{word}«" if first + i == at else str(word) for i, word in enumerate(words[first:last])]
    return " ".join([*(["…"] if first else []), *shown, *(["…"] if last < len(words) else [])])


class _Reading:
    """The rules, in the order in which they are held against a file."""

    def __init__(self, where: str, cells: tuple[tuple[Cell, ...], ...]) -> None:
        self.where, self.cells = where, cells
        self.all = [cell for row in cells for cell in row]
        self.at: dict[Name, Cell] = {}

    def found(self) -> Given:
        self._once()
        pipeline_of = self._pipelines()
        homes = self._homes()
        local = self._complete(pipeline_of, homes)
        self._forward_first()
        self._ends()
        return Given(self.cells, local, len(pipeline_of))

    def error(self, cell: Cell, why: str, instead: str) -> InputError:
        own = self.cells[cell.rank]
        at = f"{self.where}, line {cell.line}, cell {cell.place}, {_marked(own, own.index(cell))}"
        return InputError(at, why, instead)

    def _once(self) -> None:
        for cell in self.all:
            first = self.at.setdefault(cell.name, cell)
            if first is not cell:
                raise self.error(cell, f"it is there already: line {first.line}, cell {first.place}", "taking it out")

    def _pipelines(self) -> dict[int, int]:
        """The pipeline that each micro-batch takes, from its first operation to its last."""
        first: dict[int, Cell] = {}
        for cell in self.all:
            other = first.setdefault(cell.micro, cell)
            if other.pipeline != cell.pipeline:
                why = f"micro-batch {cell.micro} stays in one pipeline, and {other} is in {other.pipeline}"
                raise self.error(cell, why, f"^{other.pipeline} for both")
        return {micro: cell.pipeline for micro, cell in first.items()}

    def _homes(self) -> dict[tuple[int, int], Cell]:
        """Of every stage of every pipeline the first operation, which says where it is."""
        homes: dict[tuple[int, int], Cell] = {}
        for cell in self.all:
            first = homes.setdefault((cell.pipeline, cell.stage), cell)
            if first.rank != cell.rank:
                why = f"stage {cell.stage} is on line {first.line} (cell {first.place}), and a stage is on one rank"
                raise self.error(cell, why, f"moving it to line {first.line}")
        return homes

    def _complete(self, pipeline_of: dict[int, int], homes: dict[tuple[int, int], Cell]) -> tuple[tuple[int, ...], ...]:
        """Every micro-batch goes forward and back through every stage of its pipeline, and numbers have no gaps."""
        counts = {"micro-batch": set(pipeline_of), "stage": {s for _, s in homes}, "pipeline": {p for p, _ in homes}}
        for what, numbers in counts.items():
            gap = next((n for n in range(len(numbers)) if n not in numbers), None)
            if gap is not None:
                why = f"there is a {what} {max(numbers)} and none of number {gap}"
                raise InputError(self.where, why, f"{what}s that count from 0")
        stages = range(len(counts["stage"]))
        for micro, pipeline in sorted(pipeline_of.items()):
            for stage in stages:
                self._passes(stage, micro, homes.get((pipeline, stage)), pipeline)
        pipelines = range(len(counts["pipeline"]))
        return tuple(tuple(homes[pipeline, stage].rank for stage in stages) for pipeline in pipelines)

    def _passes(self, stage: int, micro: int, home: Cell | None, pipeline: int) -> None:
        """One micro-batch on one stage: F, and either B or both I and W."""
        forward, whole, first, second = (self.at.get((kind, stage, micro)) for kind in "FBIW")
        if whole and (first or second):
            part = first or second
            assert part is not None
            why = f"this backward pass is whole, too: {whole} (line {whole.line}, cell {whole.place})"
            raise self.error(part, why, f"either {stage}B{micro}, or {stage}I{micro} and {stage}W{micro}")
        lacking = [k for k, cell in (("F", forward), ("I", whole or first), ("W", whole or second)) if cell is None]
        if not lacking:
            return
        kind = "B" if lacking == ["I", "W"] else lacking[0]
        missing = str(Cell(kind, pipeline, stage, micro, 0, 0, 0))
        why = f"micro-batch {micro} never goes through {_WORDS[kind]} of stage {stage}"
        if home is None:
            raise InputError(f"{self.where}, »{missing} missing«", why, f"a line with {missing}")
        own = self.cells[home.rank]
        shown = _marked([*own, f"{missing} missing"], len(own))
        raise InputError(f"{self.where}, line {home.line}, {shown}", why, f"adding {missing} to line {home.line}")

    def _forward_first(self) -> None:
        """On its own line backward comes after forward, and its second part after its first."""
        seen: set[Name] = set()
        for cell in self.all:
            before = {"B": "F", "I": "F", "W": "I"}.get(cell.kind)
            if before and (before, cell.stage, cell.micro) not in seen:
                other = self.at[before, cell.stage, cell.micro]
                why = f"{_WORDS[cell.kind]} comes before {other}, which is cell {other.place}"
                raise self.error(cell, why, f"moving {other} in front of it")
            seen.add(cell.name)

    def _needs(self, cell: Cell) -> Cell | None:
        """What an operation waits for on another stage: forward for the stage before, backward for the one after."""
        if cell.kind == "F":
            return self.at.get(("F", cell.stage - 1, cell.micro))
        if cell.kind == "W":
            return None
        following = cell.stage + 1
        return self.at.get(("B", following, cell.micro)) or self.at.get(("I", following, cell.micro))

    def _ends(self) -> None:
        """Nobody waits in a circle: every rank goes on as far as it can, until all are through or all wait."""
        cursor, done = [0] * len(self.cells), set[Name]()
        waiting: dict[Name, list[int]] = {}  # for an operation: ranks
        able = list(range(len(self.cells)))
        while able:
            rank = able.pop()
            row = self.cells[rank]
            while cursor[rank] < len(row):
                cell = row[cursor[rank]]
                needs = self._needs(cell)
                if needs is not None and needs.name not in done:
                    waiting.setdefault(needs.name, []).append(rank)
                    break
                done.add(cell.name)
                cursor[rank] += 1
                able += waiting.pop(cell.name, ())
        stuck = [row[at] for row, at in zip(self.cells, cursor, strict=True) if at < len(row)]
        if stuck:
            raise self._circle({cell.rank: cell for cell in stuck})

    def _circle(self, heads: dict[int, Cell]) -> InputError:
        """Ranks that wait for each other, from one of them until it comes round again."""
        path: list[int] = []
        rank = min(heads)
        while rank not in path:
            path.append(rank)
            needs = self._needs(heads[rank])
            assert needs is not None  # or it would not wait
            rank = needs.rank
        circle = [heads[r] for r in path[path.index(rank) :]]
        waits = [f"line {c.line} waits at {c} (cell {c.place}) for {self._needs(c)}" for c in circle]
        last = self._needs(circle[-1])
        instead = f"moving {last} in front of {circle[0]} on line {circle[0].line}"
        return self.error(circle[0], f"the ranks wait for each other: {'; '.join(waits)}", instead)
