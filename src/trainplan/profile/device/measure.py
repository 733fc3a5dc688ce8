"""Measuring a device: microbenchmarks over a grid of shapes, within a given time, written down as it goes.

Every point is read beside a reference kernel until its readings agree, and what is kept is the median of the ratios, so
that a machine that slows down meanwhile does not bend the curves. The reference must be the same work all the time, in
one precision, and seen without its host; else it bends them itself. Nothing fails in silence: a point that raises is
recorded with its curve, a curve that raises twice is given up and named under `missing` with its error, and a device
that does not answer any more ends the measurement with what there is.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from trainplan.cluster import catalogue
from trainplan.cluster.measured import SLICED
from trainplan.errors import InputError, RunError
from trainplan.profile import machine
from trainplan.profile.device import issue, load
from trainplan.profile.device.families import ARITHMETIC, VARIANTS
from trainplan.profile.device.file import PART, STREAMS, TOLERANCE, Curve, DeviceFile, point
from trainplan.profile.device.grid import Case, cases
from trainplan.profile.device.kernels import arithmetic, work
from trainplan.profile.device.load import times
from trainplan.profile.device.model import looked_up
from trainplan.profile.reference import Reference
from trainplan.profile.timing import Clock, DeviceClock, Readings, Spent, clock_of
from trainplan.units import tflops

Progress = Callable[[str, float], None]
READINGS, MOST_READINGS = 2, 7  # of a point that is steady, and of one that is not
STEADY = 0.03  # the least and the most of its readings differ by no more
MOST_RESERVED = 2**34  # bytes that the allocator may keep from one shape to the next
USED = 0.8  # share of the time that points are measured in; loading libraries and the host's lane take the rest
WINDOW_S = {"cuda": 4e-4, "cpu": 1e-3}  # a reading is as many calls as take so long
MOST_CALLS = 20
LONGEST = 1 / 10_000  # of the time, that one call may take: larger shapes are left out
SAVED_EVERY_S = 20.0
LOOK_EVERY_S = 1.0
HOST_ROUNDS = 24  # readings of the host's lane, in the time that there is
STRIKES = 2  # errors after which a curve is given up
LOOKS = 3  # runs of the reference for one reading of it
MEANT = 2.0  # what takes longer than so many times the shortest kernel is slow because of its work
_ALIKE = {True: ARITHMETIC, False: tuple(family for family in VARIANTS if family not in ARITHMETIC)}


@dataclass
class Session:
    """A measurement that is going on."""

    device: torch.device
    minutes: float
    command: str
    started: float = field(default_factory=time.perf_counter)
    readings: Readings = field(default_factory=Readings)
    taken: dict[Case, None] = field(default_factory=dict)  # in the order of measuring
    rates: dict[str, float] = field(default_factory=dict)  # curve → the highest FLOP/s or bytes/s so far
    strikes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    host: issue.HostLane | None = None  # none where the host is the device
    sustained: dict[str, float] = field(default_factory=dict)
    warms_from: dict[str, float] = field(default_factory=dict)
    floor_s: float = float("inf")  # the shortest call so far
    skipped: int = 0
    dead: bool = False  # the device does not answer any more

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started


def measure(
    device: str | torch.device = "cpu",
    minutes: float = 5.0,
    output: str | Path | None = None,
    quick: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> DeviceFile:
    """Measure a device of this machine in at most so many minutes.

    `quick` is a handful of points, to see that it works. What was measured is there whatever happens: it is written
    while measuring, beside `output` (`part_of`), and becomes that in the end. A measurement that ended early takes no
    whole one's place.
    """
    if not 0.05 <= minutes <= 120:
        raise InputError(f"{minutes} minutes", "a measurement takes from 0.05 to 120 minutes", "5")
    at = machine.device_of(device)
    session = Session(at, minutes, command)
    say = progress or (lambda what, share: None)
    say("starting", 0.0)
    with machine.still(at), arithmetic(at) as choose, torch.enable_grad():
        reference, clock = Reference(at), clock_of(at)
        look = _looks(session, reference, clock, choose)
        look()
        read_host: Callable[[], None] = lambda: None  # noqa: E731
        if isinstance(clock, DeviceClock):
            read_host = _host_lane(session, clock)
            read_host()
            _under_load(session, clock, choose)
        every = cases(at.type, _precisions(at), quick)
        saved = looked = heard = session.elapsed
        pause = 60 * minutes / HOST_ROUNDS
        for number, case in enumerate(every):
            if session.dead or session.elapsed > 60 * minutes * (USED if _enough(session) else 1.0):
                session.skipped += len(every) - number
                break
            say(f"{case.at.family} {' × '.join(map(str, case.at.shape))}", number / len(every))
            _one(session, case, clock, choose)
            if not session.dead and session.elapsed - looked > LOOK_EVERY_S:
                look()
                looked = session.elapsed
            if not session.dead and session.elapsed - heard > pause:
                read_host()
                heard = session.elapsed
            if output is not None and session.elapsed - saved > SAVED_EVERY_S and _enough(session):
                assemble(session, whole=False).save(part_of(output))
                saved = session.elapsed
    if not _enough(session):
        why = "; ".join(f"{name}: {error}" for name, error in list(session.missing.items())[:3]) or "there was no time"
        raise RunError(f"measuring {at}", f"no product or no copy could be measured ({why})", "more --minutes")
    found = looked_up(assemble(session, whole=not session.dead))
    if output is not None:
        keep(found, output)
    say("done", 1.0)
    return found


def part_of(path: str | Path) -> Path:
    """Where a measurement is kept that is not over, or ended early.

    >>> part_of("devices/H200.json").name
    'H200.part.json'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}{PART}")


