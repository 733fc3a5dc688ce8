"""Orders of work: pure functions of a `Size` (ranks, micro-batches, chunks …) to compute-only lists, one file each.

Sending, recomputing, exchanging gradients and stepping are added by the passes in `program.lower`.
"""

from __future__ import annotations

from collections.abc import Callable

from trainplan.program.schedules.bidirectional import chimera, chimera_doubled, gems
from trainplan.program.schedules.gpipe import gpipe
from trainplan.program.schedules.interleaved import interleaved
from trainplan.program.schedules.naive import naive
from trainplan.program.schedules.one_forward_one_backward import (
    early_one_forward_one_backward,
    one_forward_one_backward,
)
from trainplan.program.schedules.order import Order, Size
from trainplan.program.schedules.zb_v import zb_v
from trainplan.program.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Callable[[Size], list[Order]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "looped": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b-early": early_one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "gems": gems,
    "chimera": chimera,
    "chimera-doubled": chimera_doubled,
}
