"""The command that makes a file of measurements, as whoever reads the file would give it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath


def command(words: Sequence[str] = ()) -> str:
    """The words of this process, from the project's folder: where results went is where they are, and how long it was
    allowed to take, or what else was kept, says nothing of what was measured.

    >>> command(["/a/b/benchmarks/engine.py", "--plans", "dp=2 zero=1", "--for", "90", "--out", "/tmp/x/engine.json"])
    "python benchmarks/engine.py --plans 'dp=2 zero=1' --out benchmarks/data/engine.json"
    """
    script, *options = words or sys.argv
    kept = [f"benchmarks/{PurePath(script).name}"]
    given = iter(options)
    for word in given:
        if word in ("--for", "--keep"):
            next(given)
        elif word == "--out":
            kept += [word, f"benchmarks/data/{PurePath(next(given)).name}"]
        else:
            kept.append(word)
    return f"python {shlex.join(kept)}"
