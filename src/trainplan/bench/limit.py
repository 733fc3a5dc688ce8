"""Measurements that may take only so long: they stop between two of them, and say by their exit code what is left."""

from __future__ import annotations

import argparse
import sys
import time

UNFINISHED = 75  # the exit code of a measurement that wants to be started again (as sysexits has it)


class Limit:
    """Seconds from now on.

    >>> enough, none = Limit(3600), Limit(0)
    >>> enough.over(), none.over()
    (False, True)
    >>> enough.leave()
    >>> none.leave()
    Traceback (most recent call last):
    SystemExit: 75
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._left = False

    def over(self) -> bool:
        """Whether nothing more should begin; asked only by whoever has something to begin."""
        self._left |= time.monotonic() >= self._end
        return self._left

    def leave(self) -> None:
        """End with a code of its own if something was not begun."""
        if self._left:
            sys.exit(UNFINISHED)


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that all of them have."""
    what = f"begin nothing after so many seconds; exit code {UNFINISHED}: call again, and it goes on"
    parser.add_argument("--for", dest="limit", type=float, default=float("inf"), metavar="SECONDS", help=what)
