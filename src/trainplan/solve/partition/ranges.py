"""What a run of consecutive blocks costs as a stage, for every run: the tables that partitioners work on.

Bytes are those of the memory rules in `program/lower/values.py`, put together per stage: what is there whatever is in
flight, and what each micro-batch in flight adds. They are an estimate for choosing cuts (it takes all worst moments to
be the same one, so it is rather above the program's); whether a plan fits is for `predict` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.profile.by_block import by_block
from trainplan.profile.profile import Profile
from trainplan.program.posting import RECEIVES_AHEAD
from trainplan.solve.partition.bottleneck import Room

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Tables for one size of micro-batch; [i, j] is about the blocks i ≤ b < j."""

    seconds: Floats  # forward and backward of each block on the device; with what is recomputed
    issue: Floats  # seconds of the host that issues them
    traffic: Floats  # bytes that cross the cut after each block, there and back
    fixed: Floats  # [i, j] bytes of a stage beside what is in flight and the batch itself
    each: Floats  # [i, j] bytes of every micro-batch in flight
    step: Floats  # [i, j] bytes at the optimizer's step
    kept: float  # bytes that a micro-batch leaves inside all blocks for backward, wherever they are cut
    forward: Floats  # seconds of forward of each block on the device
    forward_issue: Floats  # … of the host
    backward_parts: Floats  # seconds of backward in two parts; none: not measured

    @cached_property
    def through(self) -> float:
        """Seconds of a micro-batch in all blocks."""
        return float(self.seconds.sum())

    def pace(self, host_computes: bool) -> Floats:
        """Seconds of each block by the clock: the slower of host and device, or both in turn where they are one."""
        return self.seconds + self.issue if host_computes else np.maximum(self.seconds, self.issue)

    def need(self, stage: int, in_flight: Sequence[int], batch_bytes: float = 0.0) -> Floats:
        """[i, j]: bytes of a stage that holds these blocks, and the batch."""
        return np.maximum(self.fixed + in_flight[stage] * self.each, self.step) + batch_bytes

    def fits(self, cuts: Sequence[int], in_flight: Sequence[int], limit: float, batch_bytes: float = 0.0) -> bool:
        """Whether every stage of a partition stays within the limit."""
        edges = np.array([0, *cuts, len(self.seconds)])
        place = edges[:-1], edges[1:]
        need = np.maximum(self.fixed[place] + np.array(in_flight) * self.each[place], self.step[place])
        return bool((need + batch_bytes <= limit).all())

    def room(self, in_flight: Sequence[int], limit: float, batch_bytes: float = 0.0) -> Room:
        """What stages with so many micro-batches in flight, and the batch, may hold within the limit."""
        held, always = np.array(in_flight), float(batch_bytes)
        return Room(self.fixed, self.each, self.step, held, always, float(limit), *self._from_here_on)

    @cached_property
    def _from_here_on(self) -> tuple[Floats, Floats]:
        """[i, j]: the least of `fixed` and of `each` that runs from i to j or further have."""
        return _from_here_on(self.fixed), _from_here_on(self.each)


class Tables:
    """The ranges of one profile, worked out once for each size that is asked for."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.states = _states(profile, gradients=True)
        self.lasting = _states(profile, gradients=False)  # from step to step
        self.reads_grad = np.zeros(len(profile.blocks), dtype=bool)  # whether a gradient goes back from a block
        for crossing in profile.crossings:
            self.reads_grad[list(crossing.consumers)] |= crossing.needs_grad
        self.free: dict[tuple[object, ...], tuple[int, ...]] = {}  # cuts without a limit, by what they depend on
        self._known: dict[tuple[int, bool], Ranges] = {}

    def at(self, samples: int, recompute: str = "none") -> Ranges:
        key = samples, recompute in ("full", "except-last")
        if key not in self._known:
            self._known[key] = _ranges(self.profile, self.states, *key)
        return self._known[key]


def in_flight(schedule: str, stages: int, micro: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage holds at once.

    >>> in_flight("1f1b", 4, 8), in_flight("gpipe", 2, 8), in_flight("naive", 2, 8)
    ((4, 3, 2, 1), (8, 8), (1, 1))
    """
    if schedule in ("1f1b", "zb-h1"):
        return tuple(min(micro, stages - stage) for stage in range(stages))
    if schedule in ("1f1b-early", "zb-h2"):
        return tuple(min(micro, 2 * (stages - stage) - 1) for stage in range(stages))
    if schedule in ("naive", "gems"):
        return (1,) * stages
    # Chunks and directions: at most as many as 1F1B on the same stages, but for gpipe, which keeps everything.
    return (micro if schedule in ("gpipe", "looped", "terapipe") else min(micro, stages),) * stages


