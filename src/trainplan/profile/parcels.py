"""Parcels: what the forward pass of a section leaves for backward, and how it can go away and come back. No torch here.

A stage in sections (runs of blocks) leaves a parcel for each of them: what its blocks save inside, and the crossings
that it is the last to read. A crossing may be saved by several blocks: it goes once nobody will read it on the way
there, and stays until the first of them has gone back. So a parcel comes back whole, before the backward pass of its
section, and is given up in parts: most of it then, and the rest with earlier sections.

    section         0    1    2
    saved inside    a    b    c       crossing x, made in 0 and saved by 0 and 1, is of the parcel of 1:
    crossings         x    y          parcels a, b + x, c + y; b goes with the backward pass of 1, x with that of 0

With recomputation blocks save nothing, and parcels are the crossings that blocks read again; these are given up block
by block. What other stages made or read too is in no parcel: whoever sends or receives it keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainplan.profile.footprint import footprints, stays
from trainplan.profile.profile import Amount, Profile


@dataclass(frozen=True)
class Parcel:
    """What one section leaves."""

    until: dict[int, int]  # bytes by the section (with recomputation: by the block) whose backward gives them up
    extra: int  # bytes alive beside all parcels so far at the worst moment of the section's forward pass

    @property
    def bytes(self) -> int:
        return sum(self.until.values())


def parcels(profile: Profile, samples: Amount, sections: Sequence[tuple[int, int]], again: bool) -> list[Parcel]:
    """The parcels of a stage that is cut into these sections; `again`: its blocks are recomputed. A lowering asks for
    them once for each of them, so they are worked out once."""
    known, key = profile.known_stages, ("parcels", samples, tuple(sections), again)
    if key not in known:
        known[key] = _parcels(profile, samples, sections, again)
    found: list[Parcel] = known[key]
    return found


def _parcels(profile: Profile, samples: Amount, sections: Sequence[tuple[int, int]], again: bool) -> list[Parcel]:
    print_ = footprints(profile, samples)
    first, last = sections[0][0], sections[-1][1]
    section_of = {block: number for number, (begin, end) in enumerate(sections) for block in range(begin, end)}
    found: list[dict[int, int]] = [{} for _ in sections]
    made, gone = [0] * (last - first), [0] * (last - first + 1)
    outgoing = 0  # or kept for other stages as well: there at the end, and in no parcel
    if not again:
        for block, number in section_of.items():
            found[number][number] = found[number].get(number, 0) + print_.saved[block]
    for crossing, size in zip(profile.crossings, print_.size, strict=True):
        if not first <= crossing.producer < last:
            continue
        made[crossing.producer - first] += size
        if crossing.consumers[-1] >= last:
            outgoing += size
            continue
        reader = crossing.consumers[-1]
        if again:
            until = crossing.consumers[0]
        elif stays(crossing, first, last):
            until = section_of[min(crossing.saved_by)]
        else:  # it is there until its last reader is through
            gone[reader + 1 - first] += size
            continue
        of = found[section_of[reader]]
        of[until] = of.get(until, 0) + size
    inside = print_.saved[first:last]
    there = accumulate(inside) if not again else inside
    levels = [
        a - g + i + w
        for a, g, i, w in zip(
            accumulate(made), accumulate(gone), there, print_.forward_workspace[first:last], strict=False
        )
    ]
    before = list(accumulate(sum(until.values()) for until in found))
    extras = [max(levels[begin - first : end - first]) - before[n] for n, (begin, end) in enumerate(sections)]
    extras[-1] -= outgoing
    return [Parcel(until, max(0, extra)) for until, extra in zip(found, extras, strict=True)]
