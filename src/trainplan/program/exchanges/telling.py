"""Telling everybody: each member tells the next, then the second next, the fourth next …, all that it has heard.

After ⌈log₂ W⌉ rounds everybody has heard of everybody: the fewest that there can be, where a ring would take 2 (W − 1).
Some are heard of twice, so nothing can be added up this way; but bits can be ANDed, of which twice is as good as once.

>>> [[(t.source, t.target) for t in one] for one in telling(3, 1)]
[[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
>>> [len(telling(members, 1)) for members in (2, 4, 8, 16)]
[1, 2, 3, 4]
"""

from __future__ import annotations

from trainplan.program.exchanges.rounds import Rounds, Transfer, tidy


def telling(members: int, elements: int) -> Rounds:
    """What everybody knows of everybody, among so many members."""
    steps = [2**k for k in range((members - 1).bit_length())]
    return tidy([[Transfer(r, (r + step) % members, 0, elements, True) for r in range(members)] for step in steps])
