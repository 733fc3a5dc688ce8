"""What an exchange is made of: rounds of transfers between the members of a group.

All transfers of a round happen at once. What is sent is what was there when the round began; what arrives is added to
what the target has, or takes its place. Where several things arrive to be added, they are added in the order of the
members, the target's own at its own place: so that all members get the same sum, to the last bit.

>>> held = [[1.0, 2.0], [10.0, 20.0]]
>>> play(((Transfer(1, 0, 0, 2, True),), (Transfer(0, 1, 0, 2, False),)), held)       # there, and back
[[11.0, 22.0], [11.0, 22.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """Elements first ≤ e < last, from one member to another. Members are counted, not named."""

    source: int
    target: int
    first: int
    last: int
    adds: bool  # to what the target has; else it takes its place


Round = tuple[Transfer, ...]
Rounds = tuple[Round, ...]


def cuts(elements: int, parts: int) -> list[int]:
    """Where so many elements are cut into parts that are as equal as they can be: part k is from cut k to cut k + 1.

    >>> cuts(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [elements * part // parts for part in range(parts + 1)]


def tidy(rounds: Sequence[Sequence[Transfer]]) -> Rounds:
    """Without transfers of nothing, and rounds without transfers."""
    full = (tuple(t for t in one if t.first < t.last) for one in rounds)
    return tuple(one for one in full if one)


def side_by_side(several: Sequence[Rounds]) -> Rounds:
    """Exchanges of different members, or of different elements, that go on at the same time."""
    longest = max(map(len, several), default=0)
    return tuple(tuple(t for one in several if number < len(one) for t in one[number]) for number in range(longest))


def moved(rounds: Rounds, members: Sequence[int], first: int = 0) -> Rounds:
    """The same among other members, on elements that begin elsewhere."""
    return tuple(
        tuple(Transfer(members[t.source], members[t.target], first + t.first, first + t.last, t.adds) for t in one)
        for one in rounds
    )


def sent(rounds: Rounds, members: int) -> tuple[int, ...]:
    """Elements that each member sends."""
    total = [0] * members
    for one in rounds:
        for t in one:
            total[t.source] += t.last - t.first
    return tuple(total)


def beside(rounds: Rounds, members: int) -> tuple[int, ...]:
    """Elements that each member must have room for, beside its own, to receive what it is to add: the most of any
    round."""
    most = [0] * members
    for one in rounds:
        now = [0] * members
        for t in one:
            now[t.target] += (t.last - t.first) * t.adds
        most = [max(pair) for pair in zip(most, now, strict=True)]
    return tuple(most)


def play(rounds: Rounds, held: Sequence[Sequence[float]]) -> list[list[float]]:
    """What the members have afterwards: the definition that the engine is held against."""
    now = [list(own) for own in held]
    for one in rounds:
        before = [list(own) for own in now]
        parts: dict[tuple[int, int], list[tuple[int, float]]] = {}  # (target, element) → (member, value) to add up
        for t in one:
            for e in range(t.first, t.last):
                if t.adds:
                    own = parts.setdefault((t.target, e), [(t.target, before[t.target][e])])
                    own.append((t.source, before[t.source][e]))
                else:
                    now[t.target][e] = before[t.source][e]
        for (target, e), values in parts.items():
            now[target][e] = sum(value for _, value in sorted(values))
    return now
