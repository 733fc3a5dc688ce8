"""What a model does, operator by operator and byte by byte, before anybody asks how long it takes. No torch here.

`trace` makes these values from a model on fake tensors, `repeated` makes many equal layers of few, `family` reads them
from a file for models that we know by their shape, and `estimate` prices them.

Memory is told by **lives**: every storage that a block makes, from the moment at which it is made to the one at which
it is found gone. Moments count up whenever something is made, first forward and then back, so what is alive at any of
them, and at the worst, can be worked out for any number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from trainplan.profile.op import BY_CUDNN, Op
from trainplan.profile.profile import Profile
from trainplan.profile.recipe import Share
from trainplan.profile.roofline import between as op_between


@dataclass(frozen=True)
class Life:
    """A storage that a block makes."""

    bytes: int
    born: int  # the moment at which it is made
    dies: int  # the first moment at which it is gone; -1: it outlives the backward pass of its block


@dataclass(frozen=True)
class BlockTrace:
    """The operators of a block, and its bytes."""

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    saved_bytes: int = 0
    tail: int = 0  # the last operators of forward, whose results backward does not need
    arrivals: dict[str, int] | None = None  # parameter → operators of backward before its gradient
    lives: tuple[Life, ...] = ()
    rest: int = 0  # the moment at which the forward pass is over
    back: int = 0  # the moment at which the backward pass begins
    flowing: int = 0  # bytes of the gradients that go on to the blocks before
    gradients: tuple[int, ...] = ()  # bytes of the gradients of weights that the backward pass makes
    share: Share = Share()  # noqa: RUF009 (frozen): what of it a rank does where several share it

    @property
    def identity(self) -> int:
        """Blocks that were copied have the same: what holds for one holds for the other, but for names."""
        return id(self.lives)

    @property
    def again(self) -> tuple[Op, ...]:
        """The operators of running it once more for its backward pass."""
        return self.forward[: len(self.forward) - self.tail]

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        return sum(op.flops for op in self.forward)

    @property
    def tail_flops(self) -> float:
        """Those of them that backward does not need."""
        return self.flops - sum(op.flops for op in self.again)

    @property
    def convolution_flops(self) -> float:
        """Those of them that cudnn multiplies: convolutions, and recurrent layers."""
        return sum(op.flops for op in self.forward if op.name in BY_CUDNN)

    @cached_property
    def levels(self) -> list[int]:
        """Bytes alive at each moment, of what the block makes."""
        end = max((max(life.born, life.dies) for life in self.lives), default=0)
        changes = [0] * (max(end, self.back, self.rest) + 2)
        for life in self.lives:
            changes[life.born] += life.bytes
            if life.dies >= 0:
                changes[life.dies] -= life.bytes
        return list(accumulate(changes))

    @cached_property
    def forward_workspace_bytes(self) -> int:
        """How much more is alive at the worst moment of the forward pass than at its end."""
        return max(self.levels[: self.rest + 1]) - self.levels[self.rest]

    @cached_property
    def backward_workspace_bytes(self) -> int:
        """What is alive at the worst moment of the backward pass besides what was saved, what flows back, and the
        gradients. (Where gradients are added to, a new one has memory of its own for a moment.)"""
        beyond = max(self.levels[self.back :]) - self.levels[self.back]
        return max(0, beyond - self.flowing - sum(self.gradients)) + max(self.gradients, default=0)


@dataclass(frozen=True)
class Trace:
    """The operators of a model for one micro-batch size."""

    samples: int
    blocks: tuple[BlockTrace, ...]
    saved_by: dict[str, tuple[int, ...]]  # crossing → blocks whose backward needs it
    cut: frozenset[str] = frozenset()  # parameters of which ranks that share blocks have slices
    unpriced: frozenset[str] = frozenset()  # names of operators of which only bytes are known

    def like(self, other: Trace) -> bool:
        """Whether the same operators run, on other sizes."""
        return self.saved_by == other.saved_by and all(
            [op.name for op in a.forward + a.backward] == [op.name for op in b.forward + b.backward]
            and [(x.born, x.dies) for x in a.lives] == [(x.born, x.dies) for x in b.lives]
            for a, b in zip(self.blocks, other.blocks, strict=True)
        )


@dataclass(frozen=True)
class UpdateTrace:
    """The optimizer's step: operators for each block's parameters, and the state that it keeps."""

    blocks: tuple[tuple[Op, ...], ...]
    tensors: tuple[int, ...]  # parameters of each block
    state_bytes: tuple[int, ...]
    optimizer: str


@dataclass(frozen=True)
class Traced:
    """A model, traced: its structure, and what it does for some sizes of the micro-batch."""

    base: Profile  # without seconds
    traces: tuple[Trace, ...]
    update: UpdateTrace
    lines: bool  # everything is a straight line in the samples, through the first two of the traces

    def at(self, samples: int) -> Trace:
        """The operators for so many samples."""
        if self.lines:
            return between(self.traces[0], self.traces[1], samples)
        return next(found for found in self.traces if found.samples == samples)


def between(small: Trace, large: Trace, samples: int) -> Trace:
    """The trace on the straight lines through two others. Blocks with one identity there have one here."""
    position = (samples - small.samples) / (large.samples - small.samples)

    def size(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * position))

    def ops(a: tuple[Op, ...], b: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(op_between(x, y, position) for x, y in zip(a, b, strict=True))

    made: dict[tuple[int, int], BlockTrace] = {}
    blocks = []
    for a, b in zip(small.blocks, large.blocks, strict=True):
        key = a.identity, b.identity
        if key not in made:
            lives = tuple(Life(size(x.bytes, y.bytes), x.born, x.dies) for x, y in zip(a.lives, b.lives, strict=True))
            made[key] = replace(
                a,
                forward=ops(a.forward, b.forward),
                backward=ops(a.backward, b.backward),
                saved_bytes=size(a.saved_bytes, b.saved_bytes),
                lives=lives,
                flowing=size(a.flowing, b.flowing),
            )
        blocks.append(replace(made[key], arrivals=a.arrivals))
    return Trace(samples, tuple(blocks), small.saved_by)
