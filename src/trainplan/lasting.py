"""Attributes that are worked out once, and stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class lasting(Generic[T]):
    """As `functools.cached_property`, which takes a lock until Python 3.12: ten times as long as to look up a name. A
    prediction asks for some fifty such attributes for the first time, and the values of which they are do not change.

    >>> class Sides:
    ...     @lasting
    ...     def six(self) -> int:
    ...         print("worked out")
    ...         return 6
    >>> sides = Sides()
    >>> sides.six, sides.six
    worked out
    (6, 6)
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, "", make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        found = instance.__dict__[self.name] = self.make(instance)
        return found
