"""A timeline drawn in the terminal: ranks down, time across, one letter an operation.

    rank 0  FFBBBB~~U
    rank 1  ..FFBBBBU

F forward, B backward, R recompute, U update, ~ communication with nothing computed meanwhile, . idle.
"""

from __future__ import annotations

from trainplan.errors import InputError
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.text import parse
from trainplan.program.timeline import Event, Timeline
from trainplan.units import seconds

LETTERS = {"F": "F", "B": "B", "I": "I", "W": "W", "R": "R", "STEP": "U"}
LEGEND = "F forward  B backward  R recompute  U update  ~ communication  . idle"
_MOST_RANKS = 64


def draw(timeline: Timeline, width: int = 100, step: int | None = None) -> str:
    """The drawing, `width` characters across; of one step where it is given."""
    if width < 10:
        raise InputError(f"width {width}", "a timeline needs at least 10 characters", "100")
    events = [e for e in timeline.events if step is None or parse(e.name).step == step]
    if not events:
        known = sorted({parse(e.name).step for e in timeline.events})
        why = "the timeline has no such step" if known else "the timeline is empty"
        raise InputError(f"step {step}" if known else "timeline", why, f"step {known[-1]}" if known else "")
    begin, end = min(e.start for e in events), max(e.end for e in events)
    cell = (end - begin) / width or 1.0
    margin = len(f"rank {timeline.world - 1}  ")
    lines = [f"{timeline.source} {timeline.title}: {seconds(end - begin)}, {seconds(cell)} a letter".replace(" :", ":")]
    for rank in range(min(timeline.world, _MOST_RANKS)):
        own = [e for e in events if e.rank == rank]
        lines.append(f"rank {rank}".ljust(margin) + _line(own, begin, cell, width))
    if timeline.world > _MOST_RANKS:
        lines.append(f"and {timeline.world - _MOST_RANKS} more ranks")
    return "\n".join([*lines, LEGEND])


def _line(events: list[Event], begin: float, cell: float, width: int) -> str:
    """For every cell the letter that covers most of it; computation before communication before idleness."""
    compute: list[dict[str, float]] = [{} for _ in range(width)]
    talks = [0.0] * width
    for event in events:
        first = min(int((event.start - begin) / cell), width - 1)
        last = min(int((event.end - begin) / cell), width - 1)
        letter = LETTERS.get(event.kind) if SPECS[Kind[event.kind]].lane is Lane.COMPUTE else None
        for place in range(first, last + 1):
            covered = min(event.end, begin + (place + 1) * cell) - max(event.start, begin + place * cell)
            if letter:
                compute[place][letter] = compute[place].get(letter, 0.0) + covered
            else:
                talks[place] = max(talks[place], covered)
    return "".join(_letter(compute[place], talks[place], cell) for place in range(width))


def _letter(compute: dict[str, float], talks: float, cell: float) -> str:
    busy = sum(compute.values())
    if busy >= cell / 2 or (busy > 0 and busy >= talks):
        return max(compute, key=lambda letter: (compute[letter], letter))
    return "~" if talks >= cell / 2 else "."