def keep(found: DeviceFile, path: str | Path) -> Path:
    """Keep a measurement that is over: at the path, or beside it if it ended early and what is there did not."""
    there = Path(path)
    if not found.whole and _is_whole(there):
        there = part_of(path)
    found.save(there)
    if there == Path(path):
        part_of(path).unlink(missing_ok=True)
    return there


def _is_whole(path: Path) -> bool:
    try:
        return path.is_file() and DeviceFile.load(path).whole
    except InputError:
        return False  # nothing that could be read is lost


# -- one point --------------------------------------------------------------------------------------------------------


def _one(session: Session, case: Case, clock: Clock, choose: Callable[[str], None]) -> None:
    """Measure a point; whatever goes wrong is noted with its curve."""
    name = case.curve
    if session.strikes.get(name, 0) >= STRIKES or _too_long(session, case):
        session.skipped += 1
        return
    try:
        choose(case.at.precision)
        _read(session, case, clock)
    except torch.OutOfMemoryError:
        session.skipped += 1
        gc.collect()  # which does not run by itself while measuring
    except Exception as error:
        session.strikes[name] = session.strikes.get(name, 0) + 1
        session.skipped += 1
        sizes = " × ".join(map(str, case.at.shape))
        session.missing[name] = f"{sizes}: {_first_line(error)}"
    if session.cuda:
        _settle(session)


def _looks(session: Session, reference: Reference, clock: Clock, choose: Callable[[str], None]) -> Callable[[], None]:
    """What takes a reading of the reference kernel, in the same precision whatever was measured before it."""

    def look() -> None:
        try:
            choose("tf32")
            session.readings.look(median(clock.time("reference", reference.run).run_s for _ in range(LOOKS)))
        except Exception as error:
            _give_up(session, error)

    return look


def _give_up(session: Session, error: Exception) -> None:
    session.dead = True
    session.missing["everything after"] = f"the device does not answer any more: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _settle(session: Session) -> None:
    """Let go of memory that only one shape needed; find out whether the device still answers."""
    try:
        torch.cuda.synchronize(session.device)
        if torch.cuda.memory_reserved(session.device) > MOST_RESERVED:
            gc.collect()
            torch.cuda.empty_cache()
    except Exception as error:  # after an error of the device every call fails
        _give_up(session, error)


def _read(session: Session, case: Case, clock: Clock) -> None:
    call = work(case.at, session.device, _cache_bytes(session.device))
    first = clock.time((case, 1), call).run_s
    window = WINDOW_S[session.device.type]
    count = max(1, min(MOST_CALLS, int(window / max(first, 1e-7))))
    if count > 1:
        clock.time((case, count), times(call, count))  # tells the clock how long issuing takes
    while not _agreed(session.readings, case):
        spent = clock.time((case, count), times(call, count))
        if spent.run_s <= 0:
            raise RuntimeError(f"the clock shows no time for {count} calls")
        session.readings.note(case, Spent(spent.run_s / count, spent.issue_s / count))
    session.taken[case] = None
    taken = session.readings.last(case)
    session.floor_s = min(session.floor_s, taken)
    if taken > MEANT * session.floor_s:  # else it says nothing of how fast larger ones are
        rate = (case.at.flops or case.at.bytes) / (taken - session.floor_s)
        session.rates[case.curve] = max(rate, session.rates.get(case.curve, 0.0))


def _agreed(readings: Readings, case: Case) -> bool:
    """Whether there are readings enough: as soon as they agree, or there are many."""
    count = readings.count(case)
    return count >= MOST_READINGS or (count >= READINGS and readings.range(case) < STEADY)


def _too_long(session: Session, case: Case) -> bool:
    """Whether one call would take more than its share of the time, by the best that its curve has shown.

    Of a curve with none but the smallest points so far nothing is known, and the data sheet of no device is asked: the
    rate of the fastest curve with the same kind of work stands for it.
    """
    work = case.at.flops or case.at.bytes
    alike = [rate for name, rate in session.rates.items() if name.split(".")[0] in _ALIKE[bool(case.at.flops)]]
    rate = session.rates.get(case.curve) or max(alike, default=0.0)
    return rate > 0 and work / rate > 60 * session.minutes * LONGEST


