"""Numbers of a file that nothing can have: seconds, bytes and counts that are negative, endless, or no numbers.

Python's JSON reads NaN and Infinity, and a minus is typed quickly; a clock that works with them answers nonsense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from trainplan.errors import InputError
from trainplan.files import made_by

Kept = TypeVar("Kept")
# More than anything that we count: beyond it a number was mistyped, and sums of bytes would leave 64 bits.
MOST, MOST_BYTES = 1e24, 1e15
POSSIBLE = f"a number from 0 to {MOST:.0e} was expected, or of bytes to {MOST_BYTES:.0e}"


def untrue(value: Any, free: Collection[str] = ()) -> tuple[str, float] | None:
    """The first number anywhere in a value that is negative, too large or none at all, with its place; None: all are
    well. Fields whose names are in `free` may hold others.

    >>> from trainplan.cluster.cluster import Link, Pair
    >>> untrue((Pair(0, 1, Link("a", 0.0, 1.0)), Pair(0, 2, Link("b", 0.0, -1.0)))), untrue({"x": (1, 2.0)})
    (('[1].link.rate', -1.0), None)
    """
    return None if _well([value], free, MOST) else _found(value, free, MOST, "")


def believable(value: Kept, where: str, what: str, free: Collection[str] = ()) -> Kept:
    """A value that was read from the file `where`, if its numbers can be true; `what` it is, as in `files.made_by`."""
    if (bad := untrue(value, free)) is not None:
        raise InputError(f"{where}{bad[0]}", f"it is {bad[1]!r:.60}, and {POSSIBLE}", made_by(what))
    return value


def _well(items: Sequence[Any], free: Collection[str], most: float) -> bool:
    """Whether all is well, of many values at once: of thousands of rows a field at a time is quick."""
    kinds = set(map(type, items))
    if len(kinds) > 1:
        return all(_well([item for item in items if type(item) is kind], free, most) for kind in kinds)
    for kind in kinds:
        if kind in (int, float):
            return all(0 <= item <= most for item in items)
        if kind in (tuple, list):
            return _well([*chain.from_iterable(items)], free, most)
        if kind is dict:
            return _well([*chain.from_iterable(item.values() for item in items)], free, most)
        if is_dataclass(kind):
            names = [name for name in _names(kind) if name not in free]
            return all(_well([*map(attrgetter(name), items)], free, _most(name)) for name in names)
    return True


def _found(value: Any, free: Collection[str], most: float, place: str) -> tuple[str, float] | None:
    """The first one, of a value that has one."""
    if type(value) in (int, float) and not 0 <= value <= most:
        return place, value
    inside: Sequence[tuple[str, Any, float]] = ()
    if isinstance(value, tuple | list):
        inside = [(f"[{number}]", item, most) for number, item in enumerate(value)]
    elif isinstance(value, Mapping):
        inside = [(f".{key}", item, most) for key, item in value.items()]
    elif is_dataclass(value):
        kind: Any = type(value)
        own = [name for name in _names(kind) if name not in free]
        inside = [(f".{name}", getattr(value, name), _most(name)) for name in own]
    return next(filter(None, (_found(item, free, limit, place + more) for more, item, limit in inside)), None)


@cache
def _most(name: str) -> float:
    return MOST_BYTES if "bytes" in name else MOST


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
