"""When receives are posted: some ahead of the one that is needed next, so that a message can travel meanwhile.

Where messages have tags (gloo), in the order in which they are taken. Where they have none (NCCL), two ranks must name
their messages in the same order, so those of one sender are posted in the order in which they are sent: whoever takes
the second before the first has both posted by then.

>>> in_order_of_sending(peers=[0, 0, 2], sent=[7, 5, 6])     # the second receive is of the message that 0 sends first
[1, 0, 2]
>>> due([1, 0, 2], ahead=1)                                  # the first takes two postings
[2, 2, 3, 3]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

RECEIVES_AHEAD = 4


def in_order_of_sending(peers: Sequence[int], sent: Sequence[int]) -> list[int]:
    """The receives of a rank (numbered as they are taken) in the order in which they are posted.

    `peers` are their senders, and `sent` the places of their messages among everything that those send.
    """
    waiting = {
        peer: sorted((r for r, p in enumerate(peers) if p == peer), key=sent.__getitem__, reverse=True)
        for peer in set(peers)
    }
    order: list[int] = []
    posted: set[int] = set()
    for receive, peer in enumerate(peers):
        while receive not in posted:
            order.append(waiting[peer].pop())
            posted.add(order[-1])
    return order


def due(order: Sequence[int], ahead: int = RECEIVES_AHEAD) -> list[int]:
    """How many have been posted once so many have been taken: those that are taken next, and what must come first."""
    place = {receive: number for number, receive in enumerate(order)}
    needed = list(itertools.accumulate((place[receive] + 1 for receive in range(len(order))), max)) or [0]
    return [needed[min(taken + ahead, len(needed)) - 1] for taken in range(len(order) + 1)]
