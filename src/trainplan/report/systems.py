"""The systems of the literature: what each needs, and which tests show what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as package_files

from trainplan.errors import InputError, nearest
from trainplan.plan.systems import SYSTEMS
from trainplan.report.answers import SystemRow, Systems


@cache
def evidence() -> dict[str, dict[str, list[str]]]:
    """Key → letter → ids of the tests that back it, as kept with the package."""
    text = package_files("trainplan.plan").joinpath("evidence.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def systems(keys: Sequence[str] = ()) -> Systems:
    """All systems, or those of these keys."""
    for key in keys:
        if key not in SYSTEMS:
            close = nearest(key, [row.key for row in SYSTEMS.values() if row.choices])  # those that are built
            instead = "trainplan systems, which lists them all" if close.startswith("one of") else close
            raise InputError(f"system {key!r}", "there is no such system", instead)
    rows = []
    for row in SYSTEMS.values():
        if keys and row.key not in keys:
            continue
        backed = evidence().get(row.key, {})
        tests = {letter: backed[letter] for letter in row.needs if letter in backed}
        rows.append(SystemRow(row.group, row.key, row.name, row.needs, "".join(tests), tests, row.choices))
    return Systems(tuple(rows))
