"""Published measurements beside predictions, as tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainplan import files
from trainplan.report.table import table
from trainplan.units import seconds


@dataclass(frozen=True)
class Published:
    """The answer of `bench published`: what was found, by table and by what was known of it."""

    found: dict[str, dict[str, Any]]
    command: str
    made: str
    versions: dict[str, str]

    def __str__(self) -> str:
        parts = []
        for name, rows in self.found.items():
            parts += [name, _table(rows), *_left_out(rows), ""]
        return "\n".join(parts).rstrip()

    def to_json(self) -> dict[str, Any]:
        return {**self.found, "command": self.command, "made": self.made, "versions": self.versions}

    def save(self, path: str) -> None:
        files.write_text(path, json.dumps(self.to_json(), indent=1) + "\n")


COLUMNS = {
    "labelled": ">fitted to", "rows": ">rows", "constant": ">constant", "wait_s": ">wait", "mean": ">mean error",
    "median": ">median", "worst": ">worst", "worst_is": "which", "large": ">from 64 MiB", "ratios": ">of ratios",
    "misplaced": ">misplaced",
    "rank": ">rank", "regret": ">regret", "worst_regret": ">worst",
}  # fmt: skip
PLAIN = ("constant", "rank")  # numbers, not shares


def _table(rows: dict[str, Any]) -> str:
    """Of each way in which a table was predicted, a line."""
    scored = {what: row for what, row in rows.items() if isinstance(row, dict)}
    there = [key for key in COLUMNS if any(key in row for row in scored.values())]
    lines = [[what, *(_cell(key, row.get(key)) for key in there)] for what, row in scored.items()]
    lines += [[what, *(_cell(key, row) if key == "mean" else "" for key in there)] for what, row in rows.items()
              if not isinstance(row, dict)]  # fmt: skip
    return table(["", *(COLUMNS[key] for key in there)], lines, lines=True)


def _cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, str | int):
        return str("" if value is None else value)
    if key == "wait_s":
        return seconds(value)
    return f"{value:.2f}" if key in PLAIN else f"{value:.1%}"


def _left_out(rows: dict[str, Any]) -> list[str]:
    """What could not be predicted, by name."""
    names = sorted({name for row in rows.values() if isinstance(row, dict) for name in row.get("left_out", ())})
    return [f"left out ({len(names)}): {', '.join(names)}"] if names else []
