"""Chrome trace files, for ui.perfetto.dev or chrome://tracing: all ranks in one file, on one clock.

One process a rank and source, so that predicted and measured stand side by side; one row for computation, and as many
for messages and collectives as go on at once.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.timeline import Event, Timeline

_SOURCES = ("predicted", "measured")
_ROWS = {Lane.COMPUTE: "compute", Lane.LINK: "messages", Lane.GROUP: "collectives", Lane.COPY_IN: "loads"}
_SLOTS = 100  # rows of one kind that may be open at once


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace of one or several timelines, as what `json` can print."""
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        begin = min((e.start for e in timeline.events), default=0.0)
        for rank in range(timeline.world):
            process = 2 * rank + _SOURCES.index(timeline.source)
            events.append(_meta(process, "process_name", name=f"rank {rank} {timeline.source}"))
            events.append(_meta(process, "process_sort_index", sort_index=process))
            events += _rank(timeline.of_rank(rank), process, begin)
    titles = {timeline.source: timeline.title for timeline in timelines}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": titles}


def write(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write a trace; packed where the name ends in .gz."""
    path = Path(path)
    text = json.dumps(trace(timelines))
    if path.suffix != ".gz":
        files.write_text(path, text)
        return
    with files.whole(path) as partial:
        partial.write_bytes(gzip.compress(text.encode()))


def _meta(process: int, what: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "name": what, "args": args}


def _rank(events: list[Event], process: int, begin: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    free: dict[int, float] = {}  # row → when its last event ends
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        spec = SPECS[Kind[event.kind]]
        lane = spec.lane if spec.lane in _ROWS else Lane.LINK
        rows = range(_SLOTS * lane, _SLOTS * (lane + 1))
        row = next((r for r in rows if free.get(r, begin) <= event.start), rows[-1])
        if row not in free:
            name = _ROWS[lane] + (f" {row % _SLOTS + 1}" if row % _SLOTS else "")
            found.append({"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": name}})
        free[row] = event.end
        found.append(
            {
                "ph": "X", "pid": process, "tid": row, "name": event.name, "cat": spec.what,
                "ts": (event.start - begin) * 1e6, "dur": (event.end - event.start) * 1e6,
                "args": {"kind": event.kind, "bytes": event.bytes},
            }
        )  # fmt: skip
    return found
