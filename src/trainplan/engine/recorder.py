"""The measured timeline of one rank: when each operation of the program started and ended.

A message has two ends: its sender notes when it was posted, its receiver when it arrived. Likewise every member of a
collective notes when it came, and it starts when the last one comes. `measurement.merge` puts the halves together.

A moment is a number of seconds by this machine's clock; the events are by rank 0's (`clocks.py`). On a GPU, which works
behind the host's back, a moment of compute is a CUDA event, and becomes a number once the step is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from trainplan.engine.clocks import Reading, aligned, now, read
from trainplan.program.program import Program
from trainplan.program.text import Key, name
from trainplan.program.timeline import Event

Moment = float | torch.cuda.Event


@dataclass
class Recorder:
    """Collects (step, operation, start, end, bytes) while it is on."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on: bool = False
    alone: bool = False  # ranks do not wait for each other, so they compare no clocks: all are on one machine
    step: int = 0
    rows: list[tuple[int, int | Key, float, float, int]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # of rank 0's clock
    arrived: list[tuple[int, int, float]] = field(default_factory=list)  # (step, SEND of another rank, moment)
    _unsettled: deque[tuple[int, int | Key, Moment, Moment, int]] = field(default_factory=deque)
    _arriving: list[tuple[int, Moment]] = field(default_factory=list)
    _base: tuple[float, torch.cuda.Event] | None = None

    def switch(self, on: bool) -> None:
        """Record from now on, or no longer; all ranks call this, since they compare their clocks."""
        self.on = on
        if not self.alone:
            self.readings.append(read())

    @property
    def within(self) -> float:
        """How far off rank 0's clock our events may be: half a round trip."""
        return max((reading.within for reading in self.readings), default=0.0)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step = step
        if self.on and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # on others the next batch may be on its way
            self._base = now(), self._event()

    def mark(self) -> Moment:
        """This moment, as compute sees it."""
        return self._event() if self._base is not None else now()

    def note(self, op: int | Key, start: Moment, end: Moment, size: int = 0, step: int | None = None) -> None:
        """An operation ran from one moment to another, and moved so many bytes; of the current step, or of another.
        One that was decided while running has no number, but a key."""
        if self.on:
            self._unsettled.append((self.step if step is None else step, op, start, end, size))

    def note_arrival(self, send: int, moment: Moment) -> None:
        """The message that another rank's SEND put on its way is here."""
        if self.on:
            self._arriving.append((send, moment))

    def settle(self) -> None:
        """The step is over, and so is the device's work: turn events into numbers."""
        while self._unsettled:  # a thread may note more meanwhile
            step, op, start, end, size = self._unsettled.popleft()
            self.rows.append((step, op, self._seconds(start), self._seconds(end), size))
        for send, moment in self._arriving:
            self.arrived.append((self.step, send, self._seconds(moment)))
        self._arriving, self._base = [], None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._base is not None  # events are made only after it
        return self._base[0] + self._base[1].elapsed_time(moment) / 1e3

    @property
    def first(self) -> int:
        """The first step that was recorded."""
        return min((row[0] for row in self.rows), default=0)

    def events(self, program: Program, rank: int, first_step: int) -> list[Event]:
        """What was noted, as events by rank 0's clock; steps count from `first_step`."""
        found = []
        for step, op, start, end, size in self.rows:
            key = op if isinstance(op, Key) else program.op(op).key
            begun, over = aligned(start, self.readings), aligned(end, self.readings)
            found.append(Event(name(replace(key, step=step - first_step)), key.kind.name, rank, begun, over, size))
        return found

    def arrivals(self, program: Program) -> dict[str, float]:
        """When messages arrived here, by rank 0's clock and by the names of the operations that sent them."""
        return {
            _name(program, send, step - self.first): aligned(moment, self.readings)
            for step, send, moment in self.arrived
        }


def _name(program: Program, op: int, step: int) -> str:
    return f"{program.name(op)}@{step}" if step > 0 else program.name(op)
