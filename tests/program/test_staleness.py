"""Who may go on at an asynchronous parameter server: worked sequences, and bounds over thousands of random runs."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from trainplan.plan.keys import deal, idle
from trainplan.program.staleness import NO_END, Bound, State

GOALS, RATE = (1.0, 3.0), 0.25  # worker p minimises ½(w − GOALS[p])²


@dataclass
class Run:
    """Workers that take so long for a step, and one server; what happened."""

    bound: Bound
    workers: int
    pushes: list[tuple[float, int, float]] = field(default_factory=list)  # moment, worker, weight afterwards
    staleness: list[int] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)  # of workers when they start a step


def simulate(bound: Bound, seconds: Callable[[int], float], workers: int, pushes: int) -> Run:
    run, state, weight = Run(bound, workers), State(workers), 0.0
    pulled = [(0.0, 0)] * workers
    queue = [(seconds(worker), worker) for worker in range(workers)]
    heapq.heapify(queue)
    while queue and len(run.pushes) < pushes:
        moment, worker = heapq.heappop(queue)
        seen, version = pulled[worker]
        weight -= RATE * (seen - GOALS[worker % 2])
        run.staleness.append(len(run.pushes) - version)
        run.pushes.append((moment, worker, weight))
        for released in state.push(worker, moment, bound):
            pulled[released] = (weight, len(run.pushes))
            run.leads.append(int(state.clock[released] - state.clock.min()))
            heapq.heappush(queue, (moment + seconds(released), released))
    assert len(run.pushes) == pushes, "nobody may go on"
    return run


def text(run: Run) -> str:
    """As the worked answers have it: moment, worker, weight."""
    return " ".join(f"{moment:g}{'AB'[worker]}{weight:.10g}" for moment, worker, weight in run.pushes)


@pytest.mark.parametrize(
    ("key", "bound", "seconds", "want"),
    [
        ("ssp", (0, 0), (1, 3), "1A0.25 3B1 4A1 6B1.5 7A1.375 9B1.75"),
        (
            "ssp", (1, 1), (1, 3),
            "1A0.25 2A0.4375 3B1.1875 4A1.140625 6B1.59375 7A1.4453125 9B1.796875 10A1.59765625",
        ),
        (
            "ssp", (2, 2), (1, 3),
            "1A0.25 2A0.4375 3A0.578125 3B1.328125 4A1.24609375 6B1.6640625 7A1.498046875 9B1.83203125",
        ),
        (
            "ps-asp", (NO_END, NO_END), (1, 3),
            ("1A0.25 2A0.4375 3A0.578125 3B1.328125 4A1.43359375 5A1.325195312 6A1.243896484 6B1.661865234 "
            "7A1.600891113"),
        ),
        (
            "dssp", (1, 4), (1, 2.5),
            (
                "1A0.25 2A0.4375 2.5B1.1875 3.5A1.140625 5B1.59375 6A1.4453125 7A1.333984375 7.5B1.685546875 "
                "10B2.014160156 11A1.760620117 12A1.570465088 12.5B1.816925049"
            ),
        ),
    ],
)  # fmt: skip
def test_timed_sequences(key: str, bound: Bound, seconds: tuple[float, float], want: str) -> None:
    """Two workers, one of them slower: when each pushes, and what the weight is then, worked out by hand."""
    assert text(simulate(bound, lambda worker: seconds[worker], 2, want.count(" ") + 1)) == want


def test_bounds_hold_in_random_runs() -> None:
    """3,000 runs of 2 to 4 workers at random speeds: nobody starts with a lead beyond the bound, and a push lacks at
    most (W − 1)(2s + 1) updates under ssp. Both bounds are reached."""
    draw = random.Random(5)
    reached, furthest = set(), set()
    for number in range(3000):
        workers, lower = draw.randint(2, 4), draw.randint(0, 2)
        upper = lower + (draw.randint(1, 3) if number % 2 else 0)
        pace = [draw.choice((1.0, 1.0, 3.0, 9.0)) for _ in range(workers)]

        def seconds(worker: int, pace: list[float] = pace) -> float:
            return draw.choice((1, 1, 2, 20)) * pace[worker] * (0.5 + draw.random())

        run = simulate((lower, upper), seconds, workers, 30)
        assert max(run.leads) <= upper
        furthest.add(max(run.leads) - upper)
        if lower == upper:
            assert max(run.staleness) <= (workers - 1) * (2 * lower + 1)
            reached.add((workers - 1) * (2 * lower + 1) - max(run.staleness))
    assert 0 in reached
    assert 0 in furthest


def test_whoever_is_gone_keeps_nobody() -> None:
    """A worker that dies blocks the others at the bound no longer."""
    state, bound = State(3), (1, 1)
    assert [state.push(0, t, bound) for t in (1.0, 2.0)] == [[0], []]
    assert state.push(1, 3.0, bound) == [1]
    assert state.lose(2, bound) == [0]
    assert state.push(0, 4.0, bound) == []  # worker 1 is two behind
    assert state.lose(1, bound) == [0]


def test_large_parameters_load_all_servers_alike() -> None:
    sizes = [("head", 1_000_003), ("weight", 999_999), ("bias", 10), ("scale", 10)]
    pieces = deal(sizes, servers=3)
    assert [(str(p), p.server) for p in pieces] == [
        ("head[0:333334]", 0), ("head[333334:666669]", 1), ("head[666669:1000003]", 2),
        ("weight", 9973 % 3), ("bias", 2 * 9973 % 3), ("scale", 3 * 9973 % 3),
    ]  # fmt: skip
    assert sum(piece.count for piece in pieces) == sum(count for _, count in sizes)
    # One server has everything whole; as many servers as parameters have one each.
    assert all(piece.whole and piece.server == 0 for piece in deal(sizes, servers=1))
    assert idle(deal(sizes, servers=4, split=10**9), servers=4) == []
    assert idle(deal(sizes, servers=5, split=10**9), servers=5) == [4 * 9973 % 5]


def test_who_is_the_fastest_is_told_among_those_who_are_still_there() -> None:
    """Worker 2 was far ahead when it left: worker 0, the fastest of the others, gets credit as if it had never been."""
    bound = (1, 5)
    without, after = State(2), State(3)
    for moment in range(40):
        after.push(2, 0.01 * moment, (NO_END, NO_END))
    after.lose(2, bound)
    ahead = 0
    for moment, worker in sorted([(1.0 * n, 0) for n in range(1, 12)] + [(2.6 * n, 1) for n in range(1, 5)]):
        if without.waiting[worker]:
            continue  # it has no weights to go on with
        released = without.push(worker, moment, bound)
        assert after.push(worker, moment, bound) == released
        ahead += 0 in released and without.clock[0] - without.clock[1] > bound[0]
    assert ahead  # by credit
