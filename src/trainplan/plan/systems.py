"""Named systems: a row each, from `systems.yaml`. A system whose choices exist needs no code of its own.

>>> SYSTEMS["dapple"].choices
'schedule=1f1b'
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files as package_files

import yaml


@dataclass(frozen=True)
class System:
    """A system or technique from the literature."""

    group: str
    key: str
    name: str
    line: str  # in one line
    needs: str  # letters: P predict, S solve, R run
    source: str
    carried_by: str  # what carries it in our design
    choices: str | None = None  # the plan that its key stands for; None: not built yet


def _read() -> dict[str, System]:
    text = package_files("trainplan.plan").joinpath("systems.yaml").read_text(encoding="utf-8")
    rows = (System(group["group"], **row) for group in yaml.safe_load(text) for row in group["systems"])
    return {row.key: row for row in rows}


SYSTEMS: dict[str, System] = _read()
