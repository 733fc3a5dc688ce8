"""Ring: every member sends to the next, W − 1 times to add and W − 1 times to hand round, one part of W at a time.

2 (W − 1) rounds; every member sends 2 (W − 1)/W of the whole, as little as is possible.

>>> from trainplan.program.exchanges.rounds import sent
>>> len(ring(4, 100)), sent(ring(4, 100), 4)
(6, (150, 150, 150, 150))
"""

from __future__ import annotations

from trainplan.program.exchanges.rounds import Rounds, Transfer, cuts, tidy


def ring(members: int, elements: int) -> Rounds:
    """The sum over so many members."""
    return scatter(members, elements) + gather(members, elements)


def scatter(members: int, elements: int) -> Rounds:
    """Half of it: afterwards member r has the sum of part r."""
    return _round(members, elements, shift=-1, adds=True)


def gather(members: int, elements: int) -> Rounds:
    """The other half: member r has part r, and afterwards everybody has everything."""
    return _round(members, elements, shift=0, adds=False)


def _round(members: int, elements: int, shift: int, adds: bool) -> Rounds:
    cut = cuts(elements, members)
    rounds = []
    for number in range(members - 1):
        parts = [(r + shift - number) % members for r in range(members)]  # what each sends to the next
        rounds.append([Transfer(r, (r + 1) % members, cut[part], cut[part + 1], adds) for r, part in enumerate(parts)])
    return tidy(rounds)
