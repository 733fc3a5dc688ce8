"""Everything that trainplan refuses, and how it says so.

    TrainplanError
    ├── InputError       a file, a word or a number that we cannot read or do not know
    ├── ModelError       a model that cannot be built, captured or cut
    ├── PlanError        a request or plan that is not legal for this model and cluster
    ├── ProgramError     a program that breaks the specification in `program/check/`
    └── RunError         a run that failed: a rank raised, was killed, or could not start

A message has three parts: what was asked, why not (with the numbers), and the nearest thing that works. Commands
print it without a traceback and exit with code 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class TrainplanError(Exception):
    """Base of every error that is the user's to mend.

    >>> str(PlanError("dp=3", "the batch of 8 samples does not divide by 3", "dp=2 or dp=4"))
    'dp=3: the batch of 8 samples does not divide by 3. Try dp=2 or dp=4.'
    """

    def __init__(self, asked: str, why: str = "", instead: str = "") -> None:
        self.asked, self.why, self.instead = asked, why, instead
        text = f"{asked}: {why}" if why else asked
        if instead:
            text = f"{text.rstrip('.')}. Try {instead.rstrip('.')}."
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        # Exceptions cross process borders (a worker's error is raised again in the launcher).
        return type(self), (self.asked, self.why, self.instead)


class InputError(TrainplanError):
    """A file, a word or a number that we cannot read or do not know."""


class ModelError(TrainplanError):
    """A model that cannot be built, captured or cut."""


class PlanError(TrainplanError):
    """A request or plan that is not legal for this model and cluster."""


class ProgramError(TrainplanError):
    """A program that breaks the specification."""


class RunError(TrainplanError):
    """A run that failed."""


def closest(word: str, known: Iterable[str]) -> str:
    """The one known word that is closest to `word`; the first of them where none is near.

    >>> closest("of", ["given", "off", "on"]), closest("maybe", ["given", "off", "on"])
    ('off', 'given')
    """
    known = list(known)
    found = nearest(word, known, 1)
    return found if found in known else known[0]


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The known words closest to `word`, for the last part of a message; all of them if there are few.

    >>> nearest("A100", ["A100-40", "A100-80", "H100-SXM", "V100-16", "T4", "L4", "P40"])
    'A100-80, A100-40, V100-16'
    """
    known = list(known)
    by_lower = {name.lower(): name for name in known}
    close = [by_lower[name] for name in get_close_matches(word.lower(), by_lower, n=count, cutoff=0.5)]
    if not close and len(known) <= 8:
        close = known
    return ", ".join(close) if close else f"one of {', '.join(sorted(known))}"


def refuse_unheard(
    function: Callable[..., Any], given: Mapping[str, Any], names: Iterable[str], asked: str, why: str, instead: str
) -> None:
    """Refuse arguments of a function that would change nothing of what is asked, where they are not as usual.

    >>> def draw(width=100, steps=1): refuse_unheard(draw, locals(), ["steps"], "draw", "it has one", "--width")
    >>> draw(width=3)
    >>> draw(steps=2)
    Traceback (most recent call last):
    trainplan.errors.InputError: draw --steps 2: it has one. Try --width.
    """
    usual = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    heard = [_typed(name, given[name]) for name in names if _differs(given[name], usual[name])]
    if heard:
        raise InputError(f"{asked} {' '.join(heard)}", why, instead)


def _differs(value: Any, usual: Any) -> bool:
    if usual is None:
        return value is not None
    return bool(value or usual) and value != usual  # [] is as good as ()


def _typed(name: str, value: Any) -> str:
    """An argument as an option of a command."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    if isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    return " ".join(f"{option} {item}" for item in (value if isinstance(value, list | tuple) else [value]))
