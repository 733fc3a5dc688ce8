"""Common losses: a mean, and what it is the mean over.

The loss of a part of a batch is weighted by its `count`, so a loss over tokens that count may be split anywhere:

>>> import torch
>>> from trainplan.workload.batch import split
>>> from trainplan.workload.workload import Batch
>>> loss = token_cross_entropy()
>>> batch = Batch(2, args=(torch.randn(2, 3, 5),), targets=torch.tensor([[1, 2, 3], [4, -100, -100]]))
>>> whole = loss.function(batch.args[0], batch.targets)
>>> parts = [(loss.function(p.args[0], p.targets), loss.count(p)) for p in split(batch, [1, 1])]
>>> [count for _, count in parts], torch.allclose(whole, sum(mean * count for mean, count in parts) / 4)
([3, 1], True)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, nearest
from trainplan.workload.call import Call, call
from trainplan.workload.workload import Batch, Loss

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORE = -100  # the label that does not count, as in torch and transformers


def cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """Classification: logits (samples, classes) against labels (samples), mean over samples."""
    import torch.nn.functional as F

    return Loss(call(F.cross_entropy, label_smoothing=label_smoothing), count_samples)


def token_cross_entropy(ignore_index: int = IGNORE) -> Loss:
    """Language: logits (samples, length, vocabulary) against labels (samples, length), mean over labels that count."""
    options = {"ignore_index": ignore_index}
    return Loss(call(_token_cross_entropy, **options), call(count_tokens, **options), mean_over="tokens")


def mse() -> Loss:
    """Regression: squared error, mean over samples (and over the values of each)."""
    import torch.nn.functional as F

    return Loss(F.mse_loss, count_samples)


LOSSES: dict[str, Callable[[], Loss]] = {
    "cross_entropy": cross_entropy,
    "token_cross_entropy": token_cross_entropy,
    "mse": mse,
}


def as_loss(value: Any, where: str) -> Loss:
    """A `Loss` from a `Loss`, one of the words above, or any function (output, targets) → mean over samples."""
    if isinstance(value, Loss):
        return replace(value, function=_of_module(value.function, where))
    if isinstance(value, str):
        if value not in LOSSES:
            raise InputError(f"loss {value!r} of {where}", "it is not one we know", nearest(value, LOSSES))
        return LOSSES[value]()
    if callable(value):
        weighs = _weighs_classes(value)
        return Loss(
            _of_module(value, where), call(sum_weights, module=value) if weighs else count_samples,
            mean_over="weights" if weighs else "samples",
        )  # fmt: skip
    raise InputError(
        f"loss of {where}",
        f"a Loss, a function or a word was expected, found {type(value).__name__}",
        f"one of {', '.join(LOSSES)}, or a function of (output, targets)",
    )


def in_type(loss: Loss, dtype: torch.dtype) -> Loss:
    """The loss with the numbers that its module holds in another type."""
    function = loss.function
    if not (isinstance(function, Call) and function.function is where_output_is):
        return loss
    module = copy.deepcopy(function.options["module"]).to(dtype)
    return replace(loss, function=call(where_output_is, module=module))


def _of_module(function: Callable[[Any, Any], torch.Tensor], where: str) -> Callable[[Any, Any], torch.Tensor]:
    from torch import nn

    if not isinstance(function, nn.Module):
        return function
    learned = [name for name, parameter in function.named_parameters() if parameter.requires_grad]
    if learned:
        raise InputError(
            f"loss of {where}",
            f"it has parameters of its own ({', '.join(learned[:3])}) that would be in no optimizer and no checkpoint",
            "making them the model's, whose forward returns them beside its output, or requires_grad_(False)",
        )
    return call(where_output_is, module=function)


def _weighs_classes(function: Callable[[Any, Any], torch.Tensor]) -> bool:
    """Whether it is torch's mean over the weights of the samples' classes, which is none over samples."""
    from torch import nn

    if not isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss):
        return False
    return function.weight is not None and function.reduction == "mean"


def sum_weights(batch: Batch, module: nn.CrossEntropyLoss | nn.NLLLoss) -> float:
    """What torch divides by: the weights of the labels that count; of classes in shares, the samples."""
    if batch.targets.is_floating_point() or module.weight is None:
        return batch.samples
    labels = batch.targets[batch.targets != module.ignore_index]
    return float(module.weight.to(labels.device)[labels].sum())


def where_output_is(output: Any, targets: Any, module: nn.Module) -> torch.Tensor:
    """The loss of a module whose tensors (weights of classes) were made on the CPU, wherever the output is."""
    from torch import Tensor
    from torch.func import functional_call
    from torch.utils import _pytree as pytree

    own = dict([*module.named_parameters(), *module.named_buffers()])
    device = next((leaf.device for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if device is None or all(tensor.device == device for tensor in own.values()):
        return module(output, targets)
    if device.type == "meta":  # their values stay
        moved = {name: tensor.to(device) for name, tensor in own.items()}
        return functional_call(module, moved, (output, targets))
    return module.to(device)(output, targets)


def count_samples(batch: Batch) -> int:
    return batch.samples


def count_tokens(batch: Batch, ignore_index: int = IGNORE) -> int:
    return int((batch.targets != ignore_index).sum())


def _token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    import torch.nn.functional as F

    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")
    # Not reduction="mean": a part in which no token counts would be 0/0, and weighted by 0 still be nan.
    return total / (labels != ignore_index).sum().clamp(min=1)
