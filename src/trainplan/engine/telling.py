"""What is true on all of some ranks: one AND of their bits, again and again, in as few hops as there can be.

The hops are those of `program/exchanges/telling.py`, on messages from rank to rank. Receives are posted before they are
needed (`expect`): gloo sends nothing before the other side has said that it may, and that takes as long as a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.program.exchanges.telling import telling

_TAGS = 2**30  # then they begin again


class Telling:
    """The rounds of a group, one after the other: each is expected first, and then told."""

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int], rank: int, words: int) -> None:
        self._group, self._words, self._round = group, words, 0
        place = members.index(rank)
        hops = [{t.source: t.target for t in one} for one in telling(len(members), words)]
        self._targets = [members[hop[place]] for hop in hops]
        self._sources = [members[{target: source for source, target in hop.items()}[place]] for hop in hops]
        self._expected: list[tuple[Tensor, dist.Work]] = []
        self.sent = 0  # bytes

    def expect(self) -> None:
        """Be ready for the next round, which will come."""
        for number, source in enumerate(self._sources):
            bits = torch.empty(self._words, dtype=torch.int64)
            work = dist.irecv(bits, source, group=self._group, tag=self._tag(number))
            assert work is not None
            self._expected.append((bits, work))

    def tell(self, bits: int) -> int:
        """The bits that are set on all ranks; the others tell theirs meanwhile."""
        mine = torch.frombuffer(bytearray(bits.to_bytes(8 * self._words, "little")), dtype=torch.int64)
        works = []
        for number, (target, (heard, work)) in enumerate(zip(self._targets, self._expected, strict=True)):
            going = dist.isend(mine, target, group=self._group, tag=self._tag(number))
            assert going is not None
            works.append(going)
            self.sent += mine.nbytes
            work.wait()
            mine = mine & heard
        for going in works:
            going.wait()
        self._expected = []
        self._round += 1
        return int.from_bytes(mine.numpy().tobytes(), "little")

    def _tag(self, hop: int) -> int:
        return (self._round * len(self._sources) + hop) % _TAGS

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
