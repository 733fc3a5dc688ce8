"""A workload from a module that is there already, in Python: `load(model, inputs=…, loss=…)`.

>>> import torch
>>> example = (torch.zeros(2, 3), torch.tensor([0, 1]))
>>> workload = load_module(torch.nn.Linear(3, 2), inputs=example, loss="cross_entropy", batch=8)
>>> workload.name, workload.inputs(3, seed=0).args[0].shape
('module:Linear', torch.Size([3, 3]))
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trainplan.errors import InputError, ModelError, nearest
from trainplan.workload import options
from trainplan.workload.batch import as_batch, take, tensors
from trainplan.workload.call import call
from trainplan.workload.losses import as_loss
from trainplan.workload.optimizer import refuse_made
from trainplan.workload.options import Option
from trainplan.workload.random_numbers import random_numbers
from trainplan.workload.training import OPTIMIZER_KEYS, named_optimizer
from trainplan.workload.workload import Batch, Workload

BATCH, EPOCH = 32, 100_000  # samples, where nothing is said: an epoch then only scales what is printed
_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()  # function → places of its batches that have no row a sample
_EXTRA = ("sample", "tokens_per_sample", "dataset", "schedule", "feed")


def load_module(model: Any, **given: Any) -> Workload:
    """A workload of a module, from the same fields as a user's function returns (see `user.py`)."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a workload from {type(model).__name__}", "neither a text nor an nn.Module", 'load("resnet18:cifar10")'
        )
    name = f"module:{type(model).__name__}"
    return assemble(name, call(copy_of, model=model), given)


def assemble(name: str, build: Callable[[], nn.Module], given: dict[str, Any]) -> Workload:
    """A workload from what a user gives: `inputs` and `loss`, and anything that has a default."""
    known = ("inputs", "loss", "batch", "samples_per_epoch", "clip_norm", *OPTIMIZER_KEYS, *_EXTRA)
    for key in given:
        if key not in known:
            raise InputError(f"{key!r} of workload {name}", "a workload has no such field", nearest(key, known))
    for key in ("inputs", "loss"):
        if given.get(key) is None:
            raise ModelError(f"workload {name}", f"it has no {key}", f"giving {key}=; see trainplan.workload.user")
    inputs = as_inputs(given["inputs"], name)
    batch = options.value(given.get("batch", BATCH), Option("batch", BATCH, minimum=1), name)
    epoch = options.value(given.get("samples_per_epoch", EPOCH), Option("samples_per_epoch", EPOCH, minimum=1), name)
    settings = {key: given[key] for key in OPTIMIZER_KEYS if given.get(key) is not None}
    optimizer = settings.get("optimizer", "adamw")
    refuse_made(optimizer, given.get("schedule"), name)
    if not callable(optimizer):
        optimizer = named_optimizer({"optimizer": "adamw", **settings}, name)[0]
    elif len(settings) > 1:
        key = next(key for key in settings if key != "optimizer")
        raise InputError(f"{key}= for {name}", "its optimizer is a function, which sets that itself", "optimizer=adamw")
    return Workload(
        name=name,
        build=build,
        inputs=inputs,
        loss=as_loss(given["loss"], name),
        optimizer=optimizer,
        batch=batch,
        samples_per_epoch=epoch,
        epoch_assumed="samples_per_epoch" not in given,
        clip_norm=options.value(given.get("clip_norm", 0.0), Option("clip_norm", 0.0), name),
        **{key: given[key] for key in _EXTRA if given.get(key) is not None},
    )


def as_inputs(value: Any, name: str) -> Callable[[int, int], Batch]:
    """A function (samples, seed) → `Batch` from such a function, one of samples alone, or an example batch."""
    if callable(value):
        return call(checked_inputs, function=value, name=name, seeded=_takes_seed(value))
    return call(rows_of, example=as_batch(value))


def _takes_seed(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(1, 0)
    except TypeError:
        return False
    return True


def checked_inputs(samples: int, seed: int, function: Callable[..., Any], name: str, seeded: bool) -> Batch:
    """What the user's function gives, as a batch of as many samples as were asked for.

    Every rank makes the batch for itself, so it must be the same one, whether or not the function minds its seed.
    """
    batch = _made(samples, seed, function, seeded)
    if batch.samples != samples:
        asked, why = f"inputs of {name} for {samples} samples", f"the function gave {batch.samples}"
        raise ModelError(asked, why, "tensors whose first dimension is the number of samples that it is called with")
    if function not in _shared:
        _shared[function] = _shared_places(function, seeded)
    return as_batch(batch, _shared[function])


def _made(samples: int, seed: int, function: Callable[..., Any], seeded: bool) -> Batch:
    with random_numbers(seed):
        return as_batch(function(samples, seed) if seeded else function(samples))


def _shared_places(function: Callable[..., Any], seeded: bool) -> frozenset[str]:
    """The places of tensors whose first dimension does not grow with the samples: a mask of 8 × 8 in a batch of 8."""
    try:
        two, three = (_made(samples, 0, function, seeded) for samples in (2, 3))
    except Exception:  # a function that makes no such batches: one that is asked for says what is wrong
        return frozenset()
    if (two.samples, three.samples) != (2, 3):
        return frozenset()
    there, more = tensors(two), tensors(three)
    both = [place for place in there if place in more and there[place].dim() and more[place].dim()]
    return frozenset(place for place in both if there[place].shape[0] == more[place].shape[0])


def rows_of(samples: int, seed: int, example: Batch) -> Batch:
    """Rows of an example, over and over, from a place that depends on the seed."""
    return take(example, [(seed + row) % example.samples for row in range(samples)])


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of the module; on the meta device, where that is the default, without copying its weights."""
    computed = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    if computed:
        why = f"{computed[0]!r} is computed from parameters, as torch.nn.utils.weight_norm does, and cannot be copied"
        instead = "torch.nn.utils.parametrizations.weight_norm, or a function in a file that builds the model"
        raise ModelError(f"a copy of {type(model).__name__}", why, instead)
    if torch.get_default_device().type != "meta":
        return copy.deepcopy(model)
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty  # by identity, so tied weights stay tied
    return copy.deepcopy(model, memo)
