"""How long a block takes that is run again for its backward pass: less than a forward pass, if it has a tail.

(`capture/tail.py` says what that is.) The two are timed one right after the other, at one size, and what share of the
one the other is holds for all sizes.
"""

from __future__ import annotations

import statistics

from trainplan.profile.capture.stage import Stage
from trainplan.profile.subject import Subject
from trainplan.profile.timing import Readings
from trainplan.profile.walk import Walk

_NAMES = ("there", "again")


def time_once_more(subject: Subject, stage: Stage, walk: Walk, index: int, size: int) -> None:
    """Time a block that has run before, both ways; the last block, whose loss is read again, is run whole."""
    if index == len(subject.captured.blocks) - 1 or subject.compile_options is not None:
        return
    if not stage.has_tail(index):
        walk.again(stage, index)  # which finds whether it has one
        if not stage.has_tail(index):
            return
        walk.again(stage, index)  # the form of what it makes is worked out once
    for name, run in zip(_NAMES, (walk.forward, walk.again), strict=True):
        timed = name, size, index
        subject.readings.note(timed, subject.clock.time(timed, lambda run=run: run(stage, index)))  # type: ignore[misc]


def once_more(readings: Readings, index: int) -> tuple[float, float] | None:
    """The shares of a forward pass that running a block again takes of the device and of the host, which may have more
    to do; None: it has no tail."""
    sizes = [what[1] for what in readings.taken if isinstance(what, tuple) and what[0] == "again" and what[2] == index]
    if not sizes:
        return None
    (there, again) = ([spent for spent, _ in readings.taken[name, sizes[0], index]] for name in _NAMES)
    run, issue = (
        statistics.median(
            getattr(b, lane) / getattr(a, lane) if getattr(a, lane) else 1.0 for a, b in zip(there, again, strict=True)
        )
        for lane in ("run_s", "issue_s")
    )
    return run, issue
