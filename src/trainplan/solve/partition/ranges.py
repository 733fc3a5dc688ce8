"""What a run of consecutive blocks costs as a stage, for every run: the tables that partitioners work on.

Bytes are those of the memory rules in `program/lower/values.py`, put together per stage: what is there whatever is in
flight, and what each micro-batch in flight adds. They are an estimate for choosing cuts (it takes all worst moments to
be the same one, so it is rather above the program's); whether a plan fits is for `predict` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.profile.profile import Profile
from trainplan.program.lower.edges import bytes_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Tables for one size of micro-batch; [i, j] is about the blocks i ≤ b < j."""

    seconds: Floats  # forward and backward of each block; with recomputation the forward twice
    traffic: Floats  # bytes that cross the cut after each block, there and back
    fixed: Floats  # [i, j] bytes of a stage beside what is in flight and the batch itself
    each: Floats  # [i, j] bytes of every micro-batch in flight
    kept: float  # bytes that a micro-batch leaves inside all blocks for backward, wherever they are cut

    def need(self, stage: int, in_flight: Sequence[int], batch_bytes: float = 0.0) -> Floats:
        """[i, j]: bytes of a stage that holds these blocks; the first one holds the batch too."""
        return self.fixed + in_flight[stage] * self.each + (batch_bytes if stage == 0 else 0.0)

    def allowed(self, in_flight: Sequence[int], limit: float, batch_bytes: float = 0.0) -> NDArray[np.bool_]:
        """[stage, i, j]: whether a stage with so many micro-batches in flight stays within the limit."""
        return np.stack([self.need(stage, in_flight, batch_bytes) <= limit for stage in range(len(in_flight))])


class Tables:
    """The ranges of one profile, worked out once for each size that is asked for."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.states = _states(profile)
        self._known: dict[tuple[int, bool], Ranges] = {}

    def at(self, samples: int, recompute: str = "none") -> Ranges:
        key = samples, recompute == "full"
        if key not in self._known:
            self._known[key] = _ranges(self.profile, self.states, *key)
        return self._known[key]


def in_flight(schedule: str, stages: int, micro: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage holds at once.

    >>> in_flight("1f1b", 4, 8), in_flight("gpipe", 2, 8), in_flight("naive", 2, 8)
    ((4, 3, 2, 1), (8, 8), (1, 1))
    """
    if schedule == "1f1b":
        return tuple(min(micro, stages - stage) for stage in range(stages))
    return (micro if schedule == "gpipe" else 1,) * stages


def _ranges(profile: Profile, states: Floats, samples: int, recomputes: bool) -> Ranges:
    blocks = len(profile.blocks)

    def per_block(quantity: str) -> Floats:
        return np.array([profile.total(quantity, b, b + 1, samples) for b in range(blocks)])

    forward, backward, saved = per_block("forward_s"), per_block("backward_s"), per_block("saved_bytes")
    crossings = profile.crossings
    size = np.array([bytes_of(c, samples) for c in crossings], dtype=np.float64)
    both = size * np.array([2.0 if c.needs_grad else 1.0 for c in crossings])  # the gradient comes back
    made = np.array([c.producer for c in crossings], dtype=np.int64)
    readers = [c.consumers for c in crossings]
    # What comes in stays until its backward pass; what is made here stays where backward needs it, and with
    # recomputation where any block reads it.
    each = _where_read(blocks, made + 1, np.full(len(made), blocks), readers, size)
    keepers = readers if recomputes else [c.saved_by for c in crossings]
    each += _where_read(blocks, np.zeros_like(made), made + 1, keepers, size)
    # One of each at a time: what is handed on, its gradient, and the gradient that is given back.
    fixed = states + _where_read(blocks, made + 1, np.full(len(made), blocks), readers, both - size)
    traffic = np.zeros(blocks + 1)
    for c, bytes_ in zip(crossings, both, strict=True):
        traffic[c.producer : c.consumers[-1]] += bytes_
        fixed[: c.producer + 1, c.producer + 1 : c.consumers[-1] + 1] += bytes_
    fixed += _largest(np.maximum(per_block("forward_workspace_bytes"), per_block("backward_workspace_bytes")))
    if recomputes:  # one block at a time is whole
        returned = list(zip(crossings, both - size, strict=True))
        handed = [sum(g for c, g in returned if c.producer < block <= c.consumers[-1]) for block in range(blocks)]
        fixed += _largest(saved) + _largest(np.array(handed))
        return Ranges(2 * forward + backward, traffic[:blocks], fixed, each, kept=0.0)
    return Ranges(forward + backward, traffic[:blocks], fixed, each + _sums(saved), kept=float(saved.sum()))


def _states(profile: Profile) -> Floats:
    """Weights, gradients, optimizer state and running statistics. Tied weights count once in a stage."""
    blocks = len(profile.blocks)
    users = [tuple(sorted(p.blocks)) for p in profile.parameters]
    kept = profile.state_bytes_per_parameter
    size = np.array([p.bytes + (p.bytes + p.count * kept) * p.trainable for p in profile.parameters], dtype=np.float64)
    last = np.array([u[-1] + 1 for u in users], dtype=np.int64)
    buffers = _sums(np.array([float(block.buffer_bytes) for block in profile.blocks]))
    return buffers + _where_read(blocks, np.zeros_like(last), last, users, size)


def _where_read(blocks: int, low: Ints, high: Ints, readers: Sequence[tuple[int, ...]], size: Floats) -> Floats:
    """[i, j]: bytes of the tensors with low ≤ i < high of which a reader is among the blocks i ≤ b < j."""
    start = np.concatenate([[0], np.cumsum([len(r) for r in readers])]).astype(np.int64)
    return _add_up(blocks, low, high, start, np.array([r for row in readers for r in row], dtype=np.int64), size)


@njit(cache=True)
def _add_up(blocks: int, low: Ints, high: Ints, start: Ints, readers: Ints, size: Floats) -> Floats:
    table = np.zeros((blocks + 1, blocks + 1))
    for k in range(len(size)):
        for first in range(low[k], high[k]):
            reader = blocks
            for place in range(start[k], start[k + 1]):  # ascending
                if readers[place] >= first:
                    reader = readers[place]
                    break
            for last in range(reader + 1, blocks + 1):
                table[first, last] += size[k]
    return table


def _sums(values: Floats) -> Floats:
    until = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(until[None, :] - until[:, None], 0.0)


def _largest(values: Floats) -> Floats:
    """[i, j]: the largest of the values i ≤ b < j."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        table[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return table
