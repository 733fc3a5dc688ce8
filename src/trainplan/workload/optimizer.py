"""The optimizer of a part of a model: the factory sees the whole model, and what is elsewhere is taken out again.

A factory is a function of the (name, parameter) pairs of the whole model that can be trained, in the order of
`model.named_parameters()`; torch's optimizers take such pairs as they are. So it can sort parameters into groups by
name, by shape or by their place among the others, and every stage of every plan has the same groups in the same
order, some of them empty. A learning-rate scheduler then has the same state everywhere, and a checkpoint can be
resumed under any plan.

>>> def factory(named):
...     decay = [parameter for name, parameter in named if parameter.dim() > 1]
...     plain = [parameter for name, parameter in named if parameter.dim() == 1]
...     return torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
>>> whole = {"a.weight": stand_in((4, 4)), "a.bias": stand_in((4,)), "b.weight": stand_in((2, 4))}
>>> optimizer, groups = make(factory, whole, {"b.weight": nn.Parameter(torch.zeros(2, 4))})
>>> groups
(('a.weight', 'b.weight'), ('a.bias',))
>>> [len(group["params"]) for group in optimizer.param_groups]
[1, 0]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainplan.errors import InputError, ModelError, TrainplanError
from trainplan.workload.workload import Workload

Groups = tuple[tuple[str, ...], ...]  # names of the parameters of each group, of the whole model

_FORM = "a function of (name, parameter) pairs that returns a torch.optim.Optimizer of them"


def stand_in(shape: Iterable[int], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter that is elsewhere: its shape and type, without values."""
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def make(
    factory: Callable[[list[tuple[str, nn.Parameter]]], Any],
    whole: Mapping[str, nn.Parameter],
    ours: Mapping[str, nn.Parameter],
    in_part: Collection[str] = (),
) -> tuple[torch.optim.Optimizer, Groups]:
    """The optimizer of `ours`, some of the parameters of the `whole` model, and the names in each of its groups.

    Of those that are here `in_part` only, the factory sees the whole, and the optimizer gets what there is.
    """
    given = [(name, parameter if name in in_part else ours.get(name, parameter)) for name, parameter in whole.items()]
    try:
        optimizer = factory(given)
    except TrainplanError:
        raise
    except Exception as error:
        raise ModelError("making the optimizer", f"it raised {type(error).__name__}: {error}", _FORM) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError("making the optimizer", f"the function returned {type(optimizer).__name__}", _FORM)
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        why = "its step takes a closure, and runs the model several times; a plan's step runs it once"
        asked = f"training with {type(optimizer).__name__}"
        raise ModelError(asked, why, "an optimizer whose step() takes nothing") from None
    name_of = {parameter: name for name, parameter in given}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in name_of]
    if foreign:
        why = f"it holds {len(foreign)} tensors that it was not given, first of shape {tuple(foreign[0].shape)}"
        raise ModelError("making the optimizer", why, _FORM)
    groups = tuple(tuple(name_of[p] for p in group["params"]) for group in optimizer.param_groups)
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [ours[name] for name in names if name in ours]
        if "param_names" in group:  # torch keeps them where it was given pairs
            group["param_names"] = [name for name in names if name in ours]
    for name, parameter in given:
        if name not in ours or name in in_part:
            optimizer.state.pop(parameter, None)  # some make their state at once
    return optimizer, groups


def refuse_made(optimizer: Any, schedule: Any, name: str) -> None:
    """Refuse an optimizer or a scheduler that is made already: each rank makes its own, of its part of the model."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        usual = inspect.signature(kind).parameters
        said = {
            key: value
            for key, value in optimizer.defaults.items()
            if key == "lr" or (key in usual and value != usual[key].default)
        }
        words = "".join(f", {key}={value!r}" for key, value in said.items())
        why = "it has the parameters of one module, and every rank makes one for what it has of the model"
        raise InputError(
            f"optimizer={kind.__name__}(…) for {name}", why, f"optimizer=lambda named: {_spelled(kind)}(named{words})"
        )
    if schedule is not None and not callable(schedule):
        kind = type(schedule)
        why = "it has one optimizer, and every rank makes one for its own"
        instead = f"schedule=lambda optimizer: {_spelled(kind)}(optimizer, …)"
        raise InputError(f"schedule={kind.__name__}(…) for {name}", why, instead)


def _spelled(kind: type) -> str:
    """A class as one writes it: torch's optimizers and schedulers with where they are."""
    for module in (torch.optim, torch.optim.lr_scheduler):
        if getattr(module, kind.__name__, None) is kind:
            return f"{module.__name__}.{kind.__name__}"
    return kind.__name__


def scheduler_of(workload: Workload, optimizer: torch.optim.Optimizer) -> Any:
    """The workload's learning-rate scheduler, which the engine steps after every optimizer step; None without one."""
    if workload.schedule is None:
        return None
    scheduler = workload.schedule(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        why = "it is stepped by a loss that somebody evaluates, and the engine steps schedulers after every step"
        instead = (
            "a scheduler of the step, or in a loop of your own: for group in trainer.param_groups: group['lr'] = …"
        )
        raise ModelError("a ReduceLROnPlateau", why, instead)
    return scheduler
