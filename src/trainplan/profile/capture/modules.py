"""Modules of torch that no plan trains as they are written, refused by name before a forward pass is traced.

Tracing would fail in each of them somewhere inside torch, and what torch then says is about its own code.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from trainplan.errors import ModelError


def refuse_modules(model: nn.Module) -> None:
    """Raise `ModelError` for the first module that cannot be trained under a plan, with what to use in its place."""
    for name, module in model.named_modules():
        for why, instead in _reasons(module):
            where = f"module {name!r}" if name else "the model"
            raise ModelError(f"capture of {where} ({type(module).__name__})", why, instead)


def _reasons(module: nn.Module) -> Iterator[tuple[str, str]]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if any(is_lazy(tensor) for tensor in own):
        yield (
            "it is lazy: the shapes of its weights are not known before it has seen a batch",
            "running one batch through the model before it is given, or writing its sizes down",
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
        yield "its gradient is sparse, and plans sum and keep dense ones", "sparse=False"
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        yield (
            "it sums its statistics over ranks by itself; under a plan each replica has those of its own micro-batches",
            "nn.BatchNorm1d, 2d or 3d, which is trained so",
        )
    if isinstance(module, _BatchNorm) and module.momentum is None and module.training and module.track_running_stats:
        why = "with momentum=None its running statistics depend on how many batches it has seen, a value in a tensor"
        yield why, "momentum=0.1"
