"""Our files: JSON with a header that says what they are, written whole or not at all.

>>> import tempfile, pathlib
>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Point:
...     x: int
...     y: tuple[float, ...]
>>> path = pathlib.Path(tempfile.mkdtemp()) / "point.json"
>>> write(path, "point", to_json(Point(1, (2.0, 3.0))))
>>> from_json(Point, read(path, "point"))
Point(x=1, y=(2.0, 3.0))
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainplan.errors import InputError, nearest

FORMAT = 1  # one number for all our files; raised when an old reader would misunderstand a new file
HEADER = ("trainplan", "format", "data")  # the keys of a file
T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what `json` can print."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [to_json(item) for item in value]


def from_json(cls: type[T], data: Any, where: str = "") -> T:
    """The dataclass that `to_json` printed; unknown and missing keys are errors with their place."""
    return typing.cast(T, _convert(cls, data, where or cls.__name__))


def _convert(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, where)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise InputError(where, f"a list was expected, found {data!r:.60}")
        if len(args) == 2 and args[1] is Ellipsis:
            if args[0] is str and all(isinstance(item, str) for item in data):
                return tuple(data)  # at once: device files have many thousands of them
            return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(args) != len(data):
            raise InputError(where, f"{len(args)} items were expected, found {len(data)}")
        return tuple(_convert(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise InputError(where, f"a mapping was expected, found {data!r:.60}")
        return {args[0](key): _convert(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is typing.Literal:
        if data in args:
            return data
        raise InputError(where, f"one of {', '.join(map(str, args))} was expected, found {data!r:.60}")
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if isinstance(data, bool) and kind is int:  # to Python true is a number, to a reader of our files it is not
        raise InputError(where, f"int was expected, found {data!r}")
    if kind is Any or (isinstance(kind, type) and isinstance(data, kind)):
        return data
    raise InputError(where, f"{getattr(kind, '__name__', kind)} was expected, found {data!r:.60}")


def _dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(where, f"a mapping was expected, found {data!r:.60}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise InputError(f"{where}.{key}", "there is no such key", nearest(key, fields))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(where, f"the key {name!r} is missing")
    return cls(**values)


def write(path: str | Path, what: str, data: Any) -> None:
    """Write `data` to `path` as a file of kind `what`; a reader never sees half of it."""
    write_text(path, json.dumps({"trainplan": what, "format": FORMAT, "data": data}, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all: to a temporary neighbour, then renamed."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(str(path), f"it cannot be written ({error.strerror})", "another path") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        raise InputError(str(path), f"it cannot be written ({error.strerror})", "another path") from None
    except BaseException:
        os.unlink(name)
        raise


def read(path: str | Path, what: str) -> Any:
    """The data of a file of kind `what`, or an error that says what the file is instead."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), f"it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(str(path), f"it is not a text file, so not a trainplan {what}") from None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            str(path), f"broken JSON at line {error.lineno}: {error.msg}", f"making the {what} again"
        ) from None
    if not isinstance(content, dict) or "trainplan" not in content:
        raise InputError(str(path), f"it is JSON, but not a trainplan {what}", f"a file made by trainplan {what}")
    if content["trainplan"] != what:
        raise InputError(str(path), f"it is a trainplan {content['trainplan']}, and a {what} was expected")
    if content.get("format") != FORMAT:
        raise InputError(
            str(path),
            f"it has format {content.get('format')}, and this version reads {FORMAT}",
            f"making the {what} again",
        )
    for key in content:
        if key not in HEADER:
            raise InputError(f"{path}.{key}", "there is no such key beside the data", nearest(key, HEADER))
    if "data" not in content:
        raise InputError(str(path), "the key 'data' is missing", f"making the {what} again")
    return content["data"]


def kind(path: str | Path) -> str:
    """What a file says that it is; nothing where it is not one of ours."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(content.get("trainplan", "")) if isinstance(content, dict) else ""
