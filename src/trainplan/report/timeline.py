"""A timeline drawn in the terminal: ranks down, time across, a letter an operation and the number of its micro-batch.

    rank 0  F0F1F2F3....B3--B2--B1--B0--U
    rank 1  ..F0F1F2F3B3--B2--B1--B0--U

Where a rank has several stages there is a line for each, which is blank where the rank works for another one; so a dot
always means that the whole rank is idle. Where there is no room for numbers a letter is what most of its time goes to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from trainplan.errors import InputError
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.text import Key, parse
from trainplan.program.timeline import Event, Timeline
from trainplan.units import seconds

LETTERS = {
    "F": ("F", "forward"),
    "B": ("B", "backward"),
    "I": ("I", "backward, input"),
    "W": ("W", "backward, weights"),
    "R": ("R", "recompute"),
    "STEP": ("U", "update"),
}
TALK, MEET, IDLE, ELSEWHERE, ON = "~", "|", ".", " ", "-"
_MOST_LINES = 64


@dataclass(frozen=True)
class _Scale:
    """From seconds to characters."""

    begin: float
    cell: float  # seconds of a character
    width: int

    def place(self, moment: float) -> int:
        """The character that a moment is in."""
        return min(int((moment - self.begin) / self.cell), self.width - 1)

    def covered(self, event: Event, place: int) -> float:
        """Seconds of an event within a character."""
        since = self.begin + place * self.cell
        return min(event.end, since + self.cell) - max(event.start, since)


def draw(timeline: Timeline, width: int = 100, step: int | None = None) -> str:
    """The drawing, `width` characters across; of one step where it is given."""
    if width < 10:
        raise InputError(f"width {width}", "a timeline needs at least 10 characters", "100")
    named = [(e, parse(e.name)) for e in timeline.events]
    events = [(e, key) for e, key in named if step is None or key.step == step]
    if not events:
        known = sorted({key.step for _, key in named})
        why = "the timeline has no such step" if known else "the timeline is empty"
        raise InputError(f"step {step}" if known else "timeline", why, f"step {known[-1]}" if known else "")
    begin, end = min(e.start for e, _ in events), max(e.end for e, _ in events)
    scale = _Scale(begin, (end - begin) / width or 1.0, width)
    lines = [f"{timeline.source} {timeline.title}: {seconds(end - begin)}, {seconds(scale.cell)} a letter"]
    lines[0] = lines[0].replace(" :", ":")
    by_rank: dict[int, list[tuple[Event, Key]]] = {rank: [] for rank in range(timeline.world)}
    for event, key in events:
        by_rank[event.rank].append((event, key))
    sliced = any(key.slice for _, key in events)
    stages = [sorted({key.stage for e, key in own if e.kind in LETTERS}) or [0] for own in by_rank.values()]
    several = any(len(own) > 1 for own in stages)
    last = max(own[-1] for own in stages)
    margin = len(f"rank {timeline.world - 1}  "), len(f"stage {last}  ") if several else 0
    shown = [_rank(rank, stages[rank], own, scale, margin, sliced) for rank, own in by_rank.items()]
    fits = next((n for n in range(len(shown)) if sum(map(len, shown[: n + 1])) > _MOST_LINES), len(shown))
    drawing = [line for rank in shown[: max(fits, 1)] for line in rank]
    lines += drawing
    if fits < timeline.world:
        lines.append(f"and {timeline.world - max(fits, 1)} more ranks")
    return "\n".join([*lines, _legend("".join(line[sum(margin) :] for line in drawing), sliced, several)])


def _legend(drawn: str, sliced: bool, several: bool) -> str:
    """What the signs mean, of those that are there."""
    signs = [*LETTERS.values(), (TALK, "communication"), (MEET, "barrier"), (IDLE, "idle")]
    words = [f"{sign} {what}" for sign, what in signs if sign in drawn]
    if any(sign.isdigit() for sign in drawn):
        words.append("numbers: " + ("part of the sequence" if sliced else "micro-batch"))
    if several:
        words.append("blank: at work for another stage")
    return "  ".join(words)


def _rank(
    rank: int, stages: list[int], own: Sequence[tuple[Event, Key]], scale: _Scale, margin: tuple[int, int], sliced: bool
) -> list[str]:
    """The lines of a rank: one for each stage that it holds. `margin`: characters for the names of ranks and stages."""
    compute = [(e, key) for e, key in own if e.kind in LETTERS]
    talk = [e for e, _ in own if SPECS[Kind[e.kind]].lane is not Lane.COMPUTE]
    signs = _signs(compute, talk, scale)
    lines = []
    for stage in stages:
        drawn = [""] * scale.width
        for sign, places in itertools.groupby(range(scale.width), key=lambda place: signs[place]):
            run = list(places)
            word = ELSEWHERE * len(run)
            if isinstance(sign, str):
                word = sign * len(run)
            elif compute[sign][1].stage == stage:
                event, key = compute[sign]
                word = _word(event, key, len(run), sliced)
            drawn[run[0]] = word
        name = (f"rank {rank}" if stage == stages[0] else "").ljust(margin[0])
        label = f"stage {stage}".ljust(margin[1]) if margin[1] else ""
        lines.append((name + label + "".join(drawn)).rstrip())
    return lines


def _word(event: Event, key: Key, length: int, sliced: bool) -> str:
    """An operation in so many characters: its letter, its number where there is room, and dashes.

    >>> _word(Event("2F7", "F", 2, 0.0, 1.0), parse("2F7"), 4, sliced=False)
    'F7--'
    """
    letter = LETTERS[event.kind][0]
    number = "" if event.kind == "STEP" else str(key.slice if sliced else key.micro_batch)
    return (letter + (number if len(number) < length else "")).ljust(length, ON)


def _signs(compute: Sequence[tuple[Event, Key]], talk: Sequence[Event], scale: _Scale) -> list[str | int]:
    """For every character what has most of it: the number of a computation, communication, or idleness.

    Where computations are shorter than a character, it goes to the sort (letter and stage) that has most of it.
    """
    busy: list[dict[tuple[str, int], list[tuple[float, int]]]] = [{} for _ in range(scale.width)]
    talks = [(0.0, TALK)] * scale.width  # seconds of the longest
    for number, (event, key) in enumerate(compute):
        for place in range(scale.place(event.start), scale.place(event.end) + 1):
            spent = busy[place].setdefault((LETTERS[event.kind][0], key.stage), [])
            spent.append((scale.covered(event, place), number))
    for event in talk:
        for place in range(scale.place(event.start), scale.place(event.end) + 1):
            sign = MEET if event.kind == "BARRIER" else TALK
            talks[place] = max(talks[place], (scale.covered(event, place), sign))
    found: list[str | int] = []
    for sorts, (talking, sign) in zip(busy, talks, strict=True):
        shown: str | int = sign if talking >= scale.cell / 2 else IDLE
        total = sum(time for spent in sorts.values() for time, _ in spent)
        if total > 0:
            most = max(sorts, key=lambda sort: (sum(time for time, _ in sorts[sort]), sort))
            number = max(sorts[most])[1]
            event = compute[number][0]
            # What is shorter than a character would not be seen if it had to have half of one.
            if total >= scale.cell / 2 or (event.end - event.start < scale.cell and total >= talking):
                shown = number
        found.append(shown)
    return found
