"""PipeMare's partition: stages of equal weights, as far as that goes.

PipeMare (Yang et al., MLSys 2021) reasons about a pipeline so fine that every stage holds about the same number of
weights: the delay of a stage is then proportional to its place. So it splits weights evenly, whatever they cost to
compute: the bottleneck partition with bytes for seconds, exact, O(blocks² · stages).

>>> from trainplan.solve.partition.instance import P1, on
>>> found = pipemare(on(P1, devices=3))
>>> found.cuts, found.value, found.unit                         # 1+2 | 8 | 1+2+6
((2, 3), 9.0, 'bytes a stage')
"""

from __future__ import annotations

from trainplan.solve.partition.answer import WEIGHTS, Partition
from trainplan.solve.partition.bottleneck import bottleneck, slowest
from trainplan.solve.partition.instance import Instance, enough_blocks


def pipemare(given: Instance) -> Partition:
    """One stage a device; the heaviest as light as can be, then the one with the least traffic."""
    enough_blocks("pipemare", given, given.devices)
    cuts = bottleneck(given.weights, given.devices, given.boundary) or ()
    return Partition(cuts, (1,) * given.devices, slowest(given.weights, cuts), WEIGHTS)
