"""Equal shares of a tensor between the ranks of a gloo group, as messages: what the engine does, and a probe measures.

gloo's own collectives waste a link here. Its reduce-scatter sums everything everywhere, twice the bytes. And a sender
of gloo's waits until the receiver has said that it is ready, on the connection on which the receiver's own data goes
out: who starts sending before it has said so is heard only when all that has arrived, and the two directions of a link
take turns. gloo's all-to-all does that whenever a rank is a little ahead, its all-gather by halves. So here everybody
posts all receives first, and then sends everybody else's share directly (measured: `benchmarks/directions.py`).

Messages between two ranks arrive in the order in which both have posted them, so what is started one after the other
goes one after the other, whatever is on its way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

_GATHER, _SCATTER = 1, 2  # tags


def gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Start to bring everybody's share into its place of `whole`; `own` may be a part of it."""
    place, ranks = dist.get_rank(group), _ranks(group)
    shares = whole.view(len(ranks), -1)
    those = others(place, len(ranks))
    works = [dist.irecv(shares[other], ranks[other], group=group, tag=_GATHER) for other in those]
    works += [dist.isend(own, ranks[other], group=group, tag=_GATHER) for other in those]
    if own.data_ptr() != shares[place].data_ptr():
        shares[place].copy_(own)
    return [work for work in works if work is not None]


def scatter(
    flat: Tensor, group: dist.ProcessGroup | None, room: Tensor | None = None,
    before: Callable[[int], None] | None = None,
) -> tuple[list[dist.Work], Tensor, Tensor]:  # fmt: skip
    """Start to give everybody else's share of `flat` to whom it belongs: the messages, this rank's own share, and what
    comes from the others, one below the other (in `room`, if there is some). `before` each share is sent, it is called
    with the place of whom it is for."""
    place, ranks = dist.get_rank(group), _ranks(group)
    shares, those = flat.view(len(ranks), -1), others(place, len(ranks))
    received = flat.new_empty(len(ranks) - 1, shares.shape[1]) if room is None else room
    works = [dist.irecv(received[other - (other > place)], ranks[other], group=group, tag=_SCATTER) for other in those]
    for other in those:
        if before is not None:
            before(other)
        works.append(dist.isend(shares[other], ranks[other], group=group, tag=_SCATTER))
    return [work for work in works if work is not None], shares[place], received


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def others(place: int, ranks: int) -> list[int]:
    """The other places of a group, the next one first, so that not everybody sends to the same one.

    >>> others(2, 4)
    [3, 0, 1]
    """
    return [(place + step) % ranks for step in range(1, ranks)]
