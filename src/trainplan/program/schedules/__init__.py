"""Orders of work: pure functions of (stages, micro-batches) to compute-only lists, one file each.

A list is an array with one row an operation: kind, stage, micro-batch. Sending, recomputing, exchanging gradients and
stepping are added by the passes in `program.lower`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainplan.program.schedules.gpipe import gpipe
from trainplan.program.schedules.naive import naive
from trainplan.program.schedules.one_forward_one_backward import one_forward_one_backward

Order = NDArray[np.int64]
SCHEDULES: dict[str, Callable[[int, int], list[Order]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
