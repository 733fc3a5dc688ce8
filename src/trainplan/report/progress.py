"""A progress bar on stderr, so that stdout stays what a program can read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, float], None]  # what goes on now, and the share that is done


@contextmanager
def progress(show: bool = True, lines: bool = False) -> Iterator[Report]:
    """A function to report progress to; the bar appears with the first report, and only on a terminal. Elsewhere each
    report is a line, if it is asked for: where there are few, and long ones."""
    if not (show and sys.stderr.isatty()):
        yield (lambda what, share: print(f"{what} …", file=sys.stderr, flush=True)) if lines else _nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda what, share: bar.update(task, description=what, completed=share, visible=True)


def _nothing(what: str, share: float) -> None:
    """Nobody is there to see it."""
