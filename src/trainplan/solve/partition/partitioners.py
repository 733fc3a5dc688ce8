"""The partitioners by name: an instance in, a partition out.

Every one takes an `Instance` and, where its paper has them, options with usual values. Those in `HEURISTICS` do not
always find the least of what they minimise; how far off they are on small instances is measured by
benchmarks/partitioners.py. (TeraPipe's slices cut sequences, not chains: `terapipe.py`.)

>>> from trainplan.solve.partition.instance import P1, on
>>> {name: PARTITIONERS[name](on(P1, devices=3, rate=1.0, micro=6)).cuts for name in ("even", "pipedream", "dapple")}
{'even': (2, 4), 'pipedream': (4,), 'dapple': (5,)}
"""

from __future__ import annotations

from collections.abc import Callable

from trainplan.solve.partition.answer import Partition
from trainplan.solve.partition.bapipe import bapipe
from trainplan.solve.partition.bottleneck import bottleneck, slowest
from trainplan.solve.partition.chimera import chimera
from trainplan.solve.partition.dapple import dapple, dapple_formula
from trainplan.solve.partition.even import even
from trainplan.solve.partition.hetpipe import hetpipe
from trainplan.solve.partition.instance import Instance, alike, enough_blocks
from trainplan.solve.partition.lamp import lamp
from trainplan.solve.partition.pipe_torch import pipe_torch
from trainplan.solve.partition.pipedream import pipedream
from trainplan.solve.partition.pipedream_code import pipedream_code
from trainplan.solve.partition.pipemare import pipemare
from trainplan.solve.partition.piper import piper
from trainplan.solve.partition.torchgpipe import corrected, torchgpipe
from trainplan.solve.partition.two_buffered import two_buffered
from trainplan.solve.partition.uneven import elasticpipe, uneven


def balanced(given: Instance) -> Partition:
    """The bottleneck partition, one stage a device."""
    enough_blocks("bottleneck", given, given.devices)
    cuts = bottleneck(given.seconds, given.devices, given.boundary) or ()
    return Partition(cuts, (1,) * given.devices, slowest(given.seconds, cuts) / alike("bottleneck", given))


PARTITIONERS: dict[str, Callable[..., Partition]] = {
    "bottleneck": balanced,
    "torchgpipe": torchgpipe,
    "torchgpipe-corrected": corrected,
    "even": even,
    "elasticpipe": elasticpipe,
    "uneven": uneven,
    "pipedream": pipedream,
    "pipedream-code": pipedream_code,
    "dapple": dapple,
    "dapple-formula": dapple_formula,
    "chimera": chimera,
    "piper": piper,
    "2bw": two_buffered,
    "hetpipe": hetpipe,
    "pipe-torch": pipe_torch,
    "bapipe": bapipe,
    "lamp": lamp,
    "pipemare": pipemare,
}

# What they choose beside the cuts, as fields of a plan: for those a request leaves the choice to them. All others cut
# for so many stages as are asked for, on the devices that these stages have.
CHOOSES: dict[str, tuple[str, ...]] = {
    "uneven": ("placement",),
    "hetpipe": ("placement",),
    "bapipe": ("schedule",),
    **dict.fromkeys(("pipedream", "pipedream-code", "dapple", "dapple-formula", "pipe-torch"), ("pp", "dp")),
    **dict.fromkeys(("piper", "2bw"), ("pp", "dp", "recompute")),
    "chimera": ("pp", "dp", "micro", "schedule"),
}

# Of systems that do not wait for all micro-batches before they update: only their partition is here.
ASYNCHRONOUS = ("pipedream", "pipedream-code", "2bw", "pipemare", "hetpipe", "pipe-torch")

# Not always the best of what they minimise (2bw: of all plans with its costs; the others: of what their value says).
HEURISTICS = ("torchgpipe", "torchgpipe-corrected", "dapple", "dapple-formula", "piper", "2bw", "bapipe", "lamp")
