"""Pipe-torch's partition: PipeDream's problem where nothing overlaps and links differ.

Pipe-torch (Zhan and Zhang, CBD 2019) runs on clusters with slow and unequal networks, where sending hides behind
nothing. So a stage's time is a *sum*, and which GPUs hold which stage matters:

    T(stage) = ( Σ seconds + 2 (q−1)/q · Σ weights / rate + 2 · boundary before / rate + 2 · boundary after / rate ) / q

for q replicas; the slowest stage decides. The same dynamic program as PipeDream's, with the choice of GPUs in it: rates
are those of the slowest link inside the group and to the groups before and after, and the slowest GPU of a group sets
its pace (the survey that describes the paper says "dynamic programming for DP, PP and GPU allocation", no more; this is
our reading). Memory as in `pipedream.py`: ⌈devices from here on / q⌉ versions of weights and saved values.

Exact, on all devices, by `placed.py`.

>>> from trainplan.solve.partition.instance import P1, on
>>> found = pipe_torch(on(P1, devices=3, rate=1.0))
>>> found.cuts, found.replicas, found.value
((3,), (2, 1), 14.0)
>>> pipe_torch(on(P1, levels=((2, 4.0), (2, 0.5)))).placement   # a fast pair together, the slow link between stages
((2, 3), (0, 1))
"""

from __future__ import annotations

import math

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Instance, does_not_fit
from trainplan.solve.partition.placed import Placed, place


def pipe_torch(given: Instance) -> Partition:
    """Stages, and the devices of each."""
    found = _solve(given)
    if not math.isfinite(found.value):
        raise does_not_fit("pipe-torch", given, lambda other: math.isfinite(_solve(other).value))
    replicas = tuple(len(devices) for devices in found.devices)
    return Partition(found.ends[:-1], replicas, found.value, placement=found.devices)


def _solve(given: Instance) -> Placed:
    def kept(left: int, replicas: int) -> int:
        return -(-left // replicas)

    return place("pipe-torch", given, several=True, after_counts=True, versions=kept, in_flight=kept)