def _ranges(profile: Profile, states: Floats, samples: int, recomputes: bool) -> Ranges:
    blocks = len(profile.blocks)

    def per_block(quantity: str) -> Floats:
        return by_block(profile, quantity, samples)

    parts = np.zeros(0)
    if profile.has_halves:
        parts = per_block("backward_input_s") + per_block("backward_weight_s")
    forward, backward, saved = per_block("forward_s"), per_block("backward_s"), per_block("saved_bytes")
    forward_issue, backward_issue = per_block("forward_issue_s"), per_block("backward_issue_s")
    crossings = profile.crossings
    size = np.array([c.bytes(samples) for c in crossings], dtype=np.float64)
    both = size * np.array([2.0 if c.needs_grad else 1.0 for c in crossings])  # the gradient comes back
    made = np.array([c.producer for c in crossings], dtype=np.int64)
    readers = [c.consumers for c in crossings]
    # What comes in stays until its backward pass, and so does what goes out; what is made and read here stays where
    # backward needs it, and with recomputation in any case.
    incoming, returned = (
        _where_read(blocks, made + 1, np.full(len(made), blocks), readers, part) for part in (size, both - size)
    )
    own = np.zeros(blocks)  # what each block makes for others
    np.add.at(own, made, size)
    if recomputes:
        here = _sums(own)
    else:
        needed = [c.consumers[-1:] if c.saved_by else () for c in crossings]
        here = _where_read(blocks, np.zeros_like(made), made + 1, needed, size)
    back, traffic = np.zeros_like(here), np.zeros(blocks + 1)
    for c, there, both_ways in zip(crossings, size, both, strict=True):
        traffic[c.producer : c.consumers[-1]] += both_ways
        leaves = slice(c.producer + 1), slice(c.producer + 1, c.consumers[-1] + 1)
        here[leaves] += 0.0 if recomputes else there
        back[leaves] += both_ways - there
    each = incoming + here
    # The gradient that comes back, one that is given back and one that is not taken yet, and receives posted ahead.
    fixed = states + back + 2 * returned + RECEIVES_AHEAD * np.maximum(incoming, back)
    fixed += _largest(np.maximum(per_block("forward_workspace_bytes"), per_block("backward_workspace_bytes")))
    update = np.array([block.update_workspace_bytes for block in profile.blocks])
    step = states + _largest(update) + profile.update_adds * (_sums(update) - _largest(update))
    last = np.array([c.consumers[-1] for c in crossings], dtype=np.int64)
    begun, over = (np.bincount(ends + 1, weights=both - size, minlength=blocks + 1) for ends in (made, last))
    fixed += _largest(np.cumsum(begun - over)[:blocks])  # gradients that pass each block
    if recomputes:  # one block at a time is whole, with a second copy of what it hands on
        fixed += _largest(saved + own)
        seconds = forward + per_block("recompute_s") + backward
        issue = forward_issue + per_block("recompute_issue_s") + backward_issue
        kept = 0.0
    else:
        seconds, issue, each = forward + backward, forward_issue + backward_issue, each + _sums(saved)
        kept = float(saved.sum())
    return Ranges(seconds, issue, traffic[:blocks], fixed, each, step, kept, forward, forward_issue, parts)


def _states(profile: Profile, gradients: bool) -> Floats:
    """Weights, optimizer state, running statistics, and gradients. Tied weights count once in a stage."""
    blocks = len(profile.blocks)
    users = [tuple(sorted(p.blocks)) for p in profile.parameters]
    kept = profile.state_bytes_per_parameter
    size = [p.bytes + (p.bytes * gradients + p.count * kept) * p.trainable for p in profile.parameters]
    last = np.array([u[-1] + 1 for u in users], dtype=np.int64)
    buffers = _sums(np.array([float(block.buffer_bytes) for block in profile.blocks]))
    return buffers + _where_read(blocks, np.zeros_like(last), last, users, np.array(size, dtype=np.float64))


def _where_read(blocks: int, low: Ints, high: Ints, readers: Sequence[tuple[int, ...]], size: Floats) -> Floats:
    """[i, j]: bytes of the tensors with low ≤ i < high of which a reader is among the blocks i ≤ b < j."""
    start = np.concatenate([[0], np.cumsum([len(r) for r in readers])]).astype(np.int64)
    return _add_up(blocks, low, high, start, np.array([r for row in readers for r in row], dtype=np.int64), size)


@njit(cache=True)
def _add_up(blocks: int, low: Ints, high: Ints, start: Ints, readers: Ints, size: Floats) -> Floats:
    table = np.zeros((blocks + 1, blocks + 2))  # at the first j with which a reader is there: what comes in
    for k in range(len(size)):
        for first in range(low[k], high[k]):
            reader = blocks
            for place in range(start[k], start[k + 1]):  # ascending
                if readers[place] >= first:
                    reader = readers[place]
                    break
            table[first, reader + 1] += size[k]
    for first in range(blocks + 1):
        for last in range(1, blocks + 1):
            table[first, last] += table[first, last - 1]
    return table[:, : blocks + 1].copy()


def _sums(values: Floats) -> Floats:
    until = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(until[None, :] - until[:, None], 0.0)


def _from_here_on(table: Floats) -> Floats:
    """[i, j]: the least of [i, j], [i, j + 1] and so on."""
    return np.ascontiguousarray(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1])


def _largest(values: Floats) -> Floats:
    """[i, j]: the largest of the values i ≤ b < j."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    table[:, 1:] = np.triu(np.broadcast_to(values, (len(values) + 1, len(values))))  # j - 1 where it is not before i
    return np.asarray(np.maximum.accumulate(table, axis=1))
