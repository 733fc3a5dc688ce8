"""Clocks, and what to make of many noisy readings.

A piece of work has two times: *run*, on the device, and *issue*, of the host that calls. On a CPU the host is the
device: the work takes what the call takes, and issuing takes nothing beside. The seconds there are those that the
thread has had a core, so that other processes on the machine do not count; alone on its core they are the same.

On a GPU the host only queues kernels. If the device is faster than the host, it idles between kernels, and the time
between two events is the host's, not the device's. So the device is first given something else to do (a kernel that
only waits), long enough for the host to queue everything; what the events then show is the device alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

MOST_HEAD_START_S = 0.05  # the device waits no longer than this; longer work keeps it busy anyhow


@dataclass(frozen=True)
class Spent:
    """Seconds of a piece of work."""

    run_s: float
    issue_s: float


class HostClock:
    """Times work that the calling thread does itself."""

    def host(self) -> float:
        """Seconds of the host since some moment."""
        return time.thread_time()

    elapsed = host  # for budgets

    def time(self, what: Hashable, work: Callable[[], object]) -> Spent:
        start = time.thread_time()
        work()
        return Spent(time.thread_time() - start, 0.0)

    def whole(self, work: Callable[[], object]) -> float:
        """Seconds from an idle device to an idle device: what a user would see."""
        return self.time("", work).run_s

    def now(self) -> Callable[[], float]:
        """A moment; called later, it gives its seconds on some axis."""
        moment = time.thread_time()
        return lambda: moment


class DeviceClock:
    """Times work that the calling thread issues to a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._issued: dict[Hashable, float] = {}  # seconds that issuing this took last time
        self._zero = self._event()
        self._cycles_per_s = 1e9
        for cycles in (10**6, 10**7):  # the first call also loads the kernel
            begin = self._event()
            torch.cuda._sleep(cycles)
            end = self._event()
            end.synchronize()
            self._cycles_per_s = cycles / (begin.elapsed_time(end) / 1e3)

    def host(self) -> float:
        """Seconds of the host since some moment."""
        return time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since some moment, for budgets."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, what: Hashable, work: Callable[[], object]) -> Spent:
        """Seconds of `work`, which goes by the name `what`: the second time it is known how long issuing takes."""
        torch.cuda.synchronize(self.device)
        head_start = self._issued.get(what)
        if head_start is not None:
            self.hold(min(1.5 * head_start + 1e-4, MOST_HEAD_START_S))
        begin = self._event()
        start = time.perf_counter()
        work()
        issued = time.perf_counter() - start
        end = self._event()
        end.synchronize()
        self._issued[what] = issued
        return Spent(begin.elapsed_time(end) / 1e3, issued)

    def hold(self, seconds: float) -> None:
        """Keep the device busy for so long, doing nothing."""
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def whole(self, work: Callable[[], object]) -> float:
        """Seconds from an idle device to an idle device: what a user would see."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def now(self) -> Callable[[], float]:
        event = self._event()
        return lambda: self._zero.elapsed_time(event) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.device):
            event.record()
        return event


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


WINDOW = 3  # readings of the reference before a timing, and as many after it, that say how fast the machine was


@dataclass
class Readings:
    """Timings of many things, taken in turns with readings of the reference kernel.

    What a thing takes is the median of its ratios to the reference, times the median of the reference: a machine that
    runs at half speed for a while slows both down, and the ratio stays. A single reading of the reference is itself
    noisy, so a timing is held against the median of those around it.

    >>> readings = Readings()
    >>> for speed in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0):
    ...     readings.look(0.1 / speed)
    ...     readings.note("step", Spent(3.0 / speed, 0.0))
    >>> round(readings.run_s("step") / readings.reference_s, 1)
    30.0
    """

    references: list[float] = field(default_factory=list)
    taken: dict[Hashable, list[tuple[Spent, int]]] = field(default_factory=dict)  # with its place among the references

    def look(self, reference_s: float) -> None:
        """A reading of the reference."""
        self.references.append(reference_s)

    def note(self, what: Hashable, spent: Spent) -> None:
        """A timing taken after the last look and before the next."""
        self.taken.setdefault(what, []).append((spent, len(self.references)))

    @property
    def reference_s(self) -> float:
        return statistics.median(self.references) if self.references else 0.0

    def ratios(self, what: Hashable) -> list[float]:
        """The timings of a thing, in units of the reference."""
        return [
            spent.run_s / statistics.median(self.references[max(0, place - WINDOW) : place + WINDOW])
            for spent, place in self.taken.get(what, ())
        ]

    def run_s(self, what: Hashable) -> float:
        return statistics.median(self.ratios(what)) * self.reference_s

    def issue_s(self, what: Hashable) -> float:
        # The reference runs on the device, so it says nothing about the host's speed.
        return statistics.median(spent.issue_s for spent, _ in self.taken[what])

    def count(self, what: Hashable) -> int:
        return len(self.taken.get(what, ()))

    def last(self, what: Hashable) -> float:
        """The latest timing of a thing, as it was read."""
        return self.taken[what][-1][0].run_s

    def range(self, what: Hashable) -> float:
        """The most over the least of its timings, less one."""
        runs = [spent.run_s for spent, _ in self.taken[what]]
        return max(runs) / min(runs) - 1

    def spread(self, what: Hashable) -> float:
        """Interquartile range of the ratios over their median; 0 for fewer than three."""
        ratios = self.ratios(what)
        middle = statistics.median(ratios) if ratios else 0.0
        if len(ratios) < 3 or middle <= 0:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / middle
