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
import itertools
import json
import math
import os
import secrets
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from trainplan.errors import InputError, closest, nearest

FORMAT = 1  # one number for all our files; raised when an old reader would misunderstand a new file
HEADER = ("trainplan", "format", "data")  # the keys of a file
T = TypeVar("T")
MADE_BY = {  # what writes the files that people have in their hands
    "profile": "trainplan profile MODEL -o profile.json",
    "cluster": "trainplan cluster probe -o cluster.json",
    "device": "trainplan device measure -o device.json",
    "timeline": "trainplan run MODEL --plan PLAN --out FOLDER",
    "checkpoint": "trainplan run MODEL --plan PLAN --save-every 10 --out FOLDER",
    "bench": "trainplan bench run",
    "job": "trainplan run MODEL --plan PLAN --dry-run --out FOLDER",
    "staleness": "trainplan study staleness -o staleness.json",
}


def made_by(what: str) -> str:
    """Where a file of this kind comes from, for the last part of a message."""
    return f"a {what} that is made by {MADE_BY[what]}" if what in MADE_BY else f"making the {what} again"


def neighbour(path: str | Path, otherwise: str) -> str:
    """A file with nearly this name and the same ending, which may have been meant; `otherwise` where there is none."""
    path = Path(path).expanduser()
    beside = {p.name: p for p in path.parent.glob(f"*{path.suffix}") if p.is_file() and p != path}
    close = [str(beside[name]) for name in get_close_matches(path.name, beside, n=3, cutoff=0.75)]
    return ", ".join([*close, otherwise])


def to_json(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what `json` can print."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [to_json(item) for item in value]


def text_of(data: Any) -> str:
    """JSON as every program reads it, which has no word for a number that is not finite: that is null.

    >>> text_of([1.5, float("nan"), {"most": float("inf")}]).split()
    ['[', '1.5,', 'null,', '{', '"most":', 'null', '}', ']']
    """
    try:
        return json.dumps(data, indent=1, allow_nan=False)
    except ValueError:  # hardly ever, so it is not looked for beforehand
        return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(item) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


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
            raise InputError(where, f"a list was expected, found {data!r:.60}", _like(kind, data))
        if len(args) == 2 and args[1] is Ellipsis:
            if args[0] is str and all(isinstance(item, str) for item in data):
                return tuple(data)  # at once: device files have many thousands of them
            return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(args) != len(data):
            raise InputError(where, f"{len(args)} items were expected, found {len(data)}", _like(kind, data))
        return tuple(_convert(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise InputError(where, f"a mapping was expected, found {data!r:.60}", _like(kind, data))
        return {args[0](key): _convert(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is typing.Literal:
        if data in args:
            return data
        raise InputError(
            where, f"one of {', '.join(map(str, args))} was expected, found {data!r:.60}", _like(kind, data)
        )
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        with suppress(OverflowError):  # of a whole number with hundreds of digits, which is refused below
            return float(data)
    if isinstance(data, bool) and kind is int:  # to Python true is a number, to a reader of our files it is not
        raise InputError(where, f"int was expected, found {data!r}", _like(kind, data))
    if kind is Any or (isinstance(kind, type) and isinstance(data, kind)):
        return data
    raise InputError(where, f"{getattr(kind, '__name__', kind)} was expected, found {data!r:.60}", _like(kind, data))


def _like(kind: Any, data: Any) -> str:
    """JSON of this kind that is as near to `data` as can be."""
    return json.dumps(_near(kind, data), ensure_ascii=False)


def _near(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        given = data if isinstance(data, dict) else {}
        hints = typing.get_type_hints(kind)
        needed = [f.name for f in dataclasses.fields(kind) if _is_needed(f)]
        return {name: _near(hints[name], given.get(name)) for name in needed}
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _near(next(a for a in args if a is not type(None)), data)
    if origin is tuple:
        items = data if isinstance(data, list) else [data]
        if args[-1] is Ellipsis:
            return [_near(args[0], item) for item in items[:4]]
        return [_near(a, items[i] if i < len(items) else None) for i, a in enumerate(args)]
    if origin is dict:
        return {"KEY": _near(args[1], None)}
    if origin is typing.Literal:
        return closest(str(data), map(str, args)) if isinstance(args[0], str) else args[0]
    if kind in (int, float) and isinstance(data, int | float | str):
        return _number(kind, data)
    return {int: 1, float: 1.0, str: str(data), bool: bool(data)}.get(kind)


def _number(kind: type, data: Any) -> Any:
    try:
        number = float(data)
    except (ValueError, OverflowError):  # a word, or more than any number
        return kind(1)
    return kind(number if math.isfinite(number) else 1)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(where, f"a mapping was expected, found {data!r:.60}", _like(cls, data))
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise InputError(f"{where}.{key}", "there is no such key", nearest(key, fields))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{where}.{name}")
        elif _is_needed(field):
            raise InputError(where, f"the key {name!r} is missing", f'"{name}": {_like(hints[name], None)}')
    try:
        return cls(**values)
    except InputError as error:  # of what the value itself refuses
        raise InputError(f"{where}: {error.asked}", error.why, error.instead) from None


def write(path: str | Path, what: str, data: Any) -> None:
    """Write `data` to `path` as a file of kind `what`; a reader never sees half of it."""
    write_text(path, text_of({"trainplan": what, "format": FORMAT, "data": data}) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole(path: str | Path, option: str = "") -> Iterator[Path]:
    """A file for whoever writes one: it becomes `path` in the end, and there is none of it where that fails.

    Folders on the way to it are made, here as for everything that we write, and go again with it. `option`: what the
    path was given by.
    """
    path, made = Path(path), list[Path]()
    partial: Path | None = None
    try:
        missing = itertools.takewhile(lambda folder: not folder.exists(), (path.parent, *path.parent.parents))
        for folder in reversed(list(missing)):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        beside.touch(exist_ok=False)  # for whom the user's umask says
        partial = beside
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        for folder in reversed(made):
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        raise InputError(
            f"{option} {path}".strip(), f"it cannot be written ({error.strerror})", "another path"
        ) from None


def read(path: str | Path, what: str) -> Any:
    """The data of a file of kind `what`, or an error that says what the file is instead."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), f"it cannot be read ({error.strerror})", neighbour(path, made_by(what))) from None
    except UnicodeDecodeError:
        raise InputError(str(path), f"it is not a text file, so not a trainplan {what}", made_by(what)) from None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(str(path), f"broken JSON at line {error.lineno}: {error.msg}", made_by(what)) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets in brackets
        why = f"it is no JSON that can be read, so not a trainplan {what}"
        raise InputError(str(path), why, made_by(what)) from None
    if not isinstance(content, dict) or "trainplan" not in content:
        raise InputError(str(path), f"it is JSON, but not a trainplan {what}", made_by(what))
    if content["trainplan"] != what:
        why = f"it is a trainplan {content['trainplan']}, and a {what} was expected"
        raise InputError(str(path), why, made_by(what))
    if content.get("format") != FORMAT:
        raise InputError(
            str(path),
            f"it has format {content.get('format')}, and this version reads {FORMAT}",
            made_by(what),
        )
    for key in content:
        if key not in HEADER:
            raise InputError(f"{path}.{key}", "there is no such key beside the data", nearest(key, HEADER))
    if "data" not in content:
        raise InputError(str(path), "the key 'data' is missing", made_by(what))
    return content["data"]


def kind(path: str | Path) -> str:
    """What a file says that it is; nothing where it is not one of ours."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(content.get("trainplan", "")) if isinstance(content, dict) else ""
