"""From the samples of all workers to the values of a cluster. Plain numbers in, plain numbers out; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from trainplan.cluster.cluster import Curve, Slowdown

Samples = dict[str, list[Any]]  # of one worker: by quantity, in the order of measurement

SMALL = 4096  # bytes; up to here the size of a message does not matter
# What all ranks do at once, by bytes: collectives, and the parts of those that we make ourselves (`parts.py`).
TOGETHER = (
    "all_reduce", "all_reduces", "all_gather", "reduce_scatter", "broadcast", "stage", "round", "add", "hub",
)  # fmt: skip
MOST_SLOWDOWN = 20.0  # beyond it compute stands still while communication goes on, and noise decides the rest
APART = 1.5  # a pair has a link of its own when its largest message is so many times faster or slower


def line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and rate of `seconds = latency + size / rate`.

    Latency is the least of the small messages' times: they differ by nothing but noise, which only ever adds. The
    rate minimises the sum of squared relative errors, so that every size counts alike.

    >>> latency, rate = line([1, 1000, 10**6], [2e-4, 1e-4 + 1e-6, 1e-4 + 1e-3])
    >>> round(latency * 1e6), round(rate / 1e6)
    (101, 1001)
    """
    latency = min(time for size, time in zip(sizes, seconds, strict=True) if size <= max(SMALL, sizes[0]))
    size = np.asarray(sizes[1:], dtype=float)
    time = np.asarray(seconds[1:], dtype=float)
    slope = float(np.sum(size * (time - latency) / time**2) / np.sum(size**2 / time**2))
    return latency, 1 / slope if slope > 0 else float(size[-1] / time[-1])


def sustained(curve: Curve) -> float:
    """Bytes a second that a link carries on and on: from the second largest message to the largest. A link that ranks
    share is seldom at rest, and what passes it in a burst after a rest (a token bucket's) says nothing of it.

    >>> sustained(Curve("p2p", 2, (1, 10**5, 10**6, 3 * 10**6), (1e-4, 1.1e-4, 0.008, 0.028)))
    100000000.0
    """
    size, time = curve.bytes[-1] - curve.bytes[-2], curve.seconds[-1] - curve.seconds[-2]
    return round(size / time, 6) if time > 0 else curve.bytes[-1] / curve.seconds[-1]


def slowdown(samples: Sequence[dict[str, float]]) -> tuple[float, float]:
    """How many times longer compute takes while communication goes on, and communication while ranks compute
    (`cluster.Slowdown`).

    Alone, compute takes C and communication M. Together, compute takes T > C, and communication is over E seconds after
    issuing it began; that took I, before the clock of T ran. So both went on for D = min(E − I, T) seconds. What went
    before compute, I, and what was left after it, W = max(0, E − I − T), went at full speed: communication advanced by
    M − I − W in these D seconds, and compute lost T − C of them.

    >>> perfect = {"alone": 1.0, "communication": 0.5, "issue": 0.0, "together": 1.0, "over": 0.5}
    >>> slowdown([perfect]), slowdown([perfect | {"together": 1.25}]), slowdown([perfect | {"over": 0.75}])
    ((1.0, 1.0), (2.0, 1.0), (1.0, 1.5))
    >>> slowdown([perfect | {"communication": 2.0, "together": 2.0, "over": 3.0}])
    (2.0, 2.0)
    """
    lost, longer = [], []
    for sample in samples:
        both = min(sample["over"] - sample["issue"], sample["together"])
        after = max(0.0, sample["over"] - sample["issue"] - sample["together"])
        advanced = sample["communication"] - sample["issue"] - after
        if advanced > 0.1 * sample["communication"] and both > 0:
            lost.append((sample["together"] - sample["alone"]) / both)
            longer.append(both / advanced)
    if not lost:
        return 1.0, 1.0
    left = 1 - max(median(lost), 0.0)
    of_compute = min(1 / left, MOST_SLOWDOWN) if left > 0 else MOST_SLOWDOWN
    return of_compute, min(max(median(longer), 1.0), MOST_SLOWDOWN)


def slowdowns(workers: Sequence[Samples], count: int) -> Slowdown:
    """The slow-downs of every kind that was measured with so many workers."""
    found: dict[str, float] = {}
    for kind in ("send", "receive", "collective", "copy"):
        samples = [sample for worker in workers for sample in worker.get(f"overlap.{count}.{kind}", [])]
        if samples:
            found[kind], slowed = slowdown(samples)
            if kind != "send":  # a sender may be done when its message is still under way
                found["slowed_message" if kind == "receive" else f"slowed_{kind}"] = slowed
    return Slowdown(**found)


def contention(workers: Sequence[Samples], count: int, cores: int = 0) -> tuple[float, ...]:
    """How much slower a worker computes when 1, 2, … of them do; between measured numbers by a straight line.

    Rank 0 is busy in all of them: its ratio within a round is free of drift. It never falls: more neighbours do not
    help. Samples of CPU workers are seconds on a core; where workers outnumber the `cores`, they also take turns.

    >>> contention([{"busy.1": [1.0, 2.0], "busy.2": [1.1, 2.2], "busy.4": [1.0, 2.0]}], 4)
    (1.0, 1.1, 1.1, 1.1)
    >>> contention([{"busy.1": [1.0], "busy.2": [1.1], "busy.4": [1.2]}], 4, cores=2)
    (1.0, 1.1, 1.75, 2.4)
    """
    return _table(workers[0], "busy.", count, lambda busy: max(1.0, busy / cores if cores else 1.0))


def hosts(workers: Sequence[Samples], count: int) -> tuple[float, ...]:
    """How much longer a host takes to issue work when 1, 2, … of them do; none where devices are hosts.

    >>> hosts([{"issuing.1": [1.0, 2.0], "issuing.2": [1.5, 3.0]}], 2), hosts([{"busy.1": [1.0]}], 1)
    ((1.0, 1.5), ())
    """
    return _table(workers[0], "issuing.", count) if "issuing.1" in workers[0] else ()


