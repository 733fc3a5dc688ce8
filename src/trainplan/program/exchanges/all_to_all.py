"""Direct: every member sends to every other, with nobody between.

whole    everything to everybody, who each add it all up: one round, of (W − 1) wholes from each
sliced   part r of everything to member r, who adds it up and sends the sum to everybody: two rounds, and as few bytes
         as a ring

>>> from trainplan.program.exchanges.rounds import sent
>>> [(len(f(4, 100)), sent(f(4, 100), 4)) for f in (whole, sliced)]
[(1, (300, 300, 300, 300)), (2, (150, 150, 150, 150))]
"""

from __future__ import annotations

from collections.abc import Iterator

from trainplan.program.exchanges.rounds import Rounds, Transfer, cuts, tidy


def whole(members: int, elements: int) -> Rounds:
    """The sum over so many members."""
    return tidy([[Transfer(a, b, 0, elements, True) for a, b in _pairs(members)]])


def sliced(members: int, elements: int) -> Rounds:
    """The same, by parts."""
    cut = cuts(elements, members)
    there = [Transfer(a, b, cut[b], cut[b + 1], True) for a, b in _pairs(members)]
    back = [Transfer(a, b, cut[a], cut[a + 1], False) for a, b in _pairs(members)]
    return tidy([there, back])


def _pairs(members: int) -> Iterator[tuple[int, int]]:
    """In an order in which not all begin with the same target."""
    return ((a, (a + step) % members) for step in range(1, members) for a in range(members))
