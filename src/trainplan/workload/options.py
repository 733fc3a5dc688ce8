"""Options in a workload's name: `key=value` after the first comma, read by a table and printed back.

The canonical name of a workload spells out what differs from the defaults, in the order of the table, so that equal
workloads have equal names:

>>> table = (Option("bn", True), Option("batch", 64, minimum=1), Option("lr", 0.1))
>>> values = read({"batch": "256", "bn": "yes"}, table, "vgg11:cifar10")
>>> values
{'bn': True, 'batch': 256, 'lr': 0.1}
>>> spell("vgg11:cifar10", values, table)
'vgg11:cifar10,batch=256'
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainplan.errors import InputError, nearest

_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Option:
    """One key: the type of its default says how its value is read."""

    name: str
    default: bool | int | float | str
    minimum: float = 0
    choices: tuple[str, ...] = ()


def split(text: str) -> tuple[str, dict[str, str]]:
    """The part before the first `key=value`, and the pairs.

    >>> split("cifar10,bn=0,batch=8"), split("layers=2,heads=4"), split("")
    (('cifar10', {'bn': '0', 'batch': '8'}), ('', {'layers': '2', 'heads': '4'}), ('', {}))
    """
    head, pairs = "", {}
    for place, item in enumerate(text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and place == 0:
            head = key
        elif not equals or not key or not value:
            raise InputError(f"option {item!r} in {text!r}", "it is not of the form key=value", "such as batch=64")
        elif key in pairs:
            raise InputError(f"option {key!r} in {text!r}", "it is given twice", "giving it once")
        else:
            pairs[key] = value
    return head, pairs


def read(given: Mapping[str, Any], table: Sequence[Option], where: str) -> dict[str, Any]:
    """A value for every option of the table; what is not in the table is an error with the nearest names."""
    known = {option.name: option for option in table}
    for key in given:
        if key not in known:
            instead = nearest(key, known) if known else "no options"
            raise InputError(f"option {key}={given[key]} of {where}", "there is no such option", instead)
    return {name: value(given[name], option, where) if name in given else option.default
            for name, option in known.items()}  # fmt: skip


def value(text: Any, option: Option, where: str) -> Any:
    """`text` as the type of the option's default, checked."""
    asked = f"{option.name}={text} in {where}"
    kind = type(option.default)
    if kind is str:
        word = str(text).lower() if option.choices else str(text)
        if option.choices and word not in option.choices:
            raise InputError(asked, "it is not one of the words", nearest(word, option.choices))
        return word
    if kind is bool:
        if str(text).lower() not in _TRUTH:
            raise InputError(asked, "it is neither yes nor no", f"{option.name}=1 or {option.name}=0")
        return _TRUTH[str(text).lower()]
    try:
        number: float = int(str(text)) if kind is int else float(str(text))
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise InputError(asked, f"it is not a {what}", f"{option.name}={show(option.default)}") from None
    if not math.isfinite(number) or number < option.minimum:
        raise InputError(asked, f"it must be at least {show(option.minimum)}", f"{option.name}={show(option.default)}")
    return number


def spell(head: str, values: Mapping[str, Any], table: Sequence[Option], always: Collection[str] = ()) -> str:
    """The canonical name: `head`, then the options that differ from their defaults or are always shown."""
    shown = [option.name for option in table if option.name in always or values[option.name] != option.default]
    items = [f"{name}={show(values[name])}" for name in shown]
    # After a bare family ("gpt") the first option follows a colon; after a full head ("vgg11:cifar10") a comma.
    return head if not items else f"{head}{',' if ':' in head else ':'}{','.join(items)}"


def show(item: Any) -> str:
    """A value as it is typed.

    >>> [show(item) for item in (True, 3, 1.0, 0.0003, "adamw")]
    ['1', '3', '1', '0.0003', 'adamw']
    """
    if isinstance(item, bool):
        return str(int(item))
    if isinstance(item, float):
        return f"{item:g}" if float(f"{item:g}") == item else repr(item)
    return str(item)


def guess(text: Any) -> Any:
    """A value for which no type is declared: whole number, number, truth word, None, or the text itself.

    >>> [guess(text) for text in ("3", "0.5", "true", "none", "relu")]
    [3, 0.5, True, None, 'relu']
    """
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
