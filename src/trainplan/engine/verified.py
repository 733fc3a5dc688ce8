"""Is what ranks will run the model? Its capture is held against eager, unless that was done when it was profiled."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from trainplan.profile import machine
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.verify import verify
from trainplan.units import gib
from trainplan.workload.modes import in_training
from trainplan.workload.workload import Workload

_CPU = torch.device("cpu")
COPIES = 4  # of the weights: the model's, the chain's gradients and eager's
SHARE = 0.8  # of the free memory may be used for them


def hold_against_eager(captured: Captured, workload: Workload, weights: int) -> None:
    """On one rank, once, on the host: the others run the same chain. `weights`: bytes of them. A model that does not
    fit the host is run without, and said to be; so is what its capture does not keep (`Captured.notes`)."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for note in captured.notes:
        warnings.warn(f"{workload.name}: {note}", stacklevel=2)
    free = machine.free_bytes(_CPU) * SHARE
    if COPIES * weights > free:
        needs = f"that needs {gib(COPIES * weights)} of the host's memory, and {gib(int(free))} are free"
        warnings.warn(f"{workload.name} is not held against eager: {needs}", stacklevel=2)
        return
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = workload.build().to(_CPU)
    verify(captured, in_training(model), workload.inputs(2, 0), workload.loss, inputs=workload.inputs)
