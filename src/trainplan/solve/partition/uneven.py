"""Devices of different speed, one stage each, nothing else counted: the bottleneck partition of BaPipe and ElasticPipe.

    min over cuts of  max over k of  Σ seconds of stage k / speed of device k

`elasticpipe` keeps the devices in their order (it moves boundaries while training, not machines): the dynamic program
of `bottleneck.py` with a speed a stage, O(blocks² · devices), exact. `uneven` also chooses the order: over (first block
left, devices used), exact, exponential in the number of different speeds only (`placed.py`).

ElasticPipe (Geng et al., 2019) measures speeds while it trains and cuts anew; whether a move pays is `worth_moving`.

>>> from trainplan.solve.partition.instance import P1, on
>>> slow = on(P1, speeds=(1, 0.5, 1))
>>> elasticpipe(slow).cuts, elasticpipe(slow).value
((3, 4), 13.0)
>>> uneven(slow).placement, uneven(slow).value                  # the slow one first
(((1,), (0,), (2,)), 9.0)
>>> worth_moving(before=16.0, after=13.0, steps=100, move=250.0)
True
"""

from __future__ import annotations

import numpy as np
from numba import njit

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.instance import Floats, Instance, Ints, enough_blocks, on
from trainplan.solve.partition.placed import place


def elasticpipe(given: Instance) -> Partition:
    """Stage k on device k."""
    enough_blocks("elasticpipe", given, given.devices)
    value, cuts = _in_order(given.arrays["seconds"], np.array(given.speeds))
    placement = tuple((device,) for device in range(given.devices))
    return Partition(tuple(int(cut) for cut in cuts), (1,) * given.devices, value, placement=placement)


def uneven(given: Instance) -> Partition:
    """One stage a device, in the order that is best."""
    enough_blocks("uneven", given, given.devices)
    alone = on(given, speeds=given.speeds)  # no links, no limits
    found = place("uneven", alone, False, False, versions=lambda *_: 1, in_flight=lambda *_: 1)
    return Partition(found.ends[:-1], (1,) * given.devices, found.value, placement=found.devices)


def worth_moving(before: float, after: float, steps: int, move: float) -> bool:
    """Whether new cuts gain more, over so many steps, than moving the blocks costs; all in seconds."""
    return (before - after) * steps > move


@njit(cache=True)
def _in_order(until: Floats, speeds: Floats) -> tuple[float, Ints]:
    blocks, stages = len(until) - 1, len(speeds)
    worst = np.full((stages + 1, blocks + 1), np.inf)  # [k, i]: the blocks from i on, on the devices from k on
    then = np.zeros((stages + 1, blocks + 1), dtype=np.int64)
    worst[stages, blocks] = 0.0
    for k in range(stages - 1, -1, -1):
        for i in range(k, blocks - (stages - k) + 1):
            for j in range(i + 1, blocks - (stages - k - 1) + 1):
                own = (until[j] - until[i]) / speeds[k]
                if own >= worst[k, i]:
                    break  # longer stages are only slower
                total = max(own, worst[k + 1, j])
                if total < worst[k, i]:
                    worst[k, i], then[k, i] = total, j
    cuts, at = np.zeros(stages - 1, dtype=np.int64), 0
    for k in range(stages - 1):
        at = then[k, at]
        cuts[k] = at
    return worst[0, 0], cuts
