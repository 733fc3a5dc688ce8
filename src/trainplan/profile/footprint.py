"""Bytes alive at the worst moments of some consecutive blocks: backward, and the optimizer's step. No torch here.

Backward frees what forward saved and makes gradients, block by block from the last to the first. Its worst moment is
therefore not simply "all that was saved, all gradients, and the largest workspace": in a first pass, gradients come
into being only while saved bytes go. In later passes of a step all gradients are there already.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.profile.profile import Crossing, Profile


@dataclass(frozen=True)
class Footprint:
    """The worst moment of a backward pass."""

    bytes: int
    block: int  # the block that is gone back through then


def backward_footprint(profile: Profile, first: int, last: int, samples: int, adds: bool) -> Footprint:
    """What is alive at the worst moment of going back through blocks first ≤ b < last with so many samples.

    Counted are saved bytes, crossings between these blocks and their gradients, gradients of the weights, and
    workspace; not weights, optimizer state, buffers, inputs, nor what crosses to other blocks. `adds`: gradients of the
    weights are there already and are added to.
    """
    inside = [c for c in profile.crossings if c.producer >= first and c.consumers[0] < last]
    parameters = [p for p in profile.parameters_of(first, last) if p.trainable]
    worst = Footprint(0, first)
    for block in range(first, last):
        saved = profile.total("saved_bytes", first, block + 1, samples)
        saved += sum(_bytes(c, samples) for c in inside if any(first <= b <= block for b in c.saved_by))
        # Gradients on their way: of what this block made, and of what it or a later block has read.
        flowing = [c for c in inside if c.needs_grad and c.producer <= block and c.consumers[-1] >= block]
        flowing_bytes = sum(_bytes(c, samples) for c in flowing)
        gradients = sum(p.bytes for p in parameters if adds or max(b for b in p.blocks if b < last) >= block)
        workspace = profile.total("backward_workspace_bytes", block, block + 1, samples)
        if not adds:
            # Measured while gradients were added to: each new one needs memory of its own until it has been added.
            largest = max((p.bytes for p in parameters if block in p.blocks), default=0)
            workspace = max(0.0, workspace - largest)
        total = round(saved + flowing_bytes + gradients + workspace)
        if total > worst.bytes:
            worst = Footprint(total, block)
    return worst


def update_footprint(profile: Profile, first: int, last: int) -> int:
    """What is alive during the optimizer's step beside weights, optimizer state and buffers."""
    gradients = sum(p.bytes for p in profile.parameters_of(first, last) if p.trainable)
    return gradients + round(sum(block.update_workspace_bytes for block in profile.blocks[first:last]))


def _bytes(crossing: Crossing, samples: int) -> int:
    return round(crossing.bytes_per_sample * samples) + crossing.fixed_bytes
