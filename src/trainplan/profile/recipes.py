"""Recipes of traced blocks: what each does, operator by operator, and how ranks could share it. No torch here."""

from __future__ import annotations

from trainplan.profile.op import Op
from trainplan.profile.recipe import Kept, Recipe, Work
from trainplan.profile.traced import BlockTrace, Traced


def recipes(traced: Traced) -> tuple[tuple[Recipe, ...], list[int]]:
    """The recipes of a model, and which of them each block follows; none of a model that does other things for other
    numbers of samples."""
    if not traced.lines:
        return (), [-1] * len(traced.base.blocks)
    small, large = traced.traces[:2]
    samples = small.samples, large.samples
    known: dict[Recipe, int] = {}
    number: dict[int, int] = {}  # of blocks by identity
    for a, b in zip(small.blocks, large.blocks, strict=True):
        if a.identity not in number:
            number[a.identity] = known.setdefault(_recipe(a, b, samples), len(known))
    return tuple(known), [number[block.identity] for block in small.blocks]


def _recipe(a: BlockTrace, b: BlockTrace, samples: tuple[int, int]) -> Recipe:
    one, two = a.share, b.share

    def works(small: tuple[Op, ...], large: tuple[Op, ...], cut: tuple[str, ...], back: int) -> tuple[Work, ...]:
        core = () if back else one.core
        ops = zip(small, large, cut, one.fractions[back], strict=True)
        return tuple(
            Work(x, y, how, place in core, numbers / total if total else 1.0)
            for place, (x, y, how, (numbers, total)) in enumerate(ops)
        )

    return Recipe(
        samples,
        works(a.forward, b.forward, one.forward, 0),
        works(a.backward, b.backward, one.backward, 1),
        tuple(Kept((x[0], y[0]), *x[1:]) for x, y in zip(one.kept, two.kept, strict=True)),
        tuple(zip(one.rows, two.rows, strict=True)),
        tuple(zip(one.columns, two.columns, strict=True)),
        (one.tokens, two.tokens),
        one.divides,
        one.whole,
        a.tail,
    )
