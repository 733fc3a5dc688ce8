"""Which plans a framework that the user has can run: data, with its source (`frameworks.yaml`).

>>> sorted(FRAMEWORKS)
['deepspeed', 'fsdp', 'lightning', 'megatron', 'torchtitan']
>>> framework("fspd")
Traceback (most recent call last):
trainplan.errors.InputError: --for fspd: the frameworks are fsdp, deepspeed, megatron, torchtitan, lightning. Try fsdp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from trainplan.cluster import reading
from trainplan.errors import InputError, nearest
from trainplan.plan.plan import WORDS
from trainplan.program.program import Bools
from trainplan.search.columns import Space


@dataclass(frozen=True)
class Framework:
    """What a framework can run, field by field: the words or numbers that a plan may have there."""

    name: str
    source: str
    choices: dict[str, list[Any]]
    together: dict[str, list[Any]] = field(default_factory=dict)  # the same where there are several stages

    def runs(self, space: Space) -> Bools:
        """Which plans of a space it can run."""
        found = np.ones(len(space), dtype=bool)
        for name, values in self.choices.items():
            found &= _has(space, name, values)
        for name, values in self.together.items():
            found &= (space.column("pp") == 1) | _has(space, name, values)
        return found


def _has(space: Space, name: str, values: list[Any]) -> Bools:
    """Which plans have one of these values in a field."""
    words = WORDS.get(name)
    return np.isin(space.column(name), [words.index(value) for value in values] if words else values)


def framework(name: str) -> Framework:
    """The framework of a name."""
    if name not in FRAMEWORKS:
        raise InputError(f"--for {name}", f"the frameworks are {', '.join(FRAMEWORKS)}", nearest(name, FRAMEWORKS, 1))
    return FRAMEWORKS[name]


def _read() -> dict[str, Framework]:
    text = (resources.files("trainplan.search") / "frameworks.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = reading.parse_yaml(text, "frameworks.yaml")
    return {name: Framework(name, **row) for name, row in rows.items()}


FRAMEWORKS = _read()
