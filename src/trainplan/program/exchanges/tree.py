"""Binomial tree: pairs are added, then pairs of pairs, until member 0 has the sum; which goes back the same way.

2 ⌈log₂ W⌉ rounds of the whole: few of them, and long ones.

>>> from trainplan.program.exchanges.rounds import sent
>>> len(tree(5, 10)), sent(tree(5, 10), 5)                      # 2 (W − 1) wholes in all, ⌈log₂ W⌉ of them by member 0
(6, (30, 10, 20, 10, 10))
"""

from __future__ import annotations

from trainplan.program.exchanges.rounds import Rounds, Transfer, tidy


def tree(members: int, elements: int) -> Rounds:
    """The sum over so many members."""
    up = []
    step = 1
    while step < members:
        up.append([Transfer(r, r - step, 0, elements, True) for r in range(step, members, 2 * step)])
        step *= 2
    down = [[Transfer(t.target, t.source, t.first, t.last, False) for t in one] for one in reversed(up)]
    return tidy(up + down)
