"""LAMP's partition: a GPipe balanced by time, or by memory where time leaves too little of it.

LAMP (Zhu et al., MICCAI 2020) cuts large 3-D U-Nets into a GPipe; skip connections are carried along, so they count in
every boundary that they cross. Its partition is torchgpipe's, from measured seconds or measured bytes; as the goal of
both is the least maximum, we take the exact `bottleneck.py`: by seconds, and if a stage then exceeds its memory, by
bytes

    weights + states + micro-batches · saved            (GPipe holds all micro-batches of a batch)

which fits if anything does, since it is exact. O(blocks² · stages).

>>> from trainplan.solve.partition.instance import P2, on
>>> lamp(on(P2, devices=2)).cuts, lamp(on(P2, devices=2, memory=20)).cuts, lamp(on(P2, devices=2, memory=20)).notes
((4,), (2,), ('balanced by memory: by time a stage takes 26 of 20 bytes',))
"""

from __future__ import annotations

import numpy as np

from trainplan.errors import PlanError
from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.bottleneck import bottleneck, slowest
from trainplan.solve.partition.instance import Instance, alike, enough_blocks


def lamp(given: Instance) -> Partition:
    """One stage a device, all devices alike."""
    enough_blocks("lamp", given, given.devices)
    speed, limit = alike("lamp", given), min(given.memory)
    need = np.array(given.weights) + np.array(given.states) + given.micro * np.array(given.saved)
    by_time = bottleneck(given.seconds, given.devices, given.boundary) or ()
    cuts, notes = by_time, list[str]()
    if slowest(need, by_time) > limit:
        cuts = bottleneck(need, given.devices, given.boundary) or ()
        notes.append(f"balanced by memory: by time a stage takes {slowest(need, by_time):.0f} of {limit:.0f} bytes")
    if slowest(need, cuts) > limit:
        why = f"the largest stage takes at least {slowest(need, cuts):,.0f} bytes, and a device has {limit:,.0f}"
        raise PlanError(f"partition=lamp on {given.devices} devices", why, "more devices, or fewer micro-batches")
    return Partition(cuts, (1,) * given.devices, slowest(given.seconds, cuts) / speed, notes=tuple(notes))
