"""Recurrent layers as a GPU runs them: all layers of a module, there and back, are one operator each of cudnn.

A CPU runs an LSTM layer by layer and other recurrences number by number, and so would fake tensors. These two stand
for cudnn's: what they read, write and keep is told here, what their products are in `composite`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainplan.profile.composite import GATES

aten = torch.ops.aten


@torch.library.custom_op("trainplan::_cudnn_rnn", mutates_args=())
def _there(given: Tensor, weights: list[Tensor], kept: list[Tensor], sizes: list[int]) -> list[Tensor]:
    raise NotImplementedError("it has no values")


@_there.register_fake
def _(given: Tensor, weights: list[Tensor], kept: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """The output, the last states, and what backward needs beside them."""
    steps, batch, _, hidden, gates, layers, directions, out = sizes
    samples_first = given.shape[0] == batch and given.shape[1] == steps
    ends = (batch, steps) if samples_first else (steps, batch)
    # Of every step the gates and, of an LSTM, the cell; of lower layers their output, too. (cudnn does not say what
    # is in its reserve: this is what any backward pass needs.)
    numbers = steps * batch * directions * (layers * hidden * (gates + (gates == GATES["lstm"])) + (layers - 1) * out)
    output = given.new_empty((*ends, directions * out))
    return [output, *(state.new_empty(state.shape) for state in kept), given.new_empty((numbers,))]


@torch.library.custom_op("trainplan::_cudnn_rnn_backward", mutates_args=())
def _back(
    given: Tensor, weights: list[Tensor], kept: list[Tensor], output: Tensor, gradient: Tensor, reserve: Tensor,
    sizes: list[int],
) -> list[Tensor]:  # fmt: skip
    raise NotImplementedError("it has no values")


@_back.register_fake
def _(
    given: Tensor, weights: list[Tensor], kept: list[Tensor], output: Tensor, gradient: Tensor, reserve: Tensor,
    sizes: list[int],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor in (given, *kept, *weights)]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: list[int], states: int, given: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        kept, weights = list(rest[:states]), list(rest[states:])
        output, *ends, reserve = _there(given, weights, kept, sizes)
        ctx.sizes, ctx.states = sizes, states
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(given, output, reserve, *rest)
        return (output, *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        given, output, reserve, *rest = ctx.saved_tensors
        kept, weights = rest[: ctx.states], rest[ctx.states :]
        gradient = next(gradient for gradient in gradients if gradient is not None)
        return (None, None, *_back(given, weights, kept, output, gradient, reserve, ctx.sizes))


def recurrent(
    name: str, given: Tensor, state: Any, weights: list[Tensor], biased: bool, layers: int, dropout: float,
    training: bool, both: bool, samples_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `lstm`, `gru`, `rnn_tanh` and `rnn_relu` return, by cudnn's operators; the arguments are theirs."""
    kept = [state] if isinstance(state, Tensor) else list(state)
    gates, directions = GATES[name], 2 if both else 1
    hidden, out = weights[0].shape[0] // gates, kept[0].shape[-1]
    batch, steps = given.shape[:2] if samples_first else given.shape[1::-1]
    sizes = [steps, batch, given.shape[-1], hidden, gates, layers, directions, out]
    found: tuple[Tensor, ...] = _Recurrence.apply(sizes, len(kept), given, *kept, *weights)
    return found


def described(name: str, args: Any) -> tuple[int, ...]:
    """`Op.shape` of a recurrent operator: cudnn's, or that of a CPU, which is one layer in one direction."""
    if name.startswith("_cudnn"):
        return tuple(args[-1])
    given, first, second = args[0], args[1], args[2]
    samples_first = args[21 if name.endswith("backward") else 14]
    batch, steps = given.shape[:2] if samples_first else given.shape[1::-1]
    hidden = second.shape[1]
    return (steps, batch, first.shape[1], hidden, first.shape[0] // hidden, 1, 1, hidden)
