"""The whole chain in one graph, as the engine runs a stage, with the clock read where blocks meet.

Forward, the clock is read between blocks. Backward is one call of autograd, which goes through the operators in the
reverse of the order in which they ran: block by block. A hook on every crossing reads the clock when its gradient is
complete, which is when the block that made it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.stage import Stage
from trainplan.workload.workload import Batch, Loss


class OnePiece:
    """One forward and one backward pass. `clock` gives the host's seconds."""

    def __init__(self, captured: Captured, batch: Batch, loss: Loss, clock: Callable[[], float]) -> None:
        self.captured, self.batch, self.loss, self.clock = captured, batch, loss, clock
        self._value: Tensor | None = None
        self._begun: dict[int, float] = {}  # block → when its backward began

    def forward(self, stage: Stage) -> list[float]:
        """Seconds of every block; the last one computes the loss too."""
        blocks = self.captured.blocks
        dropped: dict[int, list[str]] = {}
        for crossing in self.captured.crossings:
            dropped.setdefault(crossing.consumers[-1], []).append(crossing.name)
        env: dict[str, Tensor] = {}
        moments = [self.clock()]
        for index, block in enumerate(blocks):
            stage.run_block(index, env, self.batch)
            if index == len(blocks) - 1:
                self._value = self.loss.function(stage.output(env), self.batch.targets)
                env.clear()
            for name in block.makes:
                if env[name].requires_grad:
                    env[name].register_hook(self._begin(index))
            for name in dropped.get(index, ()):
                env.pop(name, None)
            moments.append(self.clock())
        return _between(moments)

    def backward(self) -> list[float]:
        """Seconds of every block; none where no gradient flows."""
        last = len(self.captured.blocks) - 1
        value, self._value = self._value, None
        if value is None or not value.requires_grad:
            return [0.0] * (last + 1)
        roots = [value]
        del value
        self._begun[last] = self.clock()
        torch.autograd.backward(roots)
        order = sorted(self._begun, key=self._begun.__getitem__)
        spent = _between([*(self._begun[index] for index in order), self.clock()])
        found = dict(zip(order, spent, strict=True))
        return [found.get(index, 0.0) for index in range(last + 1)]

    def _begin(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._begun.setdefault(index, self.clock())

        return hook


def _between(moments: list[float]) -> list[float]:
    return [end - start for start, end in pairwise(moments)]
