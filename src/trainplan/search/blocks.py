"""What each block of a model takes at least, in seconds and in bytes: what bounds are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainplan.plan.plan import plan
from trainplan.profile.by_block import by_block
from trainplan.profile.profile import Profile

Floats = NDArray[np.float64]
BUCKET = plan().bucket  # bytes, of all plans that are searched
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
        # Weights of several blocks, and what goes with them: every rank with one of these blocks has them whole.
        self.tied = tuple(
            (tuple(sorted(p.blocks)), float(p.bytes), p.trainable * float(p.bytes),
             p.trainable * float(p.count * profile.state_bytes_per_parameter))
            for p in parameters if len(p.blocks) > 1
        )  # fmt: skip
        # Of what is summed, gathered or scattered, pieces end in this block: its weights fill a bucket.
        self.pieces = (self.alone >= BUCKET).astype(np.float64)
        self.states = sums(elements * trained * profile.state_bytes_per_parameter)
        # Seconds beside passes: adding to gradients that are there already, and the optimizer's step.
        self.adding = np.array([b.accumulate_s for b in profile.blocks])
        self.stepping = np.array([b.update_s for b in profile.blocks])
        crossings = profile.crossings
        self.reader = np.array([c.consumers[0] for c in crossings], dtype=np.int64)
        self.begin = np.array([c.producer for c in crossings], dtype=np.int64)
        self.next = self.reader == self.begin + 1
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
        again = by_block(loud, "recompute_s", samples) / fastest
        if joint:
            forward = forward + by_block(profile, "forward_issue_s", samples) / fastest
            backward = backward + by_block(profile, "backward_issue_s", samples) / fastest
            again = again + by_block(profile, "recompute_issue_s", samples) / fastest
        self.once, self.forth = forward + backward, forward
        self.again = np.minimum(again, forward)  # of what is recomputed, at least
        self.forward, self.backward = float(forward.sum()), float(backward.sum())
        # Backward in two parts; where no gradient goes back from a block, it may be whole.
        halves = profile.has_halves
        parts = sum(by_block(profile, name, samples) for name in _PARTS) / fastest if halves else backward
        self.parts = self.forward + float(np.minimum(parts, backward).sum())
        issued = by_block(profile, "forward_issue_s", samples) + by_block(profile, "backward_issue_s", samples)
        self.issue = float(issued.sum()) / fastest
        self.hosted = self.issue * joint  # as part of the seconds above: hosts do not differ where devices do
        self.adding, self.stepping = lasting.adding / fastest, lasting.stepping / fastest
        self.weights, self.gradients, self.states = lasting.weights, lasting.gradients, lasting.states
        self.alone, self.pieces, self.tied = lasting.alone, lasting.pieces, lasting.tied
        # What stays of a micro-batch: all that blocks save inside, or with recomputation what they read; and what
        # passes between them, where backward needs it.
        count, size = len(profile.blocks), np.rint(lasting.each * samples) + lasting.fixed
        self.read = np.bincount(lasting.reader, weights=size, minlength=count)
        saved = np.bincount(lasting.reader, weights=size * lasting.kept, minlength=count)
        self.inside = by_block(profile, "saved_bytes", samples)
        self.saved = self.inside + saved
        self.least = np.minimum(self.saved, self.read)
        # Bytes from every block but the last to the one behind it, and back; and the fewest of both. (What goes on to
        # later blocks may go another way.)
        self.there, self.back = (
            np.bincount(lasting.begin, weights=part * lasting.next, minlength=count)[: count - 1]
            for part in (size, size * lasting.back)
        )
        both = (np.minimum(self.there, self.back) > 0).all()
        self.hop = float((self.there + self.back).min()) if count > 1 and both else 0.0
