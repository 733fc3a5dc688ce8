"""Workers of different speed on one machine: each has a core of its own, and some must share theirs with idle work.

    with uneven(world=4, times=2) as place, placed(place):        # ranks 2 and 3 take twice as long
        pool(4).run(...)

A core that several processes want is dealt out evenly by the kernel, a few milliseconds to each; so a worker beside one
process that only counts computes at half its speed, and beside two at a third.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from trainplan.cluster.cluster import Cluster, Device
from trainplan.cluster.probe.launch import Place
from trainplan.errors import RunError

_COUNT = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): [0 for _ in range(100_000)]"  # until we are gone


def slow_ranks(world: int) -> range:
    """Those that are slow: the last half.

    >>> list(slow_ranks(4)), list(slow_ranks(3)), list(slow_ranks(1))
    ([2, 3], [2], [])
    """
    return range((world + 1) // 2, world)


@contextmanager
def uneven(world: int, times: int) -> Iterator[Place]:
    """Where to start workers so that the last half of them is `times` slower."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < world:
        why = f"each worker needs a core of its own to be slow on, and there are {len(cores)}"
        raise RunError(f"{world} uneven workers", why, f"--workers {max(1, len(cores))}")

    @contextmanager
    def place(rank: int, _: int) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cores[rank]})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    with ExitStack() as stack:
        for rank in slow_ranks(world):
            for _ in range(times - 1):
                with place(rank, world):
                    beside = subprocess.Popen([sys.executable, "-c", _COUNT, str(os.getpid())])
                stack.callback(beside.wait)
                stack.callback(beside.kill)
        yield place


def described(cluster: Cluster, times: int) -> Cluster:
    """The cluster with its last half so many times slower: what is believed of the workers above.

    >>> from trainplan.cluster.parse import cluster
    >>> [device.name for device in described(cluster("2xT4"), 2).nodes[0].devices]
    ['T4', 'T4, 2 times slower']
    """
    if times == 1:
        return cluster
    slow = slow_ranks(cluster.world)

    def slower(device: Device) -> Device:
        rates = {precision: rate / times for precision, rate in device.flops.items()}
        return replace(device, name=f"{device.name}, {times} times slower", flops=rates)

    node = cluster.nodes[0]
    devices = tuple(slower(device) if rank in slow else device for rank, device in enumerate(node.devices))
    return replace(cluster, nodes=(replace(node, devices=devices), *cluster.nodes[1:]))
