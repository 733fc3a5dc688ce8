"""PipeDream-2BW's planner: equal stages, one width for all, recompute everything or nothing.

2BW (Narayanan et al., ICML 2021) is meant for models of many equal layers, so its planner does not cut by cost: it
tries every number of stages and every width, with and without recomputation, and keeps the fastest that fits. A stage
holds ⌊blocks / stages⌋ blocks, the last (blocks mod stages) stages one more. Stage k of p has p − k micro-batches in
flight.

Costs and memory are those of `piper.py`, as Piper's authors wrote this planner down for comparison:

    max over stages of  ( Σ time + 2 (boundary before + after) / rate ) / d  +  4 (d−1)/d · Σ weights / (m · rate)

with d · stages ≤ devices, d · stages ≤ m and d dividing m. (The paper's own: per batch, the slowest stage's compute, or
else its transfers and its all-reduce; the same maximum where these overlap with nothing.) The second version of the
weights, which gives 2BW its name, belongs into `states`. O(devices · log devices · blocks).

Exact over what it considers, but it considers little: on unequal blocks it is a heuristic.

>>> from dataclasses import replace
>>> from trainplan.solve.partition.instance import P1, on
>>> sgd = replace(P1, states=P1.weights, inputs=(1.0,) * 6)
>>> found = two_buffered(on(sgd, devices=4, rate=4.0, memory=60, micro=4))
>>> found.cuts, found.replicas, found.value
((3,), (2, 2), 8.375)
>>> two_buffered(on(sgd, devices=4, rate=4.0, memory=30, micro=4)).recompute
(0, 1, 2, 3, 4, 5)
"""

from __future__ import annotations

import numpy as np

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.even import lengths
from trainplan.solve.partition.instance import Instance, Ints, alike, does_not_fit
from trainplan.solve.partition.piper import Columns, columns


def two_buffered(given: Instance) -> Partition:
    """The fastest of all equal pipelines that fit."""
    speed = alike("2bw", given)
    found = _search(given, speed)
    if found is None:
        raise does_not_fit("2bw", given, lambda other: _search(other, speed) is not None)
    return found


def _search(given: Instance, speed: float) -> Partition | None:
    table, best = columns(given, speed), None
    most = min(given.devices, given.micro)
    for stages in range(1, min(most, given.blocks) + 1):
        edges = np.concatenate([[0], np.cumsum(lengths(given.blocks, stages))])
        for width in range(1, most // stages + 1):
            if given.micro % width:
                continue
            for recompute in (False, True):
                value = _value(table, edges, width, recompute)
                if value is not None and (best is None or value < best.value):
                    everything = tuple(range(given.blocks)) if recompute else ()
                    cuts = tuple(int(edge) for edge in edges[1:-1])
                    best = Partition(cuts, (width,) * stages, value, recompute=everything)
    return best


def _value(table: Columns, edges: Ints, width: int, recompute: bool) -> float | None:
    """Seconds a micro-batch of the slowest stage; None where one does not fit."""
    first, end, stages = edges[:-1], edges[1:], len(edges) - 1
    in_flight = stages - np.arange(stages)
    kept = table.slim if recompute else table.plain
    fixed = table.base + (table.plain if recompute else 0.0)
    if (np.add.reduceat(fixed, first) + in_flight * np.add.reduceat(kept, first) > table.limit).any():
        return None
    time = np.add.reduceat(table.time + (table.again if recompute else 0.0), first)
    moved = table.crossing[first] + table.crossing[end]
    sync = (width - 1) / width * (table.sync[end] - table.sync[first])
    return float(((time + moved) / width + sync).max())
