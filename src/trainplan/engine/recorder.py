"""The measured timeline of one rank: when each operation of the program started and ended.

A moment is a number of seconds of the system's monotonic clock, which all processes of a machine share (the clocks of
several machines are not brought together yet). On a GPU, which works behind the host's back, a moment of compute is a
CUDA event, and becomes a number once the step is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from trainplan.program.program import Program
from trainplan.program.timeline import Event

now = time.perf_counter
Moment = float | torch.cuda.Event


@dataclass
class Recorder:
    """Collects (step, operation, start, end, bytes) while it is on."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on: bool = False
    step: int = 0
    rows: list[tuple[int, int, float, float, int]] = field(default_factory=list)
    _unsettled: list[tuple[int, Moment, Moment, int]] = field(default_factory=list)
    _base: tuple[float, torch.cuda.Event] | None = None

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step = step
        if self.on and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._base = now(), self._event()

    def mark(self) -> Moment:
        """This moment, as compute sees it."""
        return self._event() if self._base is not None else now()

    def note(self, op: int, start: Moment, end: Moment, size: int = 0) -> None:
        """An operation ran from one moment to another, and moved so many bytes."""
        if self.on:
            self._unsettled.append((op, start, end, size))

    def settle(self) -> None:
        """The step is over, and so is the device's work: turn events into numbers."""
        for op, start, end, size in self._unsettled:
            self.rows.append((self.step, op, self._seconds(start), self._seconds(end), size))
        self._unsettled, self._base = [], None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._base is not None  # events are made only after it
        return self._base[0] + self._base[1].elapsed_time(moment) / 1e3

    def events(self, program: Program, rank: int, first_step: int) -> list[Event]:
        """What was noted, as events; steps count from `first_step`."""
        found = []
        for step, op, start, end, size in self.rows:
            key = program.op(op)
            name = f"{key}@{step - first_step}" if step > first_step else str(key)
            found.append(Event(name, key.key.kind.name, rank, start, end, size))
        return found
