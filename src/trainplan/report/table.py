"""Tables as text: numbers to the right, words to the left, units in the header.

>>> print(table(["plan", ">step ms"], [["single", "1,200"], ["dp=2", "640"]]))
 plan    step ms
 single    1,200
 dp=2        640
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainplan.units import GIB, significant


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], lines: bool = False) -> str:
    """A table as plain text. A header that starts with > stands over numbers. `lines`: a rule under the header."""
    drawn = Table(box=box.SIMPLE_HEAD if lines else None, pad_edge=True, padding=(0, 1, 0, 1), show_edge=False)
    for header in headers:
        drawn.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # as it is: brackets are no markup here
    stream = io.StringIO()
    # Wide enough for anything: a terminal wraps long lines, a table that drops words is no use.
    Console(file=stream, width=1000, color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def number(value: float | None) -> str:
    """Three significant digits, or a dash where there is none."""
    return "–" if value is None else significant(value)


def gib_number(size: float) -> str:
    """Bytes in GiB, for a column whose header says so."""
    return significant(size / GIB)


def milliseconds(value: float) -> str:
    """Seconds in ms, for a column whose header says so."""
    return significant(value * 1e3)
