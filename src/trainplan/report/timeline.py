"""A timeline drawn in the terminal: ranks down, time across, a letter an operation and the number of its micro-batch.

    rank 0  F0F1F2F3....B3--B2--B1--B0--U
    rank 1  ..F0F1F2F3B3--B2--B1--B0--U

Where a rank has several stages there is a line for each, which is blank where the rank works for another one; so a dot
always means that the whole rank is idle. Where there is no room for numbers a letter is what most of its time goes to,
but every operation has a letter as long as there is room for it; how many have none is said.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainplan import files
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
MOST_WIDE = 100_000


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


def draw(timeline: Timeline, width: int = 100, step: int | None = None, steps: int = 1) -> str:
    """The drawing, `width` characters across, of so many steps from `step` on (None: from the first there is)."""
    if width < 10:
        raise InputError(f"width {width}", "a timeline needs at least 10 characters", "100")
    if width > MOST_WIDE:
        raise InputError(f"width {width}", f"nobody reads more than {MOST_WIDE:,} characters across", "100, or --trace")
    named = [(e, parse(e.name)) for e in timeline.events]
    known = sorted({key.step for _, key in named})
    if not known:
        raise InputError("timeline", "there is no operation in it", files.made_by("timeline"))
    first = known[0] if step is None else step
    wanted = range(first, first + steps)
    if not 1 <= steps <= len(known) or not set(wanted) <= set(known):
        asked = f"step {first}" if steps == 1 else f"{steps} steps from step {first} on"
        there = f"it has {len(known)}, from {known[0]} to {known[-1]}"
        raise InputError(asked, f"the timeline has no such step: {there}", f"step {known[-1]}")
    events = [(e, key) for e, key in named if key.step in wanted]
    begin, end = min(e.start for e, _ in events), max(e.end for e, _ in events)
    scale = _Scale(begin, (end - begin) / width or 1.0, width)
    what = f"{steps} steps, {seconds(end - begin)}" if steps > 1 else seconds(end - begin)
    lines = [f"{timeline.source} {timeline.title}: {what}, {seconds(scale.cell)} a letter"]
    lines[0] = lines[0].replace(" :", ":")
    by_rank: dict[int, list[tuple[Event, Key]]] = {rank: [] for rank in range(timeline.world)}
    for event, key in events:
        by_rank[event.rank].append((event, key))
    sliced = any(key.slice for _, key in events)
    stages = [sorted({key.stage for e, key in own if e.kind in LETTERS}) or [0] for own in by_rank.values()]
    several = any(len(own) > 1 for own in stages)
    last = max(own[-1] for own in stages)
    margin = len(f"rank {timeline.world - 1}  "), len(f"stage {last}  ") if several else 0
    ranks = [_rank(rank, stages[rank], own, scale, margin, sliced) for rank, own in by_rank.items()]
    shown = [rank for rank, _ in ranks]
    fits = next((n for n in range(len(shown)) if sum(map(len, shown[: n + 1])) > _MOST_LINES), len(shown))
    drawing = [line for rank in shown[: max(fits, 1)] for line in rank]
    lines += drawing
    if fits < timeline.world:
        lines.append(f"and {timeline.world - max(fits, 1)} more ranks")
    lost = sum(count for _, count in ranks[: max(fits, 1)])
    if lost:
        many = "operations are" if lost > 1 else "operation is"
        lines.append(f"{lost} {many} too short to draw (--width {2 * width})")
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
) -> tuple[list[str], int]:
    """The lines of a rank, one for each stage that it holds, and how many of its operations have no letter in them.

    `margin`: characters for the names of ranks and stages.
    """
    compute = [(e, key) for e, key in own if e.kind in LETTERS]
    talk = [e for e, _ in own if SPECS[Kind[e.kind]].lane is not Lane.COMPUTE]
    signs = _signs(compute, talk, scale)
    lost = _make_room(signs, [event for event, _ in compute], scale)
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
    return lines, lost


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


def _make_room(signs: list[str | int], compute: Sequence[Event], scale: _Scale) -> int:
    """Give a character of its time to every operation that has none: an idle one, or one of a longer operation.

    Returns how many there is no room for.
    """
    lost = 0
    places = Counter(signs)
    for number, event in enumerate(compute):
        if number in places or event.end <= event.start:  # what takes no time has nothing to show
            continue
        own = range(scale.place(event.start), scale.place(event.end) + 1)
        touched = [place for place in own if scale.covered(event, place) > 1e-6 * scale.cell]
        idle = [place for place in touched if isinstance(signs[place], str)]
        # Where it touches a longer one it takes its first or its last character: they are done one after the other.
        shared = [place for place in touched if places[signs[place]] > 1]
        room = max(idle or shared, key=lambda place: scale.covered(event, place), default=None)
        if room is None:
            lost += 1
            continue
        places[signs[room]] -= 1
        signs[room] = number
        places[number] = 1
    return lost
