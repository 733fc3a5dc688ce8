"""Where the time of a step goes, without counting any moment twice.

On each rank every moment of a step belongs to one operation: to the computation that runs; else to the communication
that goes on (the one that is over first: it is what everything waits for); else, where nothing goes on, to the
operation that comes next, because that is what was waited for. Waiting for a message thus belongs to its receive, and
waiting for the other members of a collective to that collective. What is left at the end of a step, while other ranks
still work, is `wait`. Where steps cross, a step is what happens from the end of one's passes to that of the next.
Inputs that are loaded ahead are waited for by nobody until the step before is over; so that is where they begin.
A rank whose stage is frozen waits for nobody, begins the next step at once and may be several ahead: there every rank's
step is from the end of its own last computation to that of the next, and what it is faster than the slowest is `wait`.
Workers of asynchronous servers have no steps in common: there it is all steps together, and a mean of them is told.
Which of these holds is a matter of what is in a rank's list, and in which order, so a predicted and a measured timeline
of a plan are shared out alike.

So the seconds of all operations of a rank add up to its step, and differences between a predicted and a measured
timeline add up to the difference of their steps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainplan.program.ops import SPECS, Kind, Lane, goes_ahead
from trainplan.program.text import name, parse
from trainplan.program.timeline import Event, Timeline

WAIT = "wait"


@dataclass(frozen=True)
class Share:
    """What one operation took of a step on one rank."""

    name: str  # without its step
    kind: str
    rank: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """One step of a timeline, shared out among its operations."""

    number: int
    seconds: float
    shares: tuple[Share, ...]
    of: int = 1  # steps that this is the mean of


def steps(timeline: Timeline) -> list[Step]:
    """Every step of a timeline, shared out."""
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        key = parse(event.name)
        by_step[key.step].append(replace(event, name=name(replace(key, step=0))))
    every, count = [event for events in by_step.values() for event in events], len(by_step)
    if _apart(every):
        begin, end = min(e.start for e in every), max(e.end for e in every)
        whole = [share for rank in range(timeline.world) for share in _shared(every, rank, begin, end)]
        shares = [replace(share, seconds=share.seconds / count) for share in whole]
        return [Step(max(by_step), (end - begin) / count, tuple(shares), count)]
    if count > 1 and goes_ahead((event.rank, Kind[event.kind]) for event in every):
        return [_each_by_itself(by_step[a], by_step[b], b) for a, b in itertools.pairwise(sorted(by_step))]
    found = []
    for number, events, begin, end in _crossing(by_step):
        shares = [share for rank in range(timeline.world) for share in _shared(events, rank, begin, end)]
        found.append(Step(number, end - begin, tuple(shares)))
    if found:
        return found
    end = float("-inf")  # of the step before
    for number, own in sorted(by_step.items()):
        events = _behind(own, end)
        begin, end = min(e.start for e in events), max(e.end for e in events)
        shares = [share for rank in range(timeline.world) for share in _shared(events, rank, begin, end)]
        found.append(Step(number, end - begin, tuple(shares)))
    return found


def _behind(events: list[Event], moment: float) -> list[Event]:
    """The events of a step, without what was loaded for it before a moment: of such loads nothing is left."""
    rest = [e for e in events if e.kind != "LOAD" or e.end > moment]
    begin = min((max(e.start, moment) if e.kind == "LOAD" else e.start for e in rest), default=moment)
    return [
        replace(e, start=max(e.start, moment, begin), end=max(e.end, begin)) if e.kind == "LOAD" else e for e in events
    ]


def _apart(events: Iterable[Event]) -> bool:
    """Whether workers go on without each other: somewhere nothing is computed but steps, one for what each pushes."""
    steps, passes = defaultdict[int, set[int]](set), set[int]()
    for event in events:
        if event.kind == "STEP":
            steps[event.rank].add(parse(event.name).pipeline)
        elif event.kind in ("F", "B"):
            passes.add(event.rank)
    return any(len(whose) > 1 for rank, whose in steps.items() if rank not in passes)


def _each_by_itself(before: list[Event], events: list[Event], number: int) -> Step:
    """A step in which every rank begins where its own computation of the step before was over."""
    windows = {rank: (_over(before, rank), _over(events, rank)) for rank in sorted({e.rank for e in events})}
    seconds = max(end - begin for begin, end in windows.values())
    shares: list[Share] = []
    for rank, (begin, end) in windows.items():
        own = [e for e in events if e.rank == rank]
        cut = [replace(e, start=min(max(e.start, begin), end), end=min(max(e.end, begin), end)) for e in own]
        shares += _shared(cut, rank, begin, begin + seconds)
    return Step(number, seconds, tuple(shares))


def _over(events: Iterable[Event], rank: int) -> float:
    """When a rank was through with what it computes (or with all that it does, if it computes nothing)."""
    own = [e for e in events if e.rank == rank]
    return max(e.end for e in [e for e in own if SPECS[Kind[e.kind]].lane is Lane.COMPUTE] or own)


def _crossing(by_step: dict[int, list[Event]]) -> list[tuple[int, list[Event], float, float]]:
    """Where steps cross, what happens from the end of one step's passes to the end of the next one's: (step, events,
    begin, end) for every two of them. None where they do not."""
    passes = {number: [e for e in events if e.kind in ("F", "B")] for number, events in by_step.items()}
    pairs = list(itertools.pairwise(sorted(number for number, own in passes.items() if own)))
    if not any(_steps_late(by_step[a], passes[b]) for a, b in pairs):
        return []
    every = [event for events in by_step.values() for event in events]
    found = []
    for before, number in pairs:
        begin, end = (max(e.end for e in passes[n]) for n in (before, number))
        inside = [e for e in every if e.start < end and e.end > begin]
        cut = [replace(e, start=max(e.start, begin), end=min(e.end, end)) for e in inside]
        found.append((number, cut, begin, end))
    return found


def _steps_late(events: list[Event], passes: list[Event]) -> bool:
    """Whether some rank's optimizer runs for one step when the rank has begun with the passes of the next."""
    begun: dict[int, float] = {}
    for event in passes:
        begun[event.rank] = min(event.start, begun.get(event.rank, event.start))
    return any(e.kind == "STEP" and e.start > begun.get(e.rank, e.start) for e in events)


def _shared(events: Iterable[Event], rank: int, begin: float, end: float) -> list[Share]:
    """The moments of one rank between begin and end, shared out among its operations."""
    own = sorted((e for e in events if e.rank == rank), key=lambda e: (e.start, e.end))
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for event in own:
        seconds[event.name, event.kind] += 0.0  # also those that no moment belongs to
    moments = sorted({begin, end, *(e.start for e in own), *(e.end for e in own)})
    running: list[Event] = []
    following = 0
    for now, then in itertools.pairwise(moments):
        while following < len(own) and own[following].start <= now:
            running.append(own[following])
            following += 1
        running = [e for e in running if e.end > now]
        owner = _owner(running) or (own[following] if following < len(own) else None)
        seconds[(owner.name, owner.kind) if owner else (WAIT, WAIT)] += then - now
    return [Share(name, kind, rank, spent) for (name, kind), spent in seconds.items()]


def _owner(running: list[Event]) -> Event | None:
    """The operation that a moment belongs to: what computes, else the communication that is over first."""
    computing = [e for e in running if SPECS[Kind[e.kind]].lane is Lane.COMPUTE]
    return min(computing or running, key=lambda e: e.end, default=None)
