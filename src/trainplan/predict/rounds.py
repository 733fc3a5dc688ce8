"""Playing the rounds of an exchange whose order is decided while running: from when parts are ready to an agenda.

What the engine's threads live through (`engine/exchange.py`), in seconds that are given: a rank comes to a round when
it may (its cycle is over) or when it has enough to send and credit to do so; the round begins when the last rank has
come, and takes `bits` seconds; then what `program.agenda.choose` says goes, one buffer after the other. What a rank
tells is what it knew when it came.

>>> times = [[0.5, 1.2, 2.8, 3.0, 6.4]]                              # ms, of 5, 10, 20, 40 and 30 MB
>>> rule = Rule(sizes=(5, 10, 20, 40, 30), threshold=64, cycle=1.0)
>>> played = rounds(rule, times, [0.0], seconds=lambda size: 0.1 + size / 10)
>>> [(buffer, round(start, 1), round(end, 1)) for buffer, start, end in played.sent]
[((0,), 1.0, 1.6), ((1,), 2.0, 3.1), ((2, 3), 3.1, 9.2), ((4,), 9.2, 12.3)]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainplan.program.agenda import Agenda, Buffer, Rule, choose


@dataclass(frozen=True)
class Rounds:
    """The rounds of a step, as they would go."""

    agenda: Agenda
    sent: tuple[tuple[Buffer, float, float], ...]  # with start and end

    @property
    def over(self) -> float:
        return max((end for _, _, end in self.sent), default=0.0)

    def arrived(self, part: int) -> float:
        """When a part has been summed."""
        return next(end for buffer, _, end in self.sent if part in buffer)


def rounds(
    rule: Rule,
    ready: Sequence[Sequence[float]],  # rank → when each part is
    begin: Sequence[float],  # rank → when its first cycle starts
    seconds: Callable[[int], float],  # of a sum of so many bytes
    bits: float = 0.0,  # seconds of a round of bits
) -> Rounds:
    """Play them to the end."""
    left = set(range(len(rule.sizes)))
    agenda: list[tuple[Buffer, ...]] = []
    sent: list[tuple[Buffer, float, float]] = []
    ends: list[float] = []
    ranks = range(len(ready))
    last, free, over = list(begin), max(begin), 0.0  # free: of the bits; over: of what has been sent
    told: list[float | None] = [None for _ in ranks]  # when they came to a round in which nothing went
    while left:
        came, known, landed = [], set(left), len(sent)
        for rank in ranks:
            if rule.fuses:
                at = max(last[rank] + rule.cycle, free)
            else:
                at = _when(rule, ready[rank], left, sent, free, told[rank])
            came.append(at)
            known = {part for part in known if ready[rank][part] <= at}
            landed = min(landed, bisect_right(ends, at))
        flying = [part for buffer, _, _ in sent[landed:] for part in buffer]
        chosen = choose(rule, known, flying)
        agenda.append(chosen)
        last, free = came, max(came) + bits
        for buffer in chosen:
            start = max(free, over)
            over = start + seconds(sum(rule.sizes[part] for part in buffer))
            sent.append((buffer, start, over))
            ends.append(over)
            left -= set(buffer)
        told = [None if chosen else at for at in came]
        if rule.fuses:  # whoever sums waits until that is over
            free = max(free, over)
    return Rounds(tuple(agenda), tuple(sent))


def _when(
    rule: Rule,
    ready: Sequence[float],
    left: set[int],
    sent: Sequence[tuple[Buffer, float, float]],
    free: float,
    told: float | None,
) -> float:
    """When a rank comes to the next round: it has enough to send, and credit; and where nothing went in the last one,
    which it came to at `told`, something has changed since."""
    order = sorted(left, key=lambda part: ready[part])
    # The first few that are worth a round (`agenda.worth`): they fill it, or there are no others.
    filled = list(accumulate(rule.sizes[part] for part in order))
    count = bisect_left(filled, rule.fill, 0, len(order) - 1) + 1
    at = max(free, ready[order[count - 1]])
    flying = 0
    for buffer, _, end in reversed(sent):  # they arrive in the order in which they went
        flying += sum(rule.sizes[part] for part in buffer)
        if flying >= rule.credit:
            at = max(at, end)
            break
        if end <= free:
            break
    if told is not None:
        changes = [ready[part] for part in left] + [end for _, _, end in sent]
        at = max(at, min((moment for moment in changes if moment > told), default=at))
    return at


def forward_over(begin: float, forward: Sequence[float], arrived: Sequence[float]) -> float:
    """When a forward pass is over whose blocks wait for their weights, one after the other.

    >>> forward_over(3.0, [1, 1, 1], [5, 7, 3])
    9.0
    """
    at = begin
    for own, there in zip(forward, arrived, strict=True):
        at = max(at, there) + own
    return float(at)
