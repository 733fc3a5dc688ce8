"""The loss of a model, run before there are values.

Blocks and operators of a step are found on tensors that have shapes and no memory, and most losses run on such. One
that holds a tensor of its own (the weights of classes) runs on fake tensors, which mix with real ones. One that looks
at a value (logs it, branches on it, picks what a mask lets through) needs values, and is given some on the CPU: the
example's own targets, and random numbers between 0 and 1 for the model's output, which losses of probabilities take,
too. So what is found is what a first step might do; a step that is run calls the loss on what there is then.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from trainplan.errors import ModelError
from trainplan.profile import machine
from trainplan.units import gib
from trainplan.workload.random_numbers import random_numbers
from trainplan.workload.workload import Loss

Kind = Literal["meta", "fake", "real"]
KINDS: tuple[Kind, ...] = ("meta", "fake", "real")  # in the order of what they cost
COPIES = 4  # of the output: a loss makes one or two, and gradients of them
SHARE = 0.5  # of the free memory may be used for them
Found = TypeVar("Found")


def tried(output: Any, targets: Any, work: Callable[[Any, Any], Found]) -> tuple[Kind, Found]:
    """What `work` gives for tensors that stand in for an output and for targets, and the first kind that it runs on.

    `output` has shapes alone; `targets` have values, if the loss is to see any.
    """
    last: Exception | None = None
    for kind in KINDS:
        try:
            with _disable_current_modes(), _standing_in(kind, output, targets) as given:
                return kind, work(*given)
        except ModelError:
            raise
        except Exception as error:
            last = error
    assert last is not None  # there are kinds
    raise last


def without_values(loss: Loss, targets: Any) -> Loss:
    """The same loss where operators are traced on fake tensors; `targets` are the batch's, with values."""
    return replace(loss, function=partial(_traced, loss, targets))


def checked(value: Any) -> Tensor:
    """What a loss gives, if backward can begin at it."""
    if not isinstance(value, Tensor):
        raise ModelError("the loss", f"it is a {type(value).__name__}", "a tensor of one number (without .item())")
    if value.numel() != 1:
        raise ModelError("the loss", f"it has the shape {tuple(value.shape)}, and is no single number", "its mean")
    return value


def _traced(loss: Loss, values: Any, output: Any, fakes: Any) -> Tensor:
    with saved_tensors_hooks(_same, _same):  # whoever counts what is saved counts this once
        kind, _ = tried(output, values, loss.function)
    if kind != "real":
        return checked(loss.function(output, fakes))
    leaves, spec = pytree.tree_flatten(output)
    spots = [spot for spot, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # Whatever else watches (who writes operators down) goes on watching.
    with unset_fake_temporarily(), random_numbers(0), redirect_stdout(io.StringIO()):
        for spot, value in zip(spots, _Valued.apply(*(leaves[spot] for spot in spots)), strict=True):
            leaves[spot] = value
        return checked(loss.function(pytree.tree_unflatten(leaves, spec), values))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Valued(torch.autograd.Function):
    """Tensors with values in place of fake ones; their gradients go to these."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        with _disable_current_modes():
            return tuple(_like(tensor, "real") for tensor in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


@contextmanager
def _standing_in(kind: Kind, output: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    made = partial(pytree.tree_map_only, Tensor)
    if kind == "meta":
        yield made(_leaf, output), made(lambda tensor: tensor.to("meta"), targets)
    elif kind == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield made(partial(_leaf, kind=kind), output), made(mode.from_tensor, targets)
    else:
        _room_for(output)
        # Of made-up values nobody wants to read what the loss prints.
        with random_numbers(0), redirect_stdout(io.StringIO()):
            yield made(partial(_leaf, kind=kind), output), targets


def _leaf(tensor: Tensor, kind: Kind = "meta") -> Tensor:
    return _like(tensor, kind).requires_grad_(tensor.requires_grad)


def _like(tensor: Tensor, kind: Kind) -> Tensor:
    device = "meta" if kind == "meta" else "cpu"
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if kind != "real":
        return made
    with torch.no_grad():
        return made.uniform_() if made.is_floating_point() else made.zero_()


def _room_for(output: Any) -> None:
    """Outputs may be gigabytes (logits of many tokens): better no answer than a machine without memory."""
    needs = COPIES * sum(leaf.nbytes for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    free = machine.free_bytes(torch.device("cpu")) * SHARE
    if needs > free:
        why = f"it looks at values, which need {gib(needs)} of the host's memory, and {gib(int(free))} may be used"
        raise ModelError("the loss", why, "a loss that does not look at values, or fewer tokens a sample")
