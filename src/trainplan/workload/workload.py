"""What is trained: model, inputs, loss, optimizer, batch and epoch.

A `Workload` holds functions, not tensors: `build()` makes the model wherever it is called (on the meta device to look
at it, on a worker to train it), `inputs(n)` makes a batch of n samples. So it travels to a worker process as its
`name`, which `workload.load.load` turns back into the same workload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class Batch:
    """Some samples: the model's arguments, and what the loss compares its output with.

    Every tensor in `args`, `kwargs` and `targets` whose first dimension equals `samples` is split when the batch is
    split; everything else (a temperature, a shared mask) goes along whole, and so do the tensors in the places that are
    `shared` (named as `batch.tensors` names them), whose first dimension may be as long by chance.
    """

    samples: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Any = None
    shared: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Loss:
    """A mean, and what it is the mean over.

    `function(output, targets)` is the mean loss of the samples that it is given. `count(batch)` is the number that
    this mean divides by: samples, tokens that count (labels that are not ignored), weights of classes. Parts of a
    batch are weighted by their count, so that any split of a batch gives the gradient of the whole.
    """

    function: Callable[[Any, Any], torch.Tensor]
    count: Callable[[Batch], float]
    mean_over: str = "samples"  # "samples": count is the number of samples, known beforehand; else it is counted
    mixes_samples: bool = False  # what is meant is the mean of the parts' losses, though the whole's is another


@dataclass
class Workload:
    """A training job, apart from how and where it is run."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Batch]  # (samples, seed) → a synthetic batch with the right shapes and value ranges
    loss: Loss
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]  # of (name, parameter) pairs: `workload.optimizer`
    batch: int  # samples of one optimizer step, over all workers
    samples_per_epoch: int
    sample: str = "sample"  # what a sample is called: image, sequence
    tokens_per_sample: int = 0  # 0 where tokens have no meaning
    dataset: str = ""  # key of a data set in workload.datasets, where there is one
    clip_norm: float = 0.0  # 0: gradients are not clipped
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None  # learning-rate scheduler factory
    # One sample read from a data set (an image and its label, or tokens and those that follow), with a generator for
    # what is random about it, as a batch of one; None: the input is the only argument, the label the target.
    feed: Callable[[Any, Any, torch.Generator], Batch] | None = None
    epoch_assumed: bool = False  # nobody said how many samples an epoch has, and no data set does
