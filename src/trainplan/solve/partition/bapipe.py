"""BaPipe's partition: balance by time over unequal devices, move blocks until memory is kept, choose the order of work.

BaPipe (Zhao et al., 2020) plans before training, in four steps (our reading; the paper's tables are not at hand):

1. Balance: min max Σ seconds / speed over the devices in their order (`uneven.py`, exact).
2. Memory: while some stage exceeds its device's memory, the one that exceeds it most gives the block at its edge to the
   neighbour with more room left, but no boundary ever moves back. A heuristic: it may end where nothing can move.
3. Order of work: with double the warm-up (`1f1b-early`, BaPipe's 1F1B-SO) transfers hide behind compute, at almost
   twice the activations; without (`1f1b`, its 1F1B-SNO) each micro-batch waits for a part of them. For p stages, m
   micro-batches, b seconds of the slowest stage and c of the slowest transfer:

       1f1b-early  (m + p − 1) b + 2 (p − 1) c                in flight on stage k:  min(m, 2 (p − k) − 1)
       1f1b        (m + p − 1) b + 2 (p − 1) c + 2 m c (p − 1) / p                   min(m, p − k)

   The faster is taken. (Its other two orders differ on FPGAs only.)
4. Data parallelism on the same devices, m Σ seconds / devices + a ring all-reduce, is taken where it is estimated to be
   faster and fits.

Bytes of a stage: weights + states + in flight · saved. Where memory is no matter and step 4 is off, this is the exact
bottleneck partition.

>>> from trainplan.solve.partition.instance import P1, on
>>> found = bapipe(on(P1, devices=3, rate=4.0, memory=50, micro=8), fall_back=False)
>>> found.cuts, found.order, found.value
((2, 4), '1f1b-early', 84.0)
>>> bapipe(on(P1, devices=3, rate=4.0, memory=35, micro=8)).order                     # less memory: shorter warm-up
'1f1b'
"""

from __future__ import annotations

import numpy as np

from trainplan.errors import PlanError
from trainplan.solve.partition.answer import FLUSH, Partition
from trainplan.solve.partition.instance import Floats, Instance, enough_blocks
from trainplan.solve.partition.uneven import elasticpipe


def bapipe(given: Instance, fall_back: bool = True) -> Partition:
    """Stage k on device k; `fall_back`: data parallelism instead where it is faster."""
    enough_blocks("bapipe", given, given.devices)
    start = elasticpipe(given).cuts
    found: Partition | None = None
    for order in ("1f1b-early", "1f1b"):
        cuts = _repaired(given, start, in_flight(order, given.devices, given.micro))
        if cuts is None:
            continue
        value = _flush(given, cuts, order)
        if found is None or value < found.value:
            found = Partition(cuts, (1,) * given.devices, value, FLUSH, order=order)
    whole = _data_parallel(given) if fall_back else None
    if whole is not None and (found is None or whole.value < found.value):
        return whole
    if found is None:
        need = _need(given, start, in_flight("1f1b", given.devices, given.micro))
        over = np.argmax(need - np.array(given.memory))
        why = f"balanced, stage {over} takes {need[over]:,.0f} bytes of {given.memory[over]:,.0f}, and no move mends it"
        raise PlanError(f"partition=bapipe on {given.devices} devices", why, "partition=hetpipe, or more devices")
    return found


def in_flight(order: str, stages: int, micro: int) -> Floats:
    """Micro-batches that each stage holds at once.

    >>> in_flight("1f1b-early", 3, 8).tolist(), in_flight("1f1b", 3, 8).tolist()
    ([5.0, 3.0, 1.0], [3.0, 2.0, 1.0])
    """
    left = stages - np.arange(stages)
    return np.minimum(micro, 2 * left - 1 if order == "1f1b-early" else left).astype(np.float64)


def _repaired(given: Instance, cuts: tuple[int, ...], held: Floats) -> tuple[int, ...] | None:
    """The cuts after moving blocks off the stages that do not fit; None where that leads nowhere."""
    edges = [0, *cuts, given.blocks]
    moved = [0] * len(edges)  # +1: this edge has gone to the right, −1: to the left
    while True:
        over = _need(given, tuple(edges[1:-1]), held) - np.array(given.memory)
        worst = int(np.argmax(over))
        if over[worst] <= 0:
            return tuple(edges[1:-1])
        ways = [(worst - 1, worst, 1), (worst + 1, worst + 1, -1)]  # neighbour, edge between, where it goes
        free = [way for way in ways if 0 <= way[0] < given.devices and moved[way[1]] != -way[2]]
        if edges[worst + 1] - edges[worst] == 1 or not free:
            return None
        _, edge, step = min(free, key=lambda way: over[way[0]])
        edges[edge] += step
        moved[edge] = step


def _need(given: Instance, cuts: tuple[int, ...], held: Floats) -> Floats:
    edges = np.array([0, *cuts, given.blocks])
    sums = {name: values[edges[1:]] - values[edges[:-1]] for name, values in given.arrays.items()}
    return sums["weights"] + sums["states"] + held * sums["saved"]


def _flush(given: Instance, cuts: tuple[int, ...], order: str) -> float:
    stages, micro = len(cuts) + 1, given.micro
    until = given.arrays["seconds"]
    edges = np.array([0, *cuts, given.blocks])
    slowest = float(((until[edges[1:]] - until[edges[:-1]]) / np.array(given.speeds)).max())
    sends = [given.crossing[cut] / given.rate(k, k + 1) for k, cut in enumerate(cuts)]
    transfer = float(max(sends, default=0.0))
    waits = 2 * micro * transfer * (stages - 1) / stages if order == "1f1b" else 0.0
    return (micro + stages - 1) * slowest + 2 * (stages - 1) * transfer + waits


def _data_parallel(given: Instance) -> Partition | None:
    """All devices hold everything; None where that does not fit."""
    count, weights = given.devices, sum(given.weights)
    if weights + sum(given.states) + sum(given.saved) > min(given.memory):
        return None
    compute = given.micro * sum(given.seconds) / count / min(given.speeds)
    value = compute + 2 * (count - 1) / count * weights / given.slowest_rate
    return Partition((), (count,), value, FLUSH, notes=("data parallelism is estimated to be faster",))
