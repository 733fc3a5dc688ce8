"""An order of work that somebody else made: torch's CSV files, in and out (what they look like: `plan/order.py`).

>>> orders = read_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", "example.csv")
>>> write_csv(orders).splitlines()[1]
'1F0,1B0,1F1,1B1'
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainplan.plan.order import Given, read
from trainplan.program.ops import Kind
from trainplan.program.schedules.order import Order
from trainplan.program.text import Key, name


def read_csv(text: str, where: str) -> list[Order]:
    """The order of every rank; `where` names the file in errors."""
    return orders(read(text, where))


def orders(given: Given) -> list[Order]:
    """The same as arrays."""
    return [
        np.array([(Kind[c.kind], c.pipeline, c.stage, c.micro, 0) for c in row], dtype=np.int64) for row in given.cells
    ]


def write_csv(orders: Sequence[Order]) -> str:
    """The orders as torch reads them; pipelines and slices, of which torch knows nothing, as our names write them."""
    lines = []
    for order in orders:
        keys = (
            Key(Kind(int(kind)), stage, micro, slice=part, pipeline=pipeline)
            for kind, pipeline, stage, micro, part in order.tolist()
        )
        lines.append(",".join(name(key) for key in keys))
    return "\n".join(lines) + "\n"
