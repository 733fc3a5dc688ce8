"""What is left of a device's rate when it works for long: power and heat bring its clocks down.

A single call is as fast as a cold device is, and so are the points of the curves, between which it rests. Nothing is
lost either while its units are busy for a part of the time only, as in most training: two products are timed, one that
runs again and again, and one that takes turns with copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from trainplan.profile.device.families import place
from trainplan.profile.device.kernels import work
from trainplan.profile.timing import DeviceClock

LOADED_S = 1.0  # for how long a device is kept at its ceiling, and again with copies in between
RESTED_S = 0.2  # and for how long it rests before
LOADED = (1, 8192, 8192, 8192)  # the product
COPIED = 2**29  # bytes of a copy
READINGS = 4


def under_load(precision: str, device: torch.device, cache_bytes: int, clock: DeviceClock) -> tuple[float, float]:
    """(share of its rate that is left, share of its rate up to which nothing is lost) of a large product."""
    call = work(place("product", "nt", precision, LOADED), device, cache_bytes)
    copy = work(place("copy", "contiguous", "fp32", (COPIED,)), device, cache_bytes)

    def last(what: str, call: Callable[[], object], count: int) -> float:
        """Seconds of a call at the end of many."""
        readings = [clock.time((what, precision, count), times(call, count)).run_s / count for _ in range(READINGS)]
        return readings[-1]

    last("cold", call, 1)
    time.sleep(RESTED_S)
    cold = clock.time(("cold", precision, 1), call).run_s
    count = max(1, int(LOADED_S / READINGS / cold))
    hot = last("hot", call, count)
    rest = last("copy", copy, 1)
    turns = max(1, round(cold / rest))
    warm = last("warm", _both(call, times(copy, turns)), count) - turns * rest
    return round(min(1.0, cold / hot), 4), warms_from(cold, hot, warm, turns * rest)


def times(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A call, so many times."""

    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def _both(one: Callable[[], object], other: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        one()
        other()

    return both


def warms_from(cold: float, hot: float, warm: float, rest: float) -> float:
    """The share of the highest rate up to which nothing is lost.

    Of seconds of a product on a cold device, again and again, and in turns with something else that takes `rest`. What
    is lost goes by a straight line from nothing to all.

    >>> warms_from(1.0, 1.2, 1.04, 1.0)  # busy half of the time, it loses a fifth: (0.5 − 0.2) / (1 − 0.2)
    0.375
    """
    if hot <= cold:
        return 0.0
    use, lost = cold / (cold + rest), min(0.99, max(0.0, (warm - cold) / (hot - cold)))
    return round(min(0.95, max(0.0, (use - lost) / (1 - lost))), 4)
