"""Many equal layers made of few: a model of three layers that was traced becomes one of ninety-six. No torch here.

    embedding  h.0  h.1  h.2  head      traced
    embedding  h.0  h.1  h.2  …  h.94  h.95  head      the layer in the middle, again and again

The first layer reads what another kind of block made, and the gradient of the last one's output comes from another kind
of block; those between are alike. Whoever expands a model holds the result for one layer more against a model that was
traced with it (`same`): what reaches over layers in a way that this does not foresee is noticed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from trainplan.errors import ModelError
from trainplan.profile.profile import Block, Crossing, Parameter
from trainplan.profile.traced import BlockTrace, Trace, Traced, UpdateTrace

TRACED = 3  # layers of a model that is expanded


@dataclass(frozen=True)
class _Places:
    """Where blocks go; `middle` are those of the layer that is repeated."""

    path: str  # of the list of layers
    layers: int
    middle: range

    @property
    def extra(self) -> int:
        """Blocks that are put in."""
        return (self.layers - TRACED) * len(self.middle)

    @property
    def copies(self) -> range:
        return range(self.layers - TRACED + 1)

    def later(self, block: int) -> int:
        """A block that is not repeated."""
        return block if block < self.middle.start else block + self.extra

    def all(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Blocks that do something for the whole model: all copies of those that are repeated. What only the first of
        the layers after its maker does, only the first of its copies does."""
        given = list(blocks)
        reaches = any(b >= self.middle.stop for b in given)
        found: set[int] = set()
        for block in given:
            if block not in self.middle:
                found.add(self.later(block))
            else:
                found |= {block + copy * len(self.middle) for copy in (self.copies if reaches else (0,))}
        return tuple(sorted(found))

    def near(self, blocks: Iterable[int], copy: int) -> tuple[int, ...]:
        """Blocks that do something for one copy of a layer: in it, in the next one, or behind all layers."""
        follows = range(self.middle.stop, self.middle.stop + len(self.middle))
        return tuple(b + copy * len(self.middle) if b in self.middle or b in follows else self.later(b) for b in blocks)

    def renamed(self, name: str, copy: int | None = None) -> str:
        """A name in the layer that is repeated, or (without `copy`) anywhere else: the last layer has another number.

        >>> places = _Places("h", 96, range(2, 3))
        >>> places.renamed("h.1.attn.weight", copy=4), places.renamed("h.2.attn.weight"), places.renamed("wte.weight")
        ('h.5.attn.weight', 'h.95.attn.weight', 'wte.weight')
        """
        old, new = (TRACED - 1, self.layers - 1) if copy is None else (1, 1 + copy)
        head = f"{self.path}.{old}"
        inside = name == head or name.startswith((f"{head}.", f"{head}#"))
        return f"{self.path}.{new}{name[len(head) :]}" if inside else name


def expanded(traced: Traced, path: str, layers: int) -> Traced:
    """A model of `TRACED` equal layers, the list at `path`, as one of so many."""
    if layers <= TRACED:
        raise ModelError(
            f"{layers} layers of {path}", f"a model of {TRACED} is the smallest that can grow", "4 or more"
        )
    names = [block.name for block in traced.base.blocks]
    units = [
        [i for i, n in enumerate(names) if n == f"{path}.{k}" or n.startswith(f"{path}.{k}.")] for k in range(TRACED)
    ]
    first, middle, last = units
    flat = [*first, *middle, *last]
    if not middle or not first or not last or flat != list(range(flat[0], flat[-1] + 1)) or len(last) != len(middle):
        why = f"its layers are the blocks {first}, {middle} and {last}, which do not follow each other"
        raise ModelError(f"equal layers of {path}", why, "capturing the model whole")
    places = _Places(path, layers, range(middle[0], middle[-1] + 1))
    base = replace(
        traced.base,
        blocks=tuple(_blocks(traced.base.blocks, places)),
        crossings=tuple(_crossings(traced.base.crossings, places)),
        parameters=tuple(_parameters(traced.base.parameters, places)),
        inputs=tuple(replace(given, blocks=places.all(given.blocks)) for given in traced.base.inputs),
    )
    traces = tuple(_trace(trace, traced.base.crossings, places) for trace in traced.traces)
    return replace(traced, base=base, traces=traces, update=_update(traced.update, places))