def dispatch(workers: Sequence[Samples]) -> float:
    """Host seconds of the engine for an operation, beside the operation itself: the mean over kinds of operations of
    the median of all workers. Nought where the engine was not asked, or is lost in the noise.

    >>> one, other = {"dispatch.forward": [1e-4, 3e-4], "dispatch.receive": [4e-4]}, {"dispatch.forward": [2e-4]}
    >>> f"{dispatch([one, other]):g}", dispatch([{}]), dispatch([{"dispatch.forward": [-1e-6]}])
    ('0.0003', 0.0, 0.0)
    """
    kinds = {name for worker in workers for name in worker if name.startswith("dispatch.")}
    medians = [median(sample for worker in workers for sample in worker.get(name, [])) for name in sorted(kinds)]
    return max(0.0, mean(medians)) if medians else 0.0


def _table(
    first: Samples, what: str, count: int, turns: Callable[[int], float] = lambda busy: 1.0
) -> tuple[float, ...]:  # fmt: skip
    """Seconds of the first worker beside others, in units of those alone; and how many take turns at a core."""
    measured = sorted(int(name.removeprefix(what)) for name in first if name.startswith(what))
    ratios = []
    for busy in measured:
        ratio = median(time / base for time, base in zip(first[f"{what}{busy}"], first[f"{what}1"], strict=True))
        ratios.append(max(ratio, 1.0) * turns(busy))
    rising = np.maximum.accumulate(ratios)
    return tuple(round(float(value), 4) for value in np.interp(range(1, count + 1), measured, rising))


def spaces(networks: Sequence[str]) -> list[range]:
    """The ranks of each network that workers are in, where they follow each other.

    Where every worker has one for itself, they are as one: the links between workers are all that there is.

    >>> spaces(["a", "a", "b"]), spaces(["a", "b"]), spaces(["a"]), spaces(["a", "b", "a"])
    ([range(0, 2), range(2, 3)], [range(0, 2)], [range(0, 1)], [range(0, 3)])
    """
    begins = [rank for rank, own in enumerate(networks) if not rank or own != networks[rank - 1]]
    found = [range(a, b) for a, b in zip(begins, [*begins[1:], len(networks)], strict=True)]
    apart = len(found) == len(set(networks)) and max(map(len, found)) > 1
    return found if apart else [range(len(networks))]


def spread(workers: Sequence[Samples]) -> float:
    """How far apart workers are that do the same at the same time: standard deviation over mean.

    What comes and goes within a probe cancels, since the median over its rounds is taken of every worker first: what is
    left is what a core of a shared machine is slower than another for seconds.

    >>> spread([{"busy.1": [1.0], "busy.2": [1.0, 1.0, 1.3]}, {"busy.2": [1.2, 1.2, 1.1]}, {}])
    0.1286
    >>> spread([{"busy.1": [1.0]}])
    0.0
    """
    names = [name for name in workers[0] if name.startswith("busy.")]
    last = max(names, key=lambda name: int(name.removeprefix("busy.")))
    times = [median(worker[last]) for worker in workers if last in worker]
    return round(stdev(times) / mean(times), 4) if len(times) > 1 else 0.0


def collectives(workers: Sequence[Samples]) -> tuple[Curve, ...]:
    """A curve for each collective and number of workers, and of groups of them that were at it at once: medians, from
    the last arrival to the last departure."""
    points: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for name in workers[0]:
        op, _, rest = name.partition(".")
        if op not in TOGETHER:
            continue
        ranks, size, groups = map(int, f"{rest}.1".split(".")[:3])
        members = [worker[name] for worker in workers[:ranks]]
        times = [
            max(end for _, end in moment) - max(start for start, _ in moment) for moment in zip(*members, strict=True)
        ]
        points.setdefault((op, ranks, groups), []).append((size, median(times)))
    return tuple(_curve(op, ranks, sized, groups) for (op, ranks, groups), sized in points.items())


def messages(workers: Sequence[Samples]) -> dict[tuple[int, int], Curve]:
    """A curve of one-way seconds for each pair of workers."""
    points: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for worker in workers:
        for name, times in worker.items():
            if name.startswith("p2p."):
                a, b, size = map(int, name.removeprefix("p2p.").split("."))
                points.setdefault((a, b), []).append((size, median(times)))
    return {pair: _curve("p2p", 2, sized) for pair, sized in sorted(points.items())}


def together(curves: Sequence[Curve]) -> Curve:
    """The median of several curves over the same sizes."""
    seconds = [median(curve.seconds[i] for curve in curves) for i in range(len(curves[0].bytes))]
    return Curve(curves[0].op, curves[0].ranks, curves[0].bytes, tuple(seconds))


def apart(curves: dict[tuple[int, int], Curve]) -> list[tuple[int, int]]:
    """Pairs whose link is clearly another one than most pairs have.

    >>> flat, fast = Curve("p2p", 2, (1, 10**6), (1e-4, 1e-2)), Curve("p2p", 2, (1, 10**6), (1e-4, 1e-3))
    >>> apart({(0, 1): fast, (0, 2): flat, (1, 2): flat})
    [(0, 1)]
    """
    usual = median(curve.seconds[-1] for curve in curves.values())
    return [pair for pair, curve in curves.items() if not 1 / APART < curve.seconds[-1] / usual < APART]


def _curve(op: str, ranks: int, points: list[tuple[int, float]], groups: int = 1) -> Curve:
    points = sorted(points)
    return Curve(op, ranks, tuple(size for size, _ in points), tuple(time for _, time in points), groups)
