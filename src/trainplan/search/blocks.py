"""What each block of a model takes at least, in seconds and in bytes: what bounds are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainplan.profile.by_block import by_block
from trainplan.profile.profile import Profile

Floats = NDArray[np.float64]
_PARTS = ("backward_input_s", "backward_weight_s")


class Lasting:
    """What does not depend on micro-batches: weights and all that goes with them, by the first block that uses them."""

    def __init__(self, profile: Profile) -> None:
        self.profile, count = profile, len(profile.blocks)
        parameters = profile.parameters
        block = np.array([min(p.blocks) for p in parameters], dtype=np.int64)
        size, trained, elements, alone = (
            np.array(column, dtype=np.float64)
            for column in (
                [p.bytes for p in parameters], [p.trainable for p in parameters], [p.count for p in parameters],
                [len(p.blocks) == 1 for p in parameters],
            )
        )  # fmt: skip

        def sums(weights: Floats) -> Floats:
            return np.asarray(np.bincount(block, weights=weights, minlength=count), dtype=np.float64)

        self.weights = sums(size) + np.array([float(b.buffer_bytes) for b in profile.blocks])
        self.gradients, self.alone = sums(size * trained), sums(size * trained * alone)  # the latter: of no other block
        self.states = sums(elements * trained * profile.state_bytes_per_parameter)
        crossings = profile.crossings
        self.reader = np.array([c.consumers[0] for c in crossings], dtype=np.int64)
        self.begin = np.array([c.producer for c in crossings], dtype=np.int64)
        self.end = np.array([c.consumers[-1] for c in crossings], dtype=np.int64)
        self.each, self.fixed, self.back, self.kept = (
            np.array(column, dtype=np.float64)
            for column in (
                [c.bytes_per_sample for c in crossings], [c.fixed_bytes for c in crossings],
                [c.needs_grad for c in crossings], [bool(c.saved_by) for c in crossings],
            )
        )  # fmt: skip


class Blocks:
    """What each block takes for a micro-batch; `loud` has what ranks exchange inside passes as part of its seconds.
    `joint`: the host that issues the work is the device that does it."""

    def __init__(self, lasting: Lasting, loud: Profile, samples: int, fastest: float, joint: bool = False) -> None:
        profile = lasting.profile
        forward, backward = (by_block(loud, name, samples) / fastest for name in ("forward_s", "backward_s"))
        if joint:
            forward = forward + by_block(profile, "forward_issue_s", samples) / fastest
            backward = backward + by_block(profile, "backward_issue_s", samples) / fastest
        self.once, self.again = forward + backward, forward
        self.forward, self.backward = float(forward.sum()), float(backward.sum())
        # Backward in two parts; where no gradient goes back from a block, it may be whole.
        halves = profile.has_halves
        parts = sum(by_block(profile, name, samples) for name in _PARTS) / fastest if halves else backward
        self.parts = self.forward + float(np.minimum(parts, backward).sum())
        issued = by_block(profile, "forward_issue_s", samples) + by_block(profile, "backward_issue_s", samples)
        self.issue = float(issued.sum()) / fastest
        self.hosted = self.issue * joint  # as part of the seconds above: hosts do not differ where devices do
        # Beside passes, of one stage: adding up gradients, and the optimizer's step.
        self.accumulate = sum(block.accumulate_s for block in profile.blocks) / fastest
        self.update = profile.update_s(0, len(profile.blocks)) / fastest
        self.weights, self.gradients, self.states = lasting.weights, lasting.gradients, lasting.states
        self.alone = lasting.alone
        # What stays of a micro-batch: all that blocks save inside, or with recomputation what they read; and what
        # passes between them, where backward needs it.
        count, size = len(profile.blocks), np.rint(lasting.each * samples) + lasting.fixed
        self.read = np.bincount(lasting.reader, weights=size, minlength=count)
        saved = np.bincount(lasting.reader, weights=size * lasting.kept, minlength=count)
        self.saved = by_block(profile, "saved_bytes", samples) + saved
        self.least = np.minimum(self.saved, self.read)
        # The fewest bytes that cross between two blocks, there and back.
        there, back = (_crossing(lasting, part, count) for part in (size, size * lasting.back))
        self.hop = float((there + back).min()) if count > 1 and (np.minimum(there, back) > 0).all() else 0.0


def _crossing(lasting: Lasting, size: Floats, count: int) -> Floats:
    """Bytes that cross from every block but the last to the one behind it."""
    begun, over = (np.bincount(ends, weights=size, minlength=count + 1) for ends in (lasting.begin, lasting.end))
    return np.asarray(np.cumsum(begun - over), dtype=np.float64)[: count - 1]
