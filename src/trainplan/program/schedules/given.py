"""An order of work that somebody else made: torch's CSV files, in and out.

One line a rank, one cell an operation: `0F0,0F1,0B0,0B1`. An overlapped pair, `(1F2;3B0)OVERLAP_F_B`, becomes its two
operations one after the other: our ranks compute one thing at a time. Cells of messages and of sharding are passed
over, since lowering adds those that our engine needs; so torch's files with and without communication are read alike.

>>> orders = read_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", "example.csv")
>>> write_csv(orders).splitlines()[1]
'1F0,1B0,1F1,1B1'
"""

from __future__ import annotations

import re

import numpy as np

from trainplan.errors import InputError
from trainplan.program.ops import Kind
from trainplan.program.schedules.order import COLUMNS, Order
from trainplan.program.text import Key, name, parse

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
_PASSED_OVER = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_PAIR = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")


def read_csv(text: str, where: str) -> list[Order]:
    """The order of every rank; `where` names the file in errors."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(where, "the file is empty", "one line a rank, such as 0F0,0F1,0B0,0B1")
    return [_order(line, f"{where}, line {number}") for number, line in enumerate(lines, start=1)]


def _order(line: str, where: str) -> Order:
    found: list[tuple[int, ...]] = []
    for number, cell in enumerate(line.split(","), start=1):
        pair = _PAIR.fullmatch(cell.strip())
        for part in pair["parts"].split(";") if pair else [cell]:
            if not part.strip() or _PASSED_OVER.fullmatch(part.strip()):
                continue
            try:
                key = parse(part)
            except InputError as error:
                raise InputError(f"{where}, cell {number}", str(error)) from None
            if key.kind not in _COMPUTE:
                raise InputError(f"{where}, cell {number}: {part.strip()}", "a schedule holds F, B, I and W only")
            found.append((key.kind, key.pipeline, key.stage, key.micro_batch, key.slice))
    return np.array(found, dtype=np.int64).reshape(-1, len(COLUMNS))


def write_csv(orders: list[Order]) -> str:
    """The orders as torch reads them; pipelines and slices, of which torch knows nothing, as our names write them."""
    lines = []
    for order in orders:
        keys = (
            Key(Kind(int(kind)), stage, micro, slice=part, pipeline=pipeline)
            for kind, pipeline, stage, micro, part in order.tolist()
        )
        lines.append(",".join(name(key) for key in keys))
    return "\n".join(lines) + "\n"
