"""Piper's partition: stages, a data-parallel width for each, and which blocks to recompute, within memory.

Piper (Tarnawski et al., NeurIPS 2021) plans a graph by its downsets; on a chain these are the suffixes. Every stage
has a width d of its own, which must divide the m micro-batches of a batch, and gradients are summed once a batch. In
the steady state the slowest stage decides:

    D(i, s) = min over j, d of  max( TPS(i..j, d, ⌈s/d⌉),  D(j, s − d) )
    TPS(i..j, d, y) = ( Σ time + 2 (boundary before + after) / rate ) / d  +  4 (d−1)/d · Σ weights / (m · rate)

D(i, s) is the best for the blocks from i on whose widths sum up to s, and y = ⌈s/d⌉ is how many micro-batches a replica
of the first of those stages has in flight, which is all that memory depends on. The answer is the least D(0, s) with
s ≤ devices and s ≤ m: Piper leaves devices idle where more do not help. (With tensor parallelism a state also counts
devices, as each stage takes t · d of them; here t = 1 and the two sums are one.)

Each block has two options, and the fastest choice that fits is a knapsack:

    plain         time                bytes  weights + states + y · saved
    recomputed    time + again        bytes  weights + states + y · inputs + saved

Piper solves it greedily: all plain if that fits; else blocks are switched in the order of least seconds a byte until it
fits. The last switch may save more than was needed, so the stage's time is not always the least; everything outside is
exact. O(blocks² · s · widths) and O(blocks) a knapsack.

>>> from dataclasses import replace
>>> from trainplan.solve.partition.instance import P2, on
>>> adam = replace(P2, states=P2.weights, inputs=(1.0,) * 6)
>>> found = piper(on(adam, devices=4, rate=4.0, memory=30, micro=4))
>>> found.cuts, found.replicas, found.recompute, found.value
((1, 4), (1, 1, 2), (0, 2), 6.375)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Bools, Floats, Instance, Ints, alike, does_not_fit


class Columns(NamedTuple):
    """What the compiled part reads, one value a block (or a cut)."""

    time: Floats  # forward and backward
    again: Floats  # what recomputation takes
    plain: Floats  # bytes a micro-batch in flight, plain
    slim: Floats  # … and recomputed
    base: Floats  # bytes whatever is in flight
    crossing: Floats  # [j] seconds there and back of what crosses the cut before block j
    sync: Floats  # [j] 4 · weights of the blocks before j / (m · rate)
    limit: float


def columns(given: Instance, speed: float) -> Columns:
    """Piper's costs of a chain; one rate for all links, the lowest."""
    rate = given.slowest_rate
    return Columns(
        np.array(given.seconds) / speed, np.array(given.again) / speed, np.array(given.saved),
        np.array(given.inputs), np.array(given.weights) + np.array(given.states), 2 * given.crossing / rate,
        4 * given.arrays["weights"] / (given.micro * rate), min(given.memory),
    )  # fmt: skip


def piper(given: Instance) -> Partition:
    """On as many devices as help."""
    speed = alike("piper", given)
    most = min(given.devices, given.micro)
    widths = np.array([d for d in range(1, most + 1) if given.micro % d == 0])
    table = columns(given, speed)
    value, end, width = _suffixes(table, widths, most)
    if not math.isfinite(value[0].min()):

        def fits(other: Instance) -> bool:
            return math.isfinite(_suffixes(columns(other, speed), widths, most)[0][0].min())

        raise does_not_fit("piper", given, fits)
    first, left = 0, int(np.argmin(value[0]))
    cuts, replicas, recompute = [], [], list[int]()
    while first < given.blocks:
        j, d = int(end[first, left]), int(width[first, left])
        in_flight = -(-left // d)
        _, chosen = _options(table, _order(table, in_flight), first, j, in_flight)
        recompute += [int(block) for block in np.flatnonzero(chosen)]
        cuts.append(j)
        replicas.append(d)
        first, left = j, left - d
    return Partition(tuple(cuts[:-1]), tuple(replicas), float(value[0].min()), recompute=tuple(recompute))


@njit(cache=True)
def _suffixes(table: Columns, widths: Ints, most: int) -> tuple[Floats, Ints, Ints]:
    """The recurrence: D, where its first stage ends, and how wide that is."""
    blocks = len(table.time)
    value = np.full((blocks + 1, most + 1), np.inf)
    value[blocks, 0] = 0.0
    end = np.zeros((blocks + 1, most + 1), dtype=np.int64)
    width = np.zeros((blocks + 1, most + 1), dtype=np.int64)
    orders = [_order(table, y) for y in range(most + 1)]
    time = np.full((blocks + 1, most + 1), np.inf)  # [j, y]: seconds of the blocks i ≤ b < j, options chosen
    for i in range(blocks - 1, -1, -1):
        time[:] = np.inf
        for y in range(1, most + 1):
            for j in range(i + 1, blocks + 1):
                time[j, y] = _options(table, orders[y], i, j, y)[0]
                if time[j, y] == np.inf:
                    break  # nor will more blocks fit
        for j in range(blocks, i, -1):  # on a tie the longest stage: fewer of them
            moved = table.crossing[i] + table.crossing[j]
            for d in widths:
                weights = (d - 1) / d * (table.sync[j] - table.sync[i])
                for s in range(d, most + 1):
                    own = (time[j, -(-s // d)] + moved) / d + weights
                    total = max(own, value[j, s - d])
                    if total < value[i, s]:
                        value[i, s], end[i, s], width[i, s] = total, j, d
    return value, end, width


@njit(cache=True)
def _order(table: Columns, in_flight: int) -> Ints:
    """Blocks that save memory when they are recomputed, in the order of least seconds a byte."""
    saves = in_flight * (table.plain - table.slim) - table.plain
    price = np.where(saves > 1e-9, table.again / np.where(saves > 1e-9, saves, 1.0), np.inf)
    order = np.argsort(price, kind="mergesort")
    return order[: (saves > 1e-9).sum()]


@njit(cache=True)
def _options(table: Columns, order: Ints, first: int, end: int, in_flight: int) -> tuple[float, Bools]:
    """Seconds of the blocks first ≤ b < end as one stage (infinite: they do not fit), and which are recomputed."""
    chosen = np.zeros(len(table.time), dtype=np.bool_)
    over, least, seconds = -table.limit, -table.limit, 0.0
    for block in range(first, end):
        full = table.base[block] + in_flight * table.plain[block]
        again = table.base[block] + in_flight * table.slim[block] + table.plain[block]
        over += full
        least += min(full, again)
        seconds += table.time[block]
    if over <= 0:
        return seconds, chosen
    if least > 0:
        return np.inf, chosen
    for block in order:
        if first <= block < end:
            chosen[block] = True
            seconds += table.again[block]
            over -= in_flight * (table.plain[block] - table.slim[block]) - table.plain[block]
            if over < 1e-9:
                break
    return seconds, chosen
