"""Which parts of a model's output the loss reads.

What the loss reads counts as read by the last block, so it is carried there. Much of what models return is read by
nobody (a key-value cache, hidden states), and carrying it would cost more than the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.capture.exported import Exported
from trainplan.profile.capture.loss import tried
from trainplan.profile.capture.shape import Shape
from trainplan.workload.workload import Batch, Loss


def unread_outputs(exported: Exported, batch: Batch, loss: Loss | None) -> dict[int, fx.Node]:
    """Parts of the output that the loss does not read, by their place among its leaves.

    The loss is run on tensors that stand in for the output (`loss.tried`). Should it raise, everything is kept.
    """
    output = exported.output
    spots = [i for i, leaf in enumerate(output.leaves) if _is_tensor(leaf)]
    if loss is not None:
        rest: list[Any] = list(output.leaves)
        for spot in spots:
            rest[spot] = None

        def read_of(leaves: list[Tensor], targets: Any) -> set[int]:
            whole = rest.copy()
            for spot, leaf in zip(spots, leaves, strict=True):
                whole[spot] = leaf
            with _Reads(leaves) as reads:
                reads.note(loss.function(pytree.tree_unflatten(whole, output.spec), targets))
            return reads.read

        try:
            with torch.enable_grad():
                leaves = [_like(exported, output.leaves[spot]) for spot in spots]
                _, read = tried(leaves, batch.targets, read_of)
            return {spot: output.leaves[spot] for i, spot in enumerate(spots) if i not in read}
        except Exception as error:
            line = " ".join(str(error).split())[:150]
            exported.notes.append(f"the whole output is kept: the loss does not run on its shapes ({line})")
    if output.opaque:
        raise ModelError(
            "capture of the output",
            f"it contains {', '.join(output.opaque)}, which is neither a tensor nor a known container",
            "a loss that runs on outputs of random values, so that what it does not read can be left out",
        )
    return {}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor)


def _like(exported: Exported, node: fx.Node) -> Tensor:
    value = node.meta["val"]
    shape = Shape.of(value, exported.symbols)
    sizes = shape.at(exported.example_samples) if shape else tuple(2 for _ in value.shape)
    fake = torch.empty(sizes, dtype=value.dtype, device="meta")
    return fake.requires_grad_(fake.is_floating_point())


class _Reads(TorchFunctionMode):
    """Which of some tensors are arguments of torch functions."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.read: set[int] = set()

    def note(self, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if id(leaf) in self.index:
                self.read.add(self.index[id(leaf)])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((args, kwargs))
        return function(*args, **(kwargs or {}))
