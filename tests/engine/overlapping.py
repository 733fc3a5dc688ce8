"""How much of every load went on while the step before computed."""

from collections.abc import Sequence

from trainplan.program.text import parse
from trainplan.program.timeline import Event


def hidden(events: Sequence[Event]) -> list[float]:
    """The share of each load of a timeline but those of its first step, which were made before it."""
    found = []
    for load in (event for event in events if event.kind == "LOAD" and parse(event.name).step):
        before = [
            e for e in events
            if e.kind in ("F", "B") and e.rank == load.rank and parse(e.name).step == parse(load.name).step - 1
        ]  # fmt: skip
        shared = sum(max(0.0, min(e.end, load.end) - max(e.start, load.start)) for e in before)
        found.append(shared / (load.end - load.start))
    return found
