"""Chimera's choice: how deep, how many replicas, how large a micro-batch.

Chimera (Li and Hoefler, SC 2021) runs two pipelines in opposite directions over the same D devices (D even), so each
device holds two stages. On n devices every D with n/D replicas is tried. For each the **greedy batch**: the largest
micro-batch that fits, since larger ones compute more efficiently. Then the time of a flush decides; `cost` may be
anything, such as the simulator's. Without it, the paper's model: the number of forwards and backwards on the critical
path,

    T = (F + c) C_f + (B + c) C_b + the part of the all-reduce that nothing hides

    N = D micro-batches a replica:   C_f = D              C_b = 2D − 2
    N = k · D, one after the other:  C_f = D + 2(k − 1)   C_b = k (2D − 2)          (for B ≥ F)

for F, B of the slowest stage and c of the slowest transfer. Gradients of stage s are summed over both copies and all
replicas, 2n/D devices; they are ready s backwards before the end, so max over s of (all-reduce_s − s · B) stays
exposed.

A device holds stages r and D−1−r: weights and states of both, and at most D/2 + 1 + min(r, D−1−r) micro-batches' saved
values, counted as if all were of the larger one. Stages are cut by time (`bottleneck.py`). O(depths · blocks² · D).

>>> from trainplan.solve.partition.instance import P1, on
>>> critical_path(4, 4), critical_path(4, 8)
((4, 6), (6, 12))
>>> found = chimera(on(P1, devices=4, rate=10.0, micro=4))
>>> found.stages, found.replicas, found.cuts
(2, (2, 2), (3,))
>>> chimera(on(P1, devices=4, rate=10.0, micro=4, memory=40)).stages            # two stages of two copies are too large
4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trainplan.errors import PlanError
from trainplan.solve.partition.answer import FLUSH, Partition
from trainplan.solve.partition.bottleneck import bottleneck
from trainplan.solve.partition.instance import Instance, alike

Cost = Callable[[Instance, int, tuple[int, ...]], float]  # (instance, replicas, cuts) → seconds of a flush


def critical_path(depth: int, micro: int) -> tuple[int, int]:
    """Forwards and backwards on the critical path of N = micro micro-batches, a multiple of the depth."""
    units = micro // depth
    return depth + 2 * (units - 1), units * (2 * depth - 2)


def chimera(given: Instance, cost: Cost | None = None) -> Partition:
    """The best depth at this size of micro-batch; `micro` of them are shared by the replicas."""
    alike("chimera", given)
    found, reasons = _depths(given, cost or paper)
    if not found:
        raise PlanError(
            f"partition=chimera on {given.devices} devices", "; ".join(reasons), "partition=dapple, or another batch"
        )
    return min(found, key=lambda partition: partition.value)


def greedy_batch(
    at: Callable[[int], Instance], batch: int, sizes: Sequence[int], cost: Cost | None = None
) -> Partition:
    """The best depth with the largest micro-batch that fits, each. `at(samples)`: the chain at that size."""
    best: dict[int, Partition] = {}
    reasons = list[str]()
    for samples in sorted(set(sizes), reverse=True):
        if batch % samples:
            continue
        given = replace(at(samples), micro=batch // samples)
        alike("chimera", given)
        found, why = _depths(given, cost or paper)
        reasons += [f"{samples} samples: {reason}" for reason in why]
        for partition in found:
            best.setdefault(partition.stages, replace(partition, samples=samples))
    if not best:
        reason = "; ".join(reasons) or f"no size of {', '.join(map(str, sizes))} samples divides it"
        raise PlanError(f"partition=chimera with a batch of {batch}", reason, "smaller micro-batches")
    return min(best.values(), key=lambda partition: partition.value)


def _depths(given: Instance, cost: Cost) -> tuple[list[Partition], list[str]]:
    """Every depth that is possible, and for the others why not."""
    found, reasons = [], list[str]()
    for depth in range(2, given.devices + 1, 2):
        if given.devices % depth:
            continue
        replicas = given.devices // depth
        if depth > given.blocks:
            reasons.append(f"{depth} stages of {given.blocks} blocks")
        elif given.micro % (replicas * depth):
            reasons.append(f"{given.micro} micro-batches do not divide by {replicas} × {depth}")
        else:
            cuts = bottleneck(given.seconds, depth, given.boundary) or ()
            need = _need(given, cuts)
            if need > min(given.memory):
                reasons.append(f"{depth} stages take {need:,.0f} bytes of {min(given.memory):,.0f}")
            else:
                value = cost(given, replicas, cuts)
                found.append(Partition(cuts, (replicas,) * depth, value, FLUSH, order="chimera"))
    return found, reasons or [f"two directions need an even number of stages, and {given.devices} devices have none"]


def paper(given: Instance, replicas: int, cuts: tuple[int, ...]) -> float:
    """The paper's model of a flush."""
    depth, speed = len(cuts) + 1, given.speeds[0]
    edges = np.array([0, *cuts, given.blocks])
    sums = {name: values[edges[1:]] - values[edges[:-1]] for name, values in given.arrays.items()}
    slowest = int(np.argmax(sums["seconds"]))
    forward = float(sums["forward"][slowest]) / speed
    backward = float(sums["seconds"][slowest]) / speed - forward
    transfer = max((given.crossing[cut] / given.slowest_rate for cut in cuts), default=0.0)
    forwards, backwards = critical_path(depth, given.micro // replicas)
    copies = 2 * replicas
    sync = 2 * (copies - 1) / copies * sums["weights"] / given.slowest_rate - np.arange(depth) * backward
    exposed = max(0.0, float(sync.max()))
    return float((forward + transfer) * forwards + (backward + transfer) * backwards + exposed)


def _need(given: Instance, cuts: tuple[int, ...]) -> float:
    """Bytes of the fullest device."""
    depth, edges = len(cuts) + 1, np.array([0, *cuts, given.blocks])
    sums = {name: values[edges[1:]] - values[edges[:-1]] for name, values in given.arrays.items()}
    fixed, saved, rank = sums["weights"] + sums["states"], sums["saved"], np.arange(depth)
    peak = depth // 2 + 1 + np.minimum(rank, rank[::-1])
    return float((fixed + fixed[::-1] + peak * np.maximum(saved, saved[::-1])).max())
