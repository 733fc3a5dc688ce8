"""Is the loss of a batch the mean of its parts' losses, each weighted by what it counts?

Wherever a batch is split, by replicas or into micro-batches, that mean is what is trained. A sum would be weighted
wrongly, and so would a mean over labels that count where samples were counted; on all sides of a comparison alike, so
that nothing else would show it. Nor have the parts of a loss that mixes samples (a contrast of each with all others)
the whole for their mean: whoever means that of the parts says so (`Loss.mixes_samples`), and every answer tells it.

>>> import torch.nn.functional as F
>>> from trainplan.workload.losses import count_samples, count_tokens
>>> batch = Batch(4, targets=torch.tensor([0, -100, 1, 1]))  # one of its labels does not count
>>> hold_to_mean(torch.eye(4), batch, Loss(F.cross_entropy, count_tokens, mean_over="tokens"))
>>> hold_to_mean(torch.eye(4), batch, Loss(F.cross_entropy, count_samples))  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
trainplan.errors.ModelError: the loss (cross_entropy): it is 1.41 of 4 samples, and not the mean ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.workload.batch import split, take
from trainplan.workload.workload import Batch, Loss

SAMPLES = 8  # of a batch on whose targets a loss is held to its mean
ROOM = 2**24  # numbers of outputs that are made for that
# Allowed difference, as a share of the largest of the losses: what numbers of the output's type are rounded by.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5}
ROUNDING_OF_16_BITS = 2e-2

Inputs = Callable[[int, int], Batch]  # (samples, seed) → a batch
Pair = tuple[Any, Batch]  # the output of some samples, and these


def hold_to_mean(
    output: Any, batch: Batch, loss: Loss, inputs: Inputs | None = None, run: Callable[[Batch], Any] | None = None
) -> None:
    """Raise `ModelError` where the loss is no mean over what it says.

    Where the output has a row a sample, these rows are shared out, and repeated for the targets of a wider batch of
    `inputs`. Where it has not (a model that returns its own loss), `run` gives the output of some samples.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if loss.mixes_samples or batch.samples < 2 or not leaves:
        return
    exact = max(ROUNDING.get(leaf.dtype, ROUNDING_OF_16_BITS) for leaf in leaves)
    rows = Batch(batch.samples, (output,))
    if all(leaf.dim() and leaf.shape[0] == batch.samples for leaf in leaves):
        # Where the wider batch has other shapes (is padded to its own longest sample), the narrow one has to do.
        for targets in (_wider(batch, sum(leaf.numel() for leaf in leaves), inputs), batch):
            repeated = take(rows, [row % batch.samples for row in range(targets.samples)])
            if _judged(loss, _parts(repeated, targets), exact):
                return
    elif run is not None:
        parts = split(batch, _sizes(batch.samples))
        try:
            _judged(loss, [(run(part), part) for part in (batch, *parts)], exact)
        except ModelError:
            raise
        except Exception:  # a model that takes no other number of samples says so when it is split
            return


def _wider(batch: Batch, numbers: int, inputs: Inputs | None) -> Batch:
    """A batch with more targets than this, as many as its outputs' numbers leave room for."""
    samples = min(SAMPLES, ROOM * batch.samples // max(1, numbers))
    return batch if inputs is None or samples <= batch.samples else inputs(samples, 0)


def _sizes(samples: int) -> list[int]:
    return [1, 1, samples - 2] if samples > 2 else [1, 1]


def _parts(outputs: Batch, targets: Batch) -> list[Pair]:
    """The whole, and its parts: one sample, another, and the rest."""
    sizes = _sizes(targets.samples)
    pairs = zip((outputs, *split(outputs, sizes)), (targets, *split(targets, sizes)), strict=True)
    return [(output.args[0], target) for output, target in pairs]


def _judged(loss: Loss, pairs: list[Pair], exact: float) -> bool:
    """Whether it could be judged; `ModelError` if the whole, which is the first of them, is not its parts' mean."""
    try:
        with torch.no_grad():
            whole, *each = [float(loss.function(output, batch.targets)) for output, batch in pairs]
            again = float(loss.function(pairs[0][0], pairs[0][1].targets))
        counts = [float(loss.count(batch)) for _, batch in pairs[1:]]
    except Exception:  # the user's code, on samples that it was not written for: it says so when it is trained on them
        return False
    counted = [(value, count) for value, count in zip(each, counts, strict=True) if count]
    if whole != again or not counted or not math.isfinite(whole):
        return False
    mean = sum(value * count for value, count in counted) / sum(count for _, count in counted)
    allowed = exact * max(abs(value) for value in (whole, *each))
    if abs(whole - mean) <= allowed:  # not so where one is not a number
        return True
    asked = f"the loss ({_name(loss.function)})"
    parts = ", ".join(f"{value:.4g}" for value in each)
    samples = ", ".join(str(batch.samples) for _, batch in pairs[1:])
    if abs(whole - sum(each)) <= allowed:
        why = f"it is a sum over samples: {whole:.4g} of {pairs[0][1].samples}, whose parts of {samples} have {parts}"
        raise ModelError(asked, why, "their mean (reduction='mean')")
    weights = ", ".join(f"{count:g}" for count in counts)
    why = (
        f"it is {whole:.4g} of {pairs[0][1].samples} samples, and not the mean over {loss.mean_over} of its parts: "
        f"{parts} of {samples}, weighted by {weights}, are {mean:.4g}. Any plan that splits a batch would train that"
    )
    instead = (
        "trainplan.Loss(function, count, mean_over='tokens') where it is a mean over what counts (`count` of a batch "
        "is what it divides by), or Loss(…, mixes_samples=True) where the mean of the parts' losses is meant"
    )
    raise ModelError(asked, why, instead)


def _name(function: Any) -> str:
    """What the user calls it.

    >>> _name(torch.nn.functional.l1_loss)
    'l1_loss'
    """
    inner = getattr(function, "options", {}).get("module", function)
    return getattr(inner, "__name__", None) or type(inner).__name__
