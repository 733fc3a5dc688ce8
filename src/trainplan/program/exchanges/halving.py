"""Recursive halving and doubling: with a member far away half of everything, with one nearer half of that …; and back.

2 log₂ W rounds, and as few bytes as a ring, where W is a power of two. Else as many members as make one take part, each
of the others having one of these add its own beforehand and getting the sum afterwards.

>>> from trainplan.program.exchanges.rounds import sent
>>> len(halving(4, 100)), sent(halving(4, 100), 4), len(halving(3, 100)), sent(halving(3, 100), 3)
(4, (150, 150, 150, 150), 4, (200, 100, 100))
"""

from __future__ import annotations

from trainplan.program.exchanges.rounds import Rounds, Transfer, cuts, tidy


def halving(members: int, elements: int) -> Rounds:
    """The sum over so many members."""
    power = 1 << (members.bit_length() - 1)
    others = range(power, members)  # one of these for each of the first members
    cut = cuts(elements, power)
    first, last = [0] * power, [power] * power  # the parts that each still sums
    apart = power // 2
    halves = []
    while apart:
        one = []
        for r in range(power):
            middle = (first[r] + last[r]) // 2
            kept, given = ((first[r], middle), (middle, last[r])) if not r & apart else (
                (middle, last[r]), (first[r], middle))  # fmt: skip
            one.append(Transfer(r, r ^ apart, cut[given[0]], cut[given[1]], True))
            first[r], last[r] = kept
        halves.append(one)
        apart //= 2
    doubles = [[Transfer(t.target, t.source, t.first, t.last, False) for t in one] for one in reversed(halves)]
    before = [Transfer(r, r - power, 0, elements, True) for r in others]
    after = [Transfer(r - power, r, 0, elements, False) for r in others]
    return tidy([before, *halves, *doubles, after])
