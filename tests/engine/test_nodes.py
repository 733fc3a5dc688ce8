"""Several nodes: clocks that differ, and runs whose nodes share nothing but a port."""

import doctest
import time

import pytest

from tests.engine import sleeping
from trainplan.bench.pool import pool
from trainplan.engine import clocks
from trainplan.engine.measurement import Measurement, together
from trainplan.plan.plan import plan

SHIFT = 3.7


def shifted(rank: int, world: int, seconds: float, *arguments) -> tuple[Measurement, clocks.Reading]:
    """Train where rank 1 is on a machine that was started so many seconds earlier."""
    clock = time.perf_counter
    if rank == 1:
        time.perf_counter = lambda: clock() + seconds
    try:
        return sleeping.train(rank, world, *arguments), clocks.read()
    finally:
        time.perf_counter = clock


@pytest.mark.parametrize("seconds", [0.0, SHIFT])
def test_events_of_two_clocks_are_brought_together(seconds: float) -> None:
    chosen = plan(pp=2, stages=(2,), micro=2, schedule="1f1b", blocks=4)
    ranks = pool(2).run(shifted, seconds, chosen, 4, 1, 3)
    reading = ranks[1][1]
    assert abs(reading.offset + seconds) <= reading.within < 0.05
    assert reading.offset == 0.0 or seconds  # one machine, one clock, exactly
    measured = [measurement for measurement, _ in ranks]
    within = measured[1].within
    assert measured[0].within == 0 < within
    result = together(measured, chosen, 1)
    # What causes something comes before it, however far the two clocks were apart.
    events = {event.name: event for event in result.timeline.events}
    for step in ("", "@1", "@2"):
        for micro in range(2):
            there, back = events[f"0SEND_F{micro}{step}"], events[f"1SEND_B{micro}{step}"]
            assert (
                events[f"0F{micro}{step}"].end <= there.start <= there.end <= events[f"1F{micro}{step}"].start + within
            )
            assert events[f"1B{micro}{step}"].end <= back.start <= back.end <= events[f"0B{micro}{step}"].start + within
            assert there.end - there.start < 0.05 + within
    assert result.timeline.duration == pytest.approx(sum(result.steady_seconds), abs=0.05)


def test_clocks_that_drift() -> None:
    """Rank 0's clock is 10 s ahead, and gains 100 µs every second: two readings are enough."""
    answers = [[(t, t + 0.002, 10 + (t + 0.001) * (1 + 1e-4))] for t in (100.0, 200.0)]
    readings = [clocks.nearest(several) for several in answers]
    for moment in (100.0, 130.0, 170.0, 200.0):
        assert clocks.aligned(moment, readings) == pytest.approx(10 + moment * (1 + 1e-4), abs=1e-6)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(clocks) == (0, 4)
