"""The optimizer: seconds of a step for each block's parameters, and the bytes of its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainplan.profile.capture.stage import Stage
from trainplan.profile.memory import watch
from trainplan.profile.subject import Subject, first_used
from trainplan.workload.optimizer import make
from trainplan.workload.workload import Workload

REPEATS = 5


def resting(workload: Workload, whole: dict[str, nn.Parameter], ours: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The workload's optimizer with learning rate 0: it does all its work, and the weights stay what they are.

    (Many steps on the same random batch would drive weights to infinity, or to numbers so small that a CPU is slow
    with them.)
    """
    optimizer, _ = make(workload.optimizer, whole, ours)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state.

    >>> weight = nn.Parameter(torch.ones(4)); weight.grad = torch.ones(4)
    >>> adam = torch.optim.Adam([weight]); adam.step()
    >>> state_bytes(adam)  # two averages, and the number of the step
    36
    """
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def time_updates(subject: Subject, stage: Stage, index: int) -> None:
    """Time the optimizer on the parameters that are first used by one block, and count its state."""
    names = first_used(subject.captured, index, subject.trained)
    ours = {name: p for name, p in stage.named_parameters() if name in names}
    parameters = list(ours.values())
    if not parameters:
        return
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = resting(subject.workload, subject.captured.stand_ins(), ours)
    optimizer.step()  # makes the state
    subject.optimizer = type(optimizer).__name__.lower()
    subject.state_bytes += state_bytes(optimizer)
    with watch(subject.device) as seen, seen.part("update"):
        optimizer.step()
    level = seen.levels["update"]
    subject.update_workspace[index] = level.peak - level.start
    what = ("update", index)
    subject.clock.time(what, optimizer.step)
    for _ in range(REPEATS):
        subject.look()  # which also puts other things into the caches, as training does
        subject.readings.note(what, subject.clock.time(what, optimizer.step))
    subject.look()
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
