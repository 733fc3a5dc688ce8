"""What is exchanged when, where that is decided while running: Horovod's fusion, and slices by priority.

Gradients become *parts*: whole ones (Horovod), or slices of them (P3, ByteScheduler, PACE). A part is ready on a rank
when the backward pass there has completed it. In every *round* the ranks tell each other what is ready (and, where
several parts may be on their way at once, what has arrived) in one small sum of bits; what is ready on all of them they
know then, all alike, and a pure function of that says what goes: `choose`. So nobody has to be asked, and since a rank
goes on to a round whenever anything of its own is left to send, and everything becomes ready sooner or later, nobody
waits for ever.

The rounds of a step are its *agenda*; where a model is cut into stages, every stage has one of its own, since its
copies exchange nothing with those of others. The clock makes one by playing the rounds (`predict/rounds.py`), the
engine by living through them (`engine/decided.py`), with the same `choose`; an agenda can be lowered to a program, and
replayed.

>>> rule = Rule(sizes=(8, 8, 2), first_use=(2, 1, 0), credit=1)      # three slices, of the last layer first
>>> choose(rule, {0, 1}, flying=())                                  # the better one of those that are ready
((1,),)
>>> choose(Rule(sizes=(8, 8, 2), threshold=10), {0, 1, 2}, flying=())
((0,), (1, 2))

A round of bits and a sum take a while however short they are, and a model may have hundreds of small gradients. So by
priority, too, parts may be put together: a rank comes to a round when it has `fill` bytes to send, or everything that
is left, and those that are needed first go side by side in one sum, up to as many bytes. What becomes ready meanwhile
waits no longer than for a slice of that size. Nought is as P3 and ByteScheduler were published: every slice by itself,
as soon as it is ready.

>>> choose(Rule(sizes=(8, 3, 3, 3), first_use=(3, 2, 1, 0), fill=8), {0, 1, 2, 3}, flying=())
((3, 2),)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainplan.errors import InputError

Buffer = tuple[int, ...]  # parts that travel together
Agenda = tuple[tuple[Buffer, ...], ...]  # of one step: for every round what goes, in that order
Agendas = Mapping[int, Agenda]  # of one step: by stage

STATUS_BITS = 3  # that Horovod's ranks tell each other besides what is ready
GRANULARITY = 512  # bytes: Horovod's threshold is a multiple of so many for each rank of a node


@dataclass(frozen=True)
class Rule:
    """What a decision follows from, but for the moment: known to all ranks from the start."""

    sizes: tuple[int, ...]  # bytes of every part, in the order in which they become ready
    first_use: tuple[int, ...] = ()  # the block of the next forward pass that needs each first: the lower, the sooner
    types: tuple[str, ...] = ()  # of each; only the same travel together
    threshold: int | None = None  # bytes that are put together at most; None: nothing is, and priorities decide
    cycle: float = 0.0  # seconds from round to round at least
    credit: int = 1  # bytes on their way: as long as some are left, one more part goes
    fill: int = 0  # bytes that are put together by priority at most, and that a rank waits for; 0: each part alone

    @property
    def fuses(self) -> bool:
        return self.threshold is not None

    @property
    def several(self) -> bool:
        """Whether several may be on their way at once. Otherwise a rank that comes to a round has none on its way."""
        return not self.fuses and self.credit > 1

    @property
    def bits_bytes(self) -> int:
        """Bytes of the sum of bits of a round: whole words of 64 bits, for what is ready and what has arrived.

        >>> Rule((4,) * 61, threshold=0).bits_bytes, Rule((4,) * 62, threshold=0).bits_bytes
        (8, 16)
        """
        told = len(self.sizes) * (2 if self.several else 1)
        return -(-(STATUS_BITS + told) // 64) * 8


def fuse(parts: Sequence[int], sizes: Sequence[int], threshold: int, types: Sequence[str] = ()) -> tuple[Buffer, ...]:
    """Horovod's fusion: from the first on, as long as the next of the same type fits; what does not match is set aside
    for a while, until that is too much as well. A part above the threshold goes alone.

    >>> fuse(range(4), [50, 20, 10, 30], 64)
    ((0,), (1, 2, 3))
    >>> fuse(range(7), [20, 8, 10, 8, 30, 70, 1], 64, "fhfhfff")
    ((0, 2, 4), (1, 3), (5,), (6,))
    """
    left, found = list(parts), []
    while left:
        head, rest = left[0], left[1:]
        buffer, size, skipped, aside = [head], sizes[head], 0, list[int]()
        while rest:
            part = rest[0]
            if size + sizes[part] <= threshold and (not types or types[part] == types[head]):
                buffer.append(part)
                size += sizes[part]
            else:
                skipped += sizes[part]
                if size + skipped > threshold:
                    break
                aside.append(part)
            rest.pop(0)
        found.append(tuple(buffer))
        left = aside + rest
    return tuple(found)


def choose(rule: Rule, ready: Collection[int], flying: Collection[int]) -> tuple[Buffer, ...]:
    """What goes now: of the parts that are ready on all ranks and have not gone yet, while others are on their way.

    With credits a part goes as long as *any* credit is left, which may be less than its size: so one always goes.
    Credit 1 means one at a time; a round then waits until the one before has arrived.

    >>> rule = Rule(sizes=(4, 4, 4, 4), first_use=(1, 1, 0, 0), credit=6)
    >>> choose(rule, {0, 1, 2}, flying=()), choose(rule, {0, 1}, flying={2}), choose(rule, {0}, flying={1, 2})
    (((2,), (0,)), ((0,),), ())
    >>> choose(Rule((4, 4, 4, 4), first_use=(1, 1, 0, 0), credit=10, fill=8), {0, 1, 2, 3}, flying=())
    ((2, 3), (0,))
    """
    if rule.threshold is not None:
        return fuse(sorted(ready), rule.sizes, rule.threshold, rule.types)
    credit = rule.credit - sum(rule.sizes[part] for part in flying)
    chosen: list[list[int]] = []
    size = 0  # of the last one
    for part in sorted(ready, key=lambda part: (rule.first_use[part], part)):
        own = rule.sizes[part]
        joins = bool(chosen) and size + own <= rule.fill and _alike(rule, chosen[-1][0], part)
        if credit <= 0 and (rule.several or not joins):  # where one goes at a time, what joins it is part of that one
            break
        if joins:
            chosen[-1].append(part)
            size += own
        else:
            chosen.append([part])
            size = own
        credit -= own
    return tuple(map(tuple, chosen))


def _alike(rule: Rule, one: int, other: int) -> bool:
    """Whether two parts may travel together."""
    return not rule.types or rule.types[one] == rule.types[other]


def worth(rule: Rule, ready: Collection[int], left: Collection[int]) -> bool:
    """Whether a rank that has these to send, of those that have not gone, comes to a round by priority.

    >>> rule = Rule(sizes=(4, 4, 2), first_use=(2, 1, 0), fill=8)
    >>> [worth(rule, ready, {0, 1, 2}) for ready in ((), {0}, {0, 1})], worth(rule, {2}, {2})
    ([False, False, True], True)
    """
    return bool(ready) and (sum(rule.sizes[part] for part in ready) >= rule.fill or len(ready) == len(left))


def landed_first(rule: Rule, agenda: Agenda) -> list[int]:
    """For every round how many of the buffers before it must have arrived before it can send anything. (They arrive in
    the order in which they went.)

    >>> rule = Rule(sizes=(4, 4, 4, 4), first_use=(1, 1, 0, 0), credit=6)
    >>> landed_first(rule, (((2,), (0,)), ((1,),), ((3,),)))
    [0, 1, 2]
    """
    gone: list[int] = []  # bytes of every buffer that has gone
    found: list[int] = []
    flying = landed = 0  # bytes that are on their way once so many have arrived; whoever had to wait, those after it do
    for buffers in agenda:
        if rule.fuses:  # who sums in turn waits for everything
            landed = len(gone)
        while landed < len(gone) and buffers and flying >= rule.credit:
            flying -= gone[landed]
            landed += 1
        found.append(landed)
        sizes = [sum(rule.sizes[part] for part in buffer) for buffer in buffers]
        gone += sizes
        flying += sum(sizes)
    return found


def in_turn(rule: Rule) -> Agenda:
    """The agenda of ranks that are never ahead of their exchange: every part goes alone, as it becomes ready.

    >>> in_turn(Rule(sizes=(4, 4), threshold=64))
    (((0,),), ((1,),))
    """
    return tuple(((part,),) for part in range(len(rule.sizes)))


def check_agenda(rule: Rule, agenda: Agenda) -> Agenda:
    """The agenda itself, if every part goes exactly once, and together only what is of one type."""
    gone = sorted(part for buffers in agenda for buffer in buffers for part in buffer)
    if gone != list(range(len(rule.sizes))):
        why = f"it sends {len(gone)} parts, {len(set(gone))} of them different, and a step has {len(rule.sizes)}"
        raise InputError("an agenda to be replayed", why, "the agenda of a step of the same plan and model")
    for buffer in (buffer for buffers in agenda for buffer in buffers):
        kinds = sorted({rule.types[part] for part in buffer} if rule.types else ())
        if len(kinds) > 1:
            why = f"it has parts {', '.join(map(str, buffer))} go together, which are {' and '.join(kinds)}"
            raise InputError("an agenda to be replayed", why, "the agenda of a step of the same plan and model")
    return agenda


def whole_threshold(threshold: int, local: int) -> int:
    """Horovod's threshold as it is used on nodes with so many ranks: rounded up.

    >>> whole_threshold(1_000_000, local=4)
    1001472
    """
    unit = GRANULARITY * local
    return -(-threshold // unit) * unit
