"""Bytes alive at the worst moment of a pass through some consecutive blocks: a stage forward, or back. No torch here.

Backward frees what forward saved and makes gradients, block by block from the last to the first. Its worst moment is
therefore not simply "all that was saved, all gradients, and the largest workspace": in the first pass of a step,
gradients come into being only while saved bytes go. In later passes all gradients are there already.

    block          0   1   2   3
    saved          ████████████▒▒▒    while block 2 is gone back through, what block 3 saved is gone,
    gradients              ████████   and the gradients of blocks 2 and 3 are there

What is counted is what the pass itself brings and takes: not weights, optimizer state, buffers and inputs, nor what
came from other stages or goes to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from trainplan.profile.profile import Amount, Crossing, Portion, Profile


class Moment(NamedTuple):
    """What is alive while one block is gone back through."""

    block: int
    saved: int  # by forward, of this block and those before it
    gradients: int  # of the weights
    passing: int  # gradients of what passes between blocks, and workspace

    @property
    def bytes(self) -> int:
        return self.saved + self.gradients + self.passing


def _bytes(moment: Moment) -> int:
    """The same, without the detour of a property."""
    return moment.saved + moment.gradients + moment.passing


class Footprints:
    """The passes with so many samples through any blocks first ≤ b < last; each is worked out once."""

    def __init__(self, profile: Profile, samples: Amount) -> None:
        blocks = range(len(profile.blocks))

        def each(quantity: str) -> list[int]:
            return [round(profile.total(quantity, b, b + 1, samples)) for b in blocks]

        self.profile = profile
        self.saved, self.forward_workspace = each("saved_bytes"), each("forward_workspace_bytes")
        self.backward_workspace = each("backward_workspace_bytes")
        share = samples.samples * samples.share if isinstance(samples, Portion) else samples
        self.loss = round(profile.loss_bytes * share)
        self._branch = [round(block.branch_bytes * share) for block in profile.blocks]
        self.size = [crossing.bytes(samples) for crossing in profile.crossings]
        self._back: dict[tuple[int, int, bool], list[Moment]] = {}
        self._worst: dict[tuple[int, int, bool, int | None, int | None], Moment] = {}
        self._forward: dict[tuple[int, int], tuple[int, int]] = {}

    def backward(self, first: int, last: int, adds: bool) -> list[Moment]:
        """What is alive at each block, in the order of the blocks. `adds`: the gradients of the weights are there
        already, and are added to."""
        key = first, last, adds
        if key not in self._back:
            self._back[key] = self._moments(*key)
        return self._back[key]

    def worst(self, first: int, last: int, adds: bool, low: int | None = None, high: int | None = None) -> Moment:
        """The worst moment of going back through blocks first ≤ b < last, or through those of them from `low` to
        `high` (both included)."""
        key = first, last, adds, low, high
        if key not in self._worst:
            moments = self.backward(first, last, adds)
            self._worst[key] = worst(
                moments if low is None or high is None else moments[low - first : high - first + 1]
            )
        return self._worst[key]

    def kept(self, first: int, last: int) -> int:
        """What a forward pass leaves for backward: inside blocks, and what passes between them and is needed again."""
        return self._over(first, last)[0]

    def forward_extra(self, first: int, last: int) -> int:
        """How much more is alive at the worst moment of forward than at its end."""
        return self._over(first, last)[1]

    def forward_alone_extra(self, first: int, last: int) -> int:
        """The same for a forward pass that saves nothing, but for what passes between blocks. Inside a block not all
        that it would save is there at once; counting it says no more than the recomputation of that block will."""
        made = [0] * (last - first)
        for crossing, size in self._touching(first, last):
            if first <= crossing.producer:
                made[crossing.producer - first] += size
        levels = accumulate(made)
        extras = (s + w for s, w in zip(self.saved[first:last], self.forward_workspace[first:last], strict=True))
        return max(level + extra for level, extra in zip(levels, extras, strict=True)) - sum(made)

    def one_block(self, block: int, adds: bool) -> int:
        """Workspace of going back through a block."""
        extra = self.backward_workspace[block]
        if not adds:
            # Measured while gradients were added to: each new one needs memory of its own until it has been added.
            extra = max(0, extra - self.profile.largest_gradients[block])
        return extra

    def halfway(self, first: int, last: int) -> int:
        """Backward in two parts: the gradients that the first leaves for the second."""
        return sum(self._branch[first:last])

    def input_extra(self, first: int, last: int) -> int:
        """How much more is alive at the worst moment of the first part than at its end. It makes no gradients of
        weights; those that it leaves gather from the last block on."""
        moments = self.backward(first, last, adds=False)
        own = self.profile.largest_gradients[first:last]
        gathered = list(accumulate(reversed(self._branch[first:last])))[::-1]
        most = max(
            m.passing - min(w, self.one_block(m.block, False)) + g
            for m, w, g in zip(moments, own, gathered, strict=True)
        )
        return max(0, most - self.halfway(first, last))

    def _touching(self, first: int, last: int) -> list[tuple[Crossing, int]]:
        """What is made, read or passes by in these blocks, with its bytes."""
        known: dict[tuple[str, int, int], list[int]] = self.profile.known_stages
        key, crossings = ("touching", first, last), self.profile.crossings
        if key not in known:
            some = enumerate(crossings)
            known[key] = [number for number, c in some if c.producer < last and c.consumers[-1] >= first]
        return [(crossings[number], self.size[number]) for number in known[key]]

    def _moments(self, first: int, last: int, adds: bool) -> list[Moment]:
        # Each list: what is alive more at a block than at the one before it.
        saved, flowing = [*self.saved[first:last], 0], [0] * (last - first + 1)
        for crossing, size in self._touching(first, last):
            readers = [b for b in crossing.consumers if first <= b < last]
            if stays(crossing, first, last):
                saved[min(b for b in crossing.saved_by if b >= first) - first] += size
            if crossing.needs_grad and readers:  # its gradient is made by its last reader, and used up by its maker
                flowing[max(crossing.producer - first, 0)] += size
                flowing[readers[-1] + 1 - first] -= size
        there = _gradients(self.profile, first, last)
        blocks = range(first, last)
        return [
            Moment(b, kept, there[0] if adds else made, passing + self.one_block(b, adds))
            for b, kept, made, passing in zip(blocks, accumulate(saved), there, accumulate(flowing), strict=False)
        ]

    def _over(self, first: int, last: int) -> tuple[int, int]:
        key = first, last
        if key not in self._forward:
            alive = [*self.saved[first:last], 0]
            outgoing = 0  # stays as well, and is not counted here
            for crossing, size in self._touching(first, last):
                if crossing.producer < first:
                    continue
                alive[crossing.producer - first] += size
                if crossing.consumers[-1] >= last:
                    outgoing += size
                elif not stays(crossing, first, last):
                    alive[crossing.consumers[-1] + 1 - first] -= size
            levels = list(accumulate(alive))
            most = max(level + extra for level, extra in zip(levels, self.forward_workspace[first:last], strict=False))
            self._forward[key] = levels[-1] - outgoing, most - levels[-1]
        return self._forward[key]


def _gradients(profile: Profile, first: int, last: int) -> list[int]:
    """Bytes of gradients that are there when backward has come to each block, from the last on; 0 behind that."""
    known: dict[tuple[str, int, int], list[int]] = profile.known_stages
    key = "gradients from", first, last
    if key not in known:
        made = [0] * (last - first + 1)
        for parameter in profile.parameters_of(first, last):
            if parameter.trainable:
                used = parameter.blocks
                block = used[0] if len(used) == 1 else max(b for b in used if b < last)
                made[block - first] += parameter.bytes
        known[key] = list(accumulate(reversed(made)))[::-1]
    return known[key]


def footprints(profile: Profile, samples: Amount) -> Footprints:
    """The footprints of a profile for so many samples, kept with it."""
    known: dict[Amount, Footprints] = profile.known_footprints
    if samples not in known:
        known[samples] = Footprints(profile, samples)
    return known[samples]


def weights_extra(profile: Profile, first: int, last: int) -> int:
    """Extra bytes at the worst moment of the second part of a backward pass that adds to gradients: those of one
    operator's weights (which share the first part of their names), while those of the one before are still there."""
    groups: dict[str, int] = {}
    for parameter in profile.parameters_of(first, last):
        if parameter.trainable:
            module = parameter.name.rpartition(".")[0]
            groups[module] = groups.get(module, 0) + parameter.bytes
    return max((sum(pair) for pair in pairwise([0, *groups.values(), 0])), default=0)


