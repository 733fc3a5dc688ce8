"""A tape of a model's operators: which of them reads what another wrote. A dispatch mode, beside the `Recorder`.

A tensor is known by its storage, so that a view is the tensor that it is a view of. A weak reference to each storage
keeps its address from being used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainplan.profile.operators import Recorder


class Seen(NamedTuple):
    """A tensor that an operator reads or writes."""

    storage: int
    elements: int
    shape: tuple[int, ...]
    number: bool  # with a fraction
    item: int  # bytes of an element


@dataclass(frozen=True)
class Step:
    """An operator, or a view."""

    block: int
    backward: bool
    name: str
    reads: tuple[Seen, ...]
    writes: tuple[Seen, ...]
    op: int | None  # its place among the block's recorded operators; None: it is not among them


class Tape(TorchDispatchMode):
    """Writes down every operator; to be entered inside the recorder's own context."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.steps: list[Step] = []
        self.block, self.backward = 0, False  # where we are, as the caller says
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = tuple(self.seen(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        before = len(self.recorder.ops)
        out = function(*args, **(kwargs or {}))
        writes = tuple(self.seen(t) for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
        place = before if len(self.recorder.ops) > before else None
        if function.namespace in ("aten", "trainplan"):
            name = function.overloadpacket.__name__
            self.steps.append(Step(self.block, self.backward, name, reads, writes, place))
        return out

    def of(self, block: int) -> list[Step]:
        """The steps of a block, forward and back."""
        return [step for step in self.steps if step.block == block]

    def seen(self, tensor: Tensor) -> Seen:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)
        return Seen(
            storage._cdata, tensor.numel(), tuple(tensor.shape), tensor.is_floating_point(), tensor.element_size()
        )
