"""Parts of gradients: what goes at once where an exchange is decided while running (`program/agenda.py`).

Horovod sends whole gradients, several at once; P3 and ByteScheduler slices of them; PACE slices of tensors into which
several gradients were fused. A slice has whole numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainplan.plan.plan import Plan
from trainplan.program.agenda import Rule
from trainplan.program.lower.buckets import Bucket


@dataclass(frozen=True)
class Part:
    """A slice of a bucket, or all of it."""

    bucket: int
    start: int  # elements
    count: int
    bytes: int


def parts_of(plan: Plan, buckets: Sequence[Bucket]) -> list[Part]:
    """The parts of all buckets, in the order in which they become ready.

    >>> from trainplan.plan.plan import plan
    >>> two = [Bucket(("a",), 20, element=4), Bucket(("b",), 4)]
    >>> [(p.bucket, p.start, p.bytes) for p in parts_of(plan(slice=10), two)]
    [(0, 0, 8), (0, 2, 8), (0, 4, 4), (1, 0, 4)]
    """
    found = []
    for number, bucket in enumerate(buckets):
        elements = bucket.bytes // bucket.element
        most = max(1, plan.slice // bucket.element) if plan.slice else max(1, elements)
        for start in range(0, elements, most):
            count = min(most, elements - start)
            found.append(Part(number, start, count, count * bucket.element))
    return found


@dataclass(frozen=True)
class Decided:
    """The gradients of a stage, in parts, and what decides which of them go when."""

    parts: tuple[Part, ...]
    rule: Rule


def decided_of(plan: Plan, buckets: Sequence[Bucket]) -> Decided:
    """The same of these buckets; none: nothing is exchanged."""
    parts, fuses = tuple(parts_of(plan, buckets)), plan.exchange == "horovod"
    rule = Rule(
        sizes=tuple(part.bytes for part in parts),
        first_use=tuple(buckets[part.bucket].block for part in parts),
        types=tuple(str(buckets[part.bucket].element) for part in parts),
        threshold=plan.threshold if fuses else None,
        cycle=plan.cycle,
        credit=plan.credit or 1,
        fill=0 if fuses else plan.threshold,
    )
    return Decided(parts, rule)