def worst(moments: list[Moment]) -> Moment:
    """The moment with most bytes; of equal ones the one that comes first on the way back."""
    return max(reversed(moments), key=_bytes)


def update_workspace(profile: Profile, first: int, last: int) -> int:
    """Extra bytes at the worst moment of the optimizer's step for some blocks.

    An optimizer that goes from tensor to tensor needs no more for all blocks than for the largest (`update_adds` is
    0), one that works on all tensors at once what all of them need together (1).
    """
    sizes = [block.update_workspace_bytes for block in profile.blocks[first:last]]
    most = max(sizes)
    return round(most + profile.update_adds * (sum(sizes) - most))


def pieces_workspace(profile: Profile, pieces: Iterable[tuple[str, int]]) -> int:
    """The same of a step for pieces of parameters, given by name and bytes: each needs as much of what its block needs
    as it has of the tensor that needs the most there, or of all of them."""
    block_of, beside = dict[str, int](), dict[int, list[int]]()
    for p in profile.parameters:
        block_of[p.name] = p.blocks[0]
        for block in p.blocks:
            beside.setdefault(block, []).append(p.bytes if p.trainable else 0)

    def together(sizes: Sequence[float]) -> float:
        most = max(sizes)
        return most + profile.update_adds * (sum(sizes) - most)

    needs = {b: profile.blocks[b].update_workspace_bytes / max(1.0, together(own)) for b, own in beside.items()}
    return round(together([0.0, *(needs[block_of[name]] * size for name, size in pieces)]))


def stays(crossing: Crossing, first: int, last: int) -> bool:
    """Whether what passes between blocks of a stage is needed by their backward. (What leaves the stage is kept by
    whoever sends it.)"""
    return first <= crossing.producer and crossing.consumers[-1] < last and any(b >= first for b in crossing.saved_by)
