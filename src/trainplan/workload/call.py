"""A function together with some of its arguments, compared by value.

Workloads hold functions. With `functools.partial` or closures two workloads loaded from one name would differ; with
`Call` they are equal, and they can be pickled.

>>> call(int, base=2)("101"), call(int, base=2) == call(int, base=2), call(int, base=2) == call(int, base=8)
(5, True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """`function` with the named arguments `options`; what it is called with comes first."""

    function: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.function(*args, **self.options, **more)


def call(function: Callable[..., Any], /, **options: Any) -> Call:
    return Call(function, options)