def _blocks(blocks: tuple[Block, ...], places: _Places) -> list[Block]:
    middle = blocks[places.middle.start : places.middle.stop]
    copies = [replace(b, name=places.renamed(b.name, copy)) for copy in places.copies for b in middle]
    after = [replace(b, name=places.renamed(b.name)) for b in blocks[places.middle.stop :]]
    return [*blocks[: places.middle.start], *copies, *after]


def _name(name: str, copy: int) -> str:
    return f"{name}#{copy}" if copy else name


def _crossings(crossings: tuple[Crossing, ...], places: _Places) -> list[Crossing]:
    made: list[Crossing] = []
    for repeats, group in groupby(crossings, lambda c: c.producer in places.middle):
        own = list(group)
        if not repeats:
            made += [replace(c, producer=places.later(c.producer), consumers=places.all(c.consumers)) for c in own]
            continue
        for copy in places.copies:
            made += [
                replace(
                    c,
                    name=_name(c.name, copy),
                    producer=c.producer + copy * len(places.middle),
                    consumers=places.near(c.consumers, copy),
                )
                for c in own
            ]
    return made


def _parameters(parameters: tuple[Parameter, ...], places: _Places) -> list[Parameter]:
    """In the order in which gradients arrive: where the last layer's come first, so do those of later copies."""
    made: list[Parameter] = []
    mark = f"{places.path}.1."
    before = ""
    for repeats, group in groupby(parameters, lambda p: p.name.startswith(mark)):
        own = list(group)
        if not repeats:
            made += [replace(p, name=places.renamed(p.name), blocks=places.all(p.blocks)) for p in own]
            before = own[-1].name
            continue
        backwards = before.startswith(f"{places.path}.{TRACED - 1}.")
        for copy in reversed(places.copies) if backwards else places.copies:
            made += [replace(p, name=places.renamed(p.name, copy), blocks=places.near(p.blocks, copy)) for p in own]
    return made


def _trace(trace: Trace, crossings: tuple[Crossing, ...], places: _Places) -> Trace:
    middle = trace.blocks[places.middle.start : places.middle.stop]

    def renamed(block: BlockTrace, copy: int | None = None) -> BlockTrace:
        return replace(block, arrivals={places.renamed(n, copy): at for n, at in (block.arrivals or {}).items()})

    copies = [renamed(block, copy) for copy in places.copies for block in middle]
    after = [renamed(block) for block in trace.blocks[places.middle.stop :]]
    saved: dict[str, tuple[int, ...]] = {}
    producer = {c.name: c.producer for c in crossings}
    for name, users in trace.saved_by.items():
        if producer[name] in places.middle:
            saved |= {_name(name, copy): places.near(users, copy) for copy in places.copies}
        else:
            saved[name] = places.all(users)
    return replace(trace, blocks=(*trace.blocks[: places.middle.start], *copies, *after), saved_by=saved)


def _update(update: UpdateTrace, places: _Places) -> UpdateTrace:
    def grown(items: tuple[Any, ...]) -> tuple[Any, ...]:
        middle = items[places.middle.start : places.middle.stop]
        return (*items[: places.middle.start], *middle * len(places.copies), *items[places.middle.stop :])

    return replace(
        update,
        blocks=grown(update.blocks),
        tensors=grown(update.tensors),
        state_bytes=grown(update.state_bytes),
    )


def same(one: Traced, other: Traced) -> bool:
    """Whether two are the same, but for the names of what passes between blocks."""
    return _plain(one) == _plain(other)


def _plain(traced: Traced) -> Traced:
    number = {crossing.name: str(place) for place, crossing in enumerate(traced.base.crossings)}
    base = replace(traced.base, crossings=tuple(replace(c, name=number[c.name]) for c in traced.base.crossings))
    traces = tuple(
        replace(trace, saved_by={number[name]: users for name, users in trace.saved_by.items()})
        for trace in traced.traces
    )
    return replace(traced, base=base, traces=traces)
