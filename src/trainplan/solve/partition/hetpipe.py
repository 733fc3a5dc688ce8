"""HetPipe's partition: one virtual worker of different GPUs, in the best order.

HetPipe (Park et al., ATC 2020) groups weak and strong GPUs into virtual workers; each is a pipeline with one GPU a
stage, and N_m mini-batches are in it at once. For K GPUs in a chosen order:

    min over orders and cuts of  max over k of ( Σ seconds / speed_k  +  2 · boundary before / rate )
    memory of stage k:  weights + states + saved · min(N_m, K − k)  ≤  memory_k

The paper hands this to a solver of linear programs (cuts are integers, so a mixed one); we solve it exactly by the
dynamic program of `placed.py`, over (first block left, GPUs used), with the order chosen on the way. O(blocks² · 2^K ·
K) for K different GPUs, much less for few kinds.

**N_m.** More mini-batches at once fill the pipeline and fill the memory. With N_m in flight a worker cannot be faster
than N_m mini-batches a round trip, so its time a mini-batch is max(slowest stage, Σ stages / N_m). Left open, the least
N_m whose best partition has the least such time is taken; more than K never help.

>>> from trainplan.solve.partition.instance import P1, on
>>> found = hetpipe(on(P1, speeds=(1, 1, 2), rate=4.0))
>>> found.cuts, found.placement, found.value                   # the fast one first
((3, 5), ((2,), (0,), (1,)), 6.5)
>>> hetpipe(on(P1, speeds=(1, 1, 2), rate=4.0, memory=24), at_once=3).value
8.5
>>> virtual_workers(on(P1, levels=((2, 4.0), (2, 1.0))), "equal")
((0, 2), (1, 3))
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainplan.errors import InputError, PlanError
from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Instance, does_not_fit, enough_blocks
from trainplan.solve.partition.placed import Placed, place
from trainplan.units import significant


def hetpipe(given: Instance, at_once: int | None = None) -> Partition:
    """Every device holds one stage. `at_once`: mini-batches in the worker, N_m; None: as many as help."""
    enough_blocks("hetpipe", given, given.devices)
    if at_once is not None and at_once < 1:
        raise InputError(f"{at_once} mini-batches at once", "a worker runs at least one", "at_once=1")
    counts = range(1, given.devices + 1) if at_once is None else (at_once,)
    known = _solve(given, 1) if min(given.memory) == math.inf else None  # then the count changes no stage
    best, found = math.inf, None
    for count in counts:
        placed = known or _solve(given, count)
        period = max(placed.value, sum(_stage_seconds(given, placed)) / count)
        if period < best:
            note = f"{count} at once do not fill the pipeline: {significant(period)} s a mini-batch"
            best, found = period, Partition(
                placed.ends[:-1], (1,) * given.devices, placed.value, placement=placed.devices, at_once=count,
                notes=(note,) if period > placed.value else (),
            )  # fmt: skip
    if found is None:
        raise does_not_fit("hetpipe", given, lambda other: math.isfinite(_solve(other, at_once or 1).value))
    return found


def _solve(given: Instance, at_once: int) -> Placed:
    return place(
        "hetpipe", given, several=False, after_counts=False,
        versions=lambda left, replicas: 1, in_flight=lambda left, replicas: min(at_once, left),
    )  # fmt: skip


def _stage_seconds(given: Instance, placed: Placed) -> list[float]:
    times, first, before = [], 0, -1
    for end, (device,) in zip(placed.ends, placed.devices, strict=True):
        came = 2 * given.crossing[first] / given.rate(before, device) if first else 0.0
        times.append(sum(given.seconds[first:end]) / given.speeds[device] + came)
        first, before = end, device
    return times


def virtual_workers(given: Instance, policy: str) -> tuple[tuple[int, ...], ...]:
    """How the devices of a cluster are grouped into workers, by the nodes of `levels[0]`.

    node    every node is a worker: fast links, unequal workers
    equal   every worker has the same share of every node: equal workers, slow links
    hybrid  the strongest node is paired with the weakest, and so on; a pair is shared out equally
    """
    size = given.levels[0].count
    nodes = [tuple(range(first, first + size)) for first in range(0, given.devices, size)]
    if policy == "node":
        return tuple(nodes)
    if policy == "equal":
        return _deal(nodes)
    if policy != "hybrid":
        raise PlanError(f"virtual workers by {policy!r}", "the policies are node, equal and hybrid", "equal")
    by_speed = sorted(nodes, key=lambda node: -sum(given.speeds[device] for device in node))
    pairs = [
        [by_speed[k], by_speed[-1 - k]] if k < len(nodes) - 1 - k else [by_speed[k]]
        for k in range((len(nodes) + 1) // 2)
    ]
    return tuple(worker for pair in pairs for worker in _deal(pair))


def _deal(nodes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """As many workers as nodes; devices of each node are dealt out in turn, going on where the last node stopped."""
    hands: list[list[int]] = [[] for _ in nodes]
    for number, device in enumerate(device for node in nodes for device in node):
        hands[number % len(nodes)].append(device)
    return tuple(tuple(hand) for hand in hands)


def worker(given: Instance, devices: tuple[int, ...]) -> Instance:
    """The same chain on some of the devices, links as they are."""
    rates = tuple(tuple(given.rate(a, b) if a != b else math.inf for b in devices) for a in devices)
    level = replace(given.levels[0], count=len(devices), rate=given.slowest_rate)
    return replace(
        given, speeds=tuple(given.speeds[d] for d in devices), memory=tuple(given.memory[d] for d in devices),
        levels=(level,), rates=rates,
    )  # fmt: skip