def _host_lane(session: Session, clock: DeviceClock) -> Callable[[], None]:
    """What takes a round of the host's lane; where that fails, it is said once, and not tried again."""
    lane = issue.Lane(session.device, lambda: torch.cuda.synchronize(session.device), clock.hold)
    session.host = issue.HostLane(lane)

    def read() -> None:
        if session.host is None or "host" in session.missing:
            return
        collects = gc.isenabled()
        gc.enable()  # as in training
        try:
            session.host.read()
        except Exception as error:
            session.missing["host"] = _first_line(error)
        finally:
            if not collects:
                gc.disable()
        _settle(session)

    return read


def _under_load(session: Session, clock: DeviceClock, choose: Callable[[str], None]) -> None:
    """What is left of the rate of products when they go on for long, in every precision."""
    for precision in _precisions(session.device):
        try:
            choose(precision)
            found = load.under_load(precision, session.device, _cache_bytes(session.device), clock)
            session.sustained[precision], session.warms_from[precision] = found
        except Exception as error:
            session.missing[f"sustained.{precision}"] = _first_line(error)
    _settle(session)


# -- the file ---------------------------------------------------------------------------------------------------------


def _enough(session: Session) -> bool:
    """Whether there is at least a ceiling, and a memory rate."""
    done = {(case.at.family, case.at.variant) for case in session.taken}
    return any(family == "product" for family, _ in done) and not done.isdisjoint(STREAMS)


def assemble(session: Session, whole: bool) -> DeviceFile:
    """The file of what has been measured so far."""
    readings = session.readings
    seconds = {case: readings.run_s(case) for case in session.taken}
    ceiling: dict[str, float] = {}
    streams: list[tuple[float, float]] = []
    for case, taken in seconds.items():
        if case.at.family == "product":
            ceiling[case.at.precision] = max(case.at.flops / taken, ceiling.get(case.at.precision, 0.0))
        if (case.at.family, case.at.variant) in STREAMS:
            streams.append((case.at.bytes, case.at.bytes / taken))
    name = machine.name_of(session.device)
    sheet = catalogue.device(name) if session.cuda and catalogue.has("device", name) else None
    missing = session.missing | (session.host.missing if session.host else {})
    peak = dict(sheet.flops) if sheet else {}
    for precision in [p for p in peak if ceiling.get(p, 0.0) > peak[p] * TOLERANCE]:
        missing[f"peak.{precision}"] = f"the catalogue's {tflops(peak.pop(precision))} is below what was measured"
    large = max(size for size, _ in streams) / 4
    memory_rate = max(rate for size, rate in streams if size >= large)
    low, middle, high = quantiles(readings.references, n=4) if len(readings.references) > 2 else (0.0, 1.0, 0.0)
    return DeviceFile(
        device=name,
        machine=_words(session.device),
        made=machine.now(),
        command=session.command,
        versions=machine.versions() | ({"cuda": str(torch.version.cuda)} if session.cuda else {}),
        seconds=round(session.elapsed, 1),
        noise=round(median(readings.range(case) for case in session.taken), 4),
        drift=round((high - low) / middle, 4),
        processors=_processors(session.device),
        cache_bytes=_cache_bytes(session.device),
        peak=peak,
        memory_peak=sheet.memory_rate if sheet and memory_rate <= sheet.memory_rate * TOLERANCE else 0.0,
        ceiling=ceiling,
        memory_rate=memory_rate,
        floor_s=min(seconds.values()),
        host=session.host.issue if session.host else {},
        update_op_s=session.host.updates.op_s if session.host else 0.0,
        update_tensor_s=session.host.updates.tensor_s if session.host else 0.0,
        curves=_curves(seconds, check=False),
        checks=_curves(seconds, check=True),
        missing=missing,
        sustained=dict(session.sustained),
        warms_from=dict(session.warms_from),
        host_rounds=session.host.rounds if session.host else 0,
        host_spread=round(session.host.spread, 4) if session.host else 0.0,
        skipped=session.skipped,
        whole=whole,
        capability=torch.cuda.get_device_capability(session.device) if session.cuda else (0, 0),
    )


def _curves(seconds: dict[Case, float], check: bool) -> tuple[Curve, ...]:
    found: dict[tuple[str, str, str], list[tuple[tuple[int, ...], float]]] = {}
    for case, taken in seconds.items():
        if case.check == check:
            key = (case.at.family, case.at.variant, case.at.precision)
            found.setdefault(key, []).append((case.at.shape, taken))
    return tuple(
        Curve(*key, points=tuple(point(shape, taken) for shape, taken in sorted(points)))
        for key, points in sorted(found.items())
    )


# -- the device -------------------------------------------------------------------------------------------------------


def _precisions(device: torch.device) -> tuple[str, ...]:
    """Those that it has units for, the most telling first."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    major = torch.cuda.get_device_capability(device)[0]
    return ("bf16", "tf32", "fp32", "fp16") if major >= 8 else ("fp16", "fp32") if major == 7 else ("fp32",)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _cache_bytes(device: torch.device) -> int:
    """The largest cache: what is larger comes from memory."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(getattr(properties, "L2_cache_size", 0))
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        sizes.append(int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1))
    return max(sizes, default=0)


def _words(device: torch.device) -> str:
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") if device.type == "cuda" else None
    return machine.describe(device) + (f", a slice of {share} % {SLICED}" if share else "")
