"""Units: weights that replicas share out together, gather together, and whose gradients they sum together.

A stage is cut into **sections**, runs of neighbouring blocks, each closed once its weights have reached the bucket
size. A section has a unit of the weights that only its blocks use. Weights that several sections use (an embedding that
is also the output layer) are units of their own, gathered before the first section that reads them and kept until the
last.

The weights of a unit lie one after the other in one flat tensor, which is cut into as many equal shares as there are
replicas to share it (the last one is filled up with zeros). So a rank has one run of elements of a unit, of some
weights all and of two at most a part: nothing has to be copied together before it is sent, nor apart after it has come.

>>> unit = Unit(("w", "b"), (6, 3), 4, sharers=4, first=0, last=0)
>>> unit.share, unit.bytes, [unit.own(place) for place in range(4)]
(3, 48, [3, 3, 3, 0])
>>> unit.parts(place=1), unit.parts(place=2)
({'w': (3, 6)}, {'b': (0, 3)})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainplan.lasting import lasting
from trainplan.profile.profile import Parameter, Profile
from trainplan.program.lower.buckets import kept

Section = tuple[int, int]  # blocks first ≤ b < last


@dataclass(frozen=True)
class Unit:
    """Weights that are shared out together."""

    names: tuple[str, ...]
    counts: tuple[int, ...]  # elements of each
    item: int  # bytes of an element
    sharers: int
    first: int  # the first section of the stage that reads it, and the last
    last: int

    @lasting
    def count(self) -> int:
        """Elements of all of them."""
        return sum(self.counts)

    @lasting
    def share(self) -> int:
        """Elements of everybody's share."""
        return -(-self.count // self.sharers)

    @lasting
    def share_bytes(self) -> int:
        return self.share * self.item

    @lasting
    def bytes(self) -> int:
        """Of all shares together: what is gathered, and what is summed."""
        return self.share_bytes * self.sharers

    def own(self, place: int) -> int:
        """Elements of weights in somebody's share: all, but for what it was filled up with."""
        return max(0, min(self.share, self.count - place * self.share))

    def parts(self, place: int) -> dict[str, tuple[int, int]]:
        """The weights that somebody has elements of, and which: from … to."""
        begin, found = place * self.share, dict[str, tuple[int, int]]()
        for name, count in zip(self.names, self.counts, strict=True):
            first, last = max(begin, 0), min(begin + self.share, count)
            if first < last:
                found[name] = first, last
            begin -= count
        return found


def sections(parameters: Sequence[Parameter], first: int, last: int, limit: int) -> list[Section]:
    """The sections of a stage of blocks first ≤ b < last; those without weights go with their neighbours.

    >>> own = [Parameter(f"{block}", (block,), count=1, bytes=8) for block in (1, 2, 3, 5)]
    >>> sections(own, 0, 7, limit=16), sections(own, 0, 7, limit=1), sections([], 0, 7, limit=1)
    ([(0, 3), (3, 7)], [(0, 2), (2, 3), (3, 4), (4, 7)], [(0, 7)])
    """
    sizes = dict.fromkeys(range(first, last), 0)
    for parameter in parameters:
        if len(parameter.blocks) == 1:
            sizes[parameter.blocks[0]] += parameter.bytes
    found, begin, size = list[Section](), first, 0
    for block in range(first, last):
        size += sizes[block]
        if size >= limit and size and any(sizes[later] for later in range(block + 1, last)):
            found.append((begin, block + 1))
            begin, size = block + 1, 0
    return [*found, (begin, last)]


def units(
    parameters: Sequence[Parameter], cut: Sequence[Section], sharers: int, fine: Sequence[Section] = ()
) -> list[Unit]:
    """The units of a stage, in the order in which its sections read them. What other stages hold too is in none.

    `fine`: passes come in these sections, of which those of the units are made up.

    >>> own = [Parameter(f"{block}", (block,), count=1, bytes=8) for block in range(4)]
    >>> [(u.names, u.first, u.last) for u in units(own, [(0, 1), (1, 4)], 2, [(0, 1), (1, 2), (2, 4)])]
    [(('0',), 0, 0), (('1', '2', '3'), 1, 2)]
    """
    (begin, _), (_, end) = cut[0], cut[-1]
    place = {block: number for number, (first, last) in enumerate(fine or cut) for block in range(first, last)}
    section_of = {block: number for number, (first, last) in enumerate(cut) for block in range(first, last)}
    found: dict[tuple[int, int, int], list[Parameter]] = {}
    for parameter in parameters:
        low, high = parameter.low, parameter.high
        if parameter.trainable and begin <= low and high < end:
            span = section_of[low], section_of[high]
            found.setdefault((*span, parameter.bytes // parameter.count), []).append(parameter)
    made = []
    for (first, last, item), own in sorted(found.items()):
        span = place[cut[first][0]], place[cut[last][1] - 1]
        made.append(Unit(tuple([p.name for p in own]), tuple([p.count for p in own]), item, sharers, *span))
    return made


def known_sections(
    profile: Profile, parameters: Sequence[Parameter], bound: tuple[int, int], limit: int
) -> list[Section]:
    """The sections of a stage of a profile, worked out once."""
    found: list[Section] = kept(profile, ("sections", bound, limit), lambda: sections(parameters, *bound, limit))
    return found


def known_units(profile: Profile, parameters: Sequence[Parameter], cut: Sequence[Section], sharers: int) -> list[Unit]:
    """The units of a stage of a profile, worked out once."""
    found: list[Unit] = kept(profile, ("units", tuple(cut), sharers), lambda: units(parameters, cut, sharers))
    return found
