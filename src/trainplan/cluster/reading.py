"""Reading descriptions that people write: strict keys, quantities with units, and where each number is from.

A number may be written alone (`rate: 25GB/s`) or with its source (`rate: {value: 25GB/s, source: data sheet}`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainplan import files
from trainplan.errors import InputError, nearest

T = TypeVar("T")


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which a key that is written twice is an error, not a quiet last word."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"line {node.start_mark.line + 1}", f"the key {key!r} is written twice", "leaving one out")
        result[key] = loader.construct_object(value, deep=True)
    return result


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The content of a YAML text; `where` names it in errors."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        why = f"broken YAML{line}: {getattr(error, 'problem', error)}"
        raise InputError(where, why, "KEY: VALUE on every line; brackets and quotes are closed") from None
    except InputError as error:
        raise InputError(f"{where}, {error.asked}", error.why, error.instead) from None


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            str(path),
            f"it cannot be read ({error.strerror})",
            files.neighbour(path, "trainplan cluster show 4xT4 -o FILE, which writes one"),
        ) from None
    except UnicodeDecodeError:
        raise InputError(str(path), "it is not a text file", "a text file in UTF-8") from None
    return parse_yaml(text, str(path))


def mapping(data: Any, where: str, known: Iterable[str]) -> dict[str, Any]:
    """`data` as a mapping with no key but the known ones.

    >>> mapping({"memmory": "4GiB"}, "lab.yaml", ["memory", "cores"])
    Traceback (most recent call last):
    trainplan.errors.InputError: lab.yaml: there is no key 'memmory'. Try memory.
    """
    known = list(known)
    if not isinstance(data, dict):
        raise InputError(where, f"a mapping was expected, found {data!r:.60}", f"the keys {', '.join(known)}")
    for key in data:
        if key not in known:
            raise InputError(where, f"there is no key {key!r}", nearest(str(key), known))
    return data


def sourced(data: Any, where: str, parse: Callable[[Any], T]) -> tuple[T, str]:
    """A value and where it is from; the source is empty when none was given.

    >>> from trainplan.units import parse_rate
    >>> sourced({"value": "25GB/s", "source": "data sheet"}, "rate", parse_rate)
    (25000000000.0, 'data sheet')
    >>> sourced("25GB/s", "rate", parse_rate)
    (25000000000.0, '')
    """
    source = ""
    if isinstance(data, dict):
        data = mapping(data, where, ["value", "source"])
        if "value" not in data:
            raise InputError(
                where, "the key 'value' is missing", "{value: 25GB/s, source: data sheet}, or the value alone"
            )
        source = text(data.get("source", ""), f"{where}.source")
        data = data["value"]
    return placed(where, lambda: parse(data)), source


def placed(where: str, make: Callable[[], T]) -> T:
    """What `make` returns; its errors are told with their place."""
    try:
        return make()
    except InputError as error:
        raise InputError(f"{where}: {error.asked}", error.why, error.instead) from None


def _near(data: Any, least: int = 0) -> int:
    """The whole number of `least` or more that is nearest to what was given."""
    return max(round(_close(data)), least)


def _close(data: Any) -> float:
    try:
        return abs(found) if math.isfinite(found := float(data)) else 0.0
    except (TypeError, ValueError):
        return 1.0


def whole(data: Any, least: int = 0) -> int:
    """A whole number that is not too small."""
    if isinstance(data, bool) or not isinstance(data, int) or data < least:
        raise InputError(repr(data), f"a whole number of {least} or more was expected", str(_near(data, least)))
    return data


def number(data: Any) -> float:
    """A number that is zero or more."""
    if isinstance(data, bool) or not isinstance(data, int | float) or not 0 <= data < float("inf"):
        raise InputError(repr(data), "a number of zero or more was expected", f"{_close(data):g}")
    return float(data)


def share(data: Any) -> float:
    """A number from 0 to 1."""
    if number(data) > 1:
        raise InputError(repr(data), "a share of 1 or less was expected", "1, or less")
    return float(data)


def text(data: Any, where: str) -> str:
    """A text."""
    if not isinstance(data, str):
        raise InputError(where, f"a text was expected, found {data!r:.60}", '"…", in quotes')
    return data


def flag(data: Any, where: str) -> bool:
    """True or false."""
    if not isinstance(data, bool):
        raise InputError(where, f"true or false was expected, found {data!r:.60}", "true" if data else "false")
    return data


def items(data: Any, where: str, like: str = "") -> list[Any]:
    """A list with something in it; `like`: such a one, where what was given is no item of it."""
    if not isinstance(data, list) or not data:
        alone = f"[{data}]" if isinstance(data, str | int | float) else "[…], with one item or more"
        instead = like or alone
        raise InputError(where, f"a list with at least one item was expected, found {data!r:.60}", instead)
    return data
