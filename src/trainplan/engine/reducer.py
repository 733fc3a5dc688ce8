"""Gradient buckets of a pipeline stage with replicas.

The gradients of a bucket are views of one flat tensor, which is summed over the replicas in one go. While the last
backward pass of a step runs, hooks on the parameters count; when a bucket is complete, and all before it have been
sent, its sum starts while backward goes on. (Pure data parallelism leaves this to torch's DDP: `observed.py`. DDP
cannot serve here, because it expects one forward before every backward.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Reducer:
    """Buckets of the parameters of one stage, in the order in which gradients arrive."""

    def __init__(self, parameters: dict[str, nn.Parameter], buckets: Sequence[Sequence[str]]) -> None:
        self.flat: list[Tensor] = []
        self._names = [tuple(names) for names in buckets]
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self.views: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._waiting: list[int] = []
        self._next = 0
        self._ready: Callable[[int], None] | None = None
        for number, names in enumerate(self._names):
            members = [parameters[name] for name in names]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            self.flat.append(flat)
            start = 0
            for name, parameter in zip(names, members, strict=True):
                view = flat[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
                self._views.append((parameter, view))
                self.views[name] = parameter, view
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=number: self._count(bucket))
        self.zero()

    def zero(self) -> None:
        """Empty the gradients; they stay views of their buckets."""
        for flat in self.flat:
            flat.zero_()
        self.attach()

    def attach(self) -> None:
        """Gradients are views of their buckets: a backward pass adds to those."""
        for parameter, view in self._views:
            parameter.grad = view

    def detach(self) -> None:
        """Nobody has gradients: an optimizer would find nothing to do."""
        for parameter, _ in self._views:
            parameter.grad = None

    def watch(self, ready: Callable[[int], None]) -> None:
        """Call `ready(bucket)` for each bucket in turn as the next backward pass completes it."""
        self._waiting = [len(names) for names in self._names]
        self._next, self._ready = 0, ready

    def finish(self) -> None:
        """The pass is over: buckets with parameters that got no gradient are ready too."""
        while self._ready is not None and self._next < len(self._waiting):
            self._ready(self._next)
            self._next += 1
        self._ready = None

    def _count(self, bucket: int) -> None:
        if self._ready is None:
            return
        self._waiting[bucket] -= 1
        # In order, as DDP does: all ranks must start their sums in the same order. The last one waits for `finish`,
        # so that the pass which completes it is over.
        while self._next < len(self._waiting) - 1 and self._waiting[self._next] == 0:
            self._ready(self._next)
            self._next += 1
