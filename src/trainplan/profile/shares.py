"""What of a traced block a rank does, keeps and sends where several ranks share it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainplan.profile.recipe import Share
from trainplan.profile.slicing import cuts, marks
from trainplan.profile.tape import Seen, Step


def share_of(
    steps: Sequence[Step],
    weights: Mapping[int, str],
    made: Collection[int],
    saved: Sequence[tuple[int, int, bool]],
    samples: int,
) -> tuple[Share, set[str]]:
    """That of a block, and the weights of which a rank has a slice. `weights`: storage → name; `saved`: storage, bytes,
    whether of numbers with a fraction."""
    found = cuts([step for step in steps if not step.backward], weights, made, samples)
    marked = marks(steps, found, weights)
    read = {seen.storage: seen for seen in found.columns.values()}
    forward, backward = (
        {s.op: _fraction(s) for s in steps if s.op is not None and s.backward is b} for b in (False, True)
    )
    share = Share(
        tuple(marked.forward[op] for op in range(len(forward))),
        tuple(marked.backward[op] for op in range(len(backward))),
        tuple(sorted(marked.core)),
        (tuple(forward[op] for op in range(len(forward))), tuple(backward[op] for op in range(len(backward)))),
        tuple((size, key in marked.sliced, key in marked.inner, number) for key, size, number in saved),
        tuple(_bytes(seen) for seen in (*found.rows.values(), *([found.embedded] if found.embedded else []))),
        tuple(_bytes(seen) for seen in read.values()),
        found.tokens,
        tuple(sorted(found.divides)),
        found.why,
    )
    return share, {weights[key] for key in found.weights}


def _bytes(seen: Seen) -> int:
    return seen.elements * seen.item


def _fraction(step: Step) -> tuple[int, int]:
    """Bytes of what an operator reads and writes that are numbers with a fraction, and all of them."""
    sizes = [(seen.elements * seen.item, seen.number) for seen in (*step.reads, *step.writes)]
    total = sum(size for size, _ in sizes)
    return sum(size for size, number in sizes if number), total
