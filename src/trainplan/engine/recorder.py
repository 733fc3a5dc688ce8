"""The measured timeline of one rank: when each operation of the program started and ended.

The clock is the system's monotonic one, which all processes of a machine share; for several machines `Recorder.offset`
shifts it to that of rank 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trainplan.program.program import Program
from trainplan.program.timeline import Event

now = time.perf_counter


@dataclass
class Recorder:
    """Collects (step, operation, start, end) while it is on."""

    on: bool = False
    offset: float = 0.0
    step: int = 0
    rows: list[tuple[int, int, float, float]] = field(default_factory=list)

    def note(self, op: int, start: float, end: float) -> None:
        if self.on:
            self.rows.append((self.step, op, start, end))

    def events(self, program: Program, rank: int, first_step: int) -> list[Event]:
        """What was noted, as events; steps count from `first_step`."""
        found = []
        for step, op, start, end in self.rows:
            key = program.op(op)
            name = f"{key}@{step - first_step}" if step > first_step else str(key)
            found.append(
                Event(name, key.key.kind.name, rank, start + self.offset, end + self.offset, int(program.bytes[op]))
            )
        return found
