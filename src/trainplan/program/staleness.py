"""Who may go on: the rule of an asynchronous parameter server, the same for the clock and for the engine.

A worker computes gradients, *pushes* them, and goes on with the weights that the server then gives it. The server
applies each push by itself, in the order of arrival; what the rule decides is when the worker is *released*, that is,
given weights. A worker's clock is the number of its pushes, its lead how far that is ahead of the slowest worker's.

    ps-asp          at once: the bound has no end
    ssp   s         when its lead is at most s (Petuum): nobody starts more than s steps ahead of the slowest
    dssp  s_L, s_U  when its lead is at most s_L; but the fastest may go on for up to s_U, if the server expects the
                    slowest to push by then, judging by the last two pushes of both

So one function with two numbers is all three: ssp is dssp with s_L = s_U, and ps-asp is ssp without end. With s = 0
everybody waits for everybody, and a round of pushes is a step with the sum of the gradients.

The state of a server is arrays with an entry for each worker, so that compiled code can keep it too:

>>> server = State(workers=2)
>>> [server.push(0, 1.0, (1, 1)), server.push(0, 2.0, (1, 1))]   # the second push of worker 0: it is two ahead
[[0], []]
>>> server.push(1, 3.0, (1, 1))                                 # worker 1 goes on, and worker 0 is only one ahead now
[0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_END = 2**40  # a bound that nobody reaches
UNKNOWN = -1.0  # a moment that has not been
Bound = tuple[int, int]
# The bounds with which rules are studied (`study/staleness.py`), and compared by time to an accuracy (`search/`).
STUDIED: dict[str, tuple[int, ...]] = {"ssp": (2,), "dssp": (1, 3), "ps-asp": ()}


def bound_of(exchange: str, bound: tuple[int, ...]) -> Bound:
    """The two numbers of an exchange.

    >>> bound_of("ssp", (2,)), bound_of("dssp", (1, 4)), bound_of("ps-asp", ()) == (NO_END, NO_END)
    ((2, 2), (1, 4), True)
    """
    return (bound[0], bound[-1]) if bound else (NO_END, NO_END)


def step_seconds(pushes: Sequence[Floats]) -> float:
    """The time in which workers push as often as they are many, from the moments at which each one's pushes were
    applied: while all of them are still at work, and without the first quarter, in which nobody has waited yet.

    >>> step_seconds([np.arange(1.0, 9.0), np.arange(2.0, 10.0, 2.0)])       # 1 and ½ a second: 2 in 4/3 seconds
    1.3333333333333333
    """
    moments = [np.sort(own) for own in pushes]
    until = min(own[-1] for own in moments)
    rates = []
    for own in moments:
        while_all = own[(own <= until) & (np.arange(len(own)) >= len(own) // 4)]
        own = while_all if len(while_all) > 1 else own
        rates.append((len(own) - 1) / (own[-1] - own[0]) if own[-1] > own[0] else np.inf)
    return float(len(moments) / sum(rates))


class State:
    """What a server knows of its workers."""

    def __init__(self, workers: int) -> None:
        self.clock = np.zeros(workers, np.int64)
        self.last = np.full(workers, UNKNOWN)  # moment of the last push
        self.before = np.full(workers, UNKNOWN)  # of the one before it
        self.credit = np.zeros(workers, np.int64)  # pushes after which it is released whatever its lead
        self.waiting = np.zeros(workers, np.bool_)
        self.alive = np.ones(workers, np.bool_)

    def push(self, worker: int, moment: float, bound: Bound) -> list[int]:
        """A push was applied: the workers that are released by it, in the order of their ranks."""
        released = pushed(
            *bound, worker, moment, self.clock, self.last, self.before, self.credit, self.waiting, self.alive
        )  # fmt: skip
        return [int(found) for found in np.flatnonzero(released)]

    def lose(self, worker: int, bound: Bound) -> list[int]:
        """A worker is gone, and nobody waits for it any longer: the workers that are released by that."""
        self.alive[worker] = self.waiting[worker] = False
        return [int(found) for found in np.flatnonzero(_catch_up(bound[0], self.clock, self.waiting, self.alive))]


@njit(cache=True)
def pushed(
    lower: int, upper: int, worker: int, moment: float, clock: Ints, last: Floats, before: Floats, credit: Ints,
    waiting: Bools, alive: Bools,
) -> Bools:  # fmt: skip
    """Take a push into the state; who is released by it."""
    clock[worker] += 1
    before[worker], last[worker] = last[worker], moment
    waiting[worker] = True
    lead = clock[worker] - _slowest(clock, alive)[1]
    if credit[worker] == 0 and lead > lower and clock[worker] == clock[alive].max():
        credit[worker] = extra(lower, upper, worker, clock, last, before, alive)
    released = np.zeros(len(clock), np.bool_)
    if credit[worker] > 0:
        credit[worker] -= 1
        waiting[worker], released[worker] = False, True
    return released | _catch_up(lower, clock, waiting, alive)


@njit(cache=True)
def _catch_up(lower: int, clock: Ints, waiting: Bools, alive: Bools) -> Bools:
    """Release everybody who waits and leads by no more than the lower bound."""
    released = waiting & (clock - _slowest(clock, alive)[1] <= lower)
    waiting[released] = False
    return released


@njit(cache=True)
def _slowest(clock: Ints, alive: Bools) -> tuple[int, int]:
    """The worker with the fewest pushes (of several the first), and how many they are."""
    found = -1
    for worker in range(len(clock)):
        if alive[worker] and (found < 0 or clock[worker] < clock[found]):
            found = worker
    return found, clock[found] if found >= 0 else 0


@njit(cache=True)
def extra(
    lower: int, upper: int, worker: int, clock: Ints, last: Floats, before: Floats, alive: Bools
) -> int:  # fmt: skip
    """How many more steps the fastest worker should do, so that it then waits least for a push of the slowest.

    DSSP's controller: both are expected to go on at the pace of their last two pushes. The smallest number, where
    several are as good; 0 where a pace is not known yet.
    """
    other, fewest = _slowest(clock, alive)
    if before[worker] < 0 or before[other] < 0:
        return 0
    own, others = last[worker] - before[worker], last[other] - before[other]
    best, least = 0, np.inf
    for more in range(upper - (clock[worker] - fewest) + 2):
        for further in range(upper - lower + 1):
            apart = abs(last[worker] + more * own - (last[other] + (further + 1) * others))
            if apart < least:
                best, least = more, apart
    return best
