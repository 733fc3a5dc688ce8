"""Attempts: when a rank fails, torchrun (with `--max-restarts`) ends the others and starts them all again.

The first attempt notes in the run's folder where it began. A later one goes on from the newest checkpoint that the run
has left since, or begins again, and ends at the same step; the steps before that checkpoint count as this run's too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainplan import files
from trainplan.engine.checkpoint_folder import latest
from trainplan.engine.trainer import StepResult


def attempt() -> int:
    """Which attempt this process belongs to, from 0."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class Begun:
    """Where a run began."""

    step: int
    run: str  # torchrun's name of it

    @staticmethod
    def at(step: int) -> Begun:
        return Begun(step, _run())

    def save(self, out: Path) -> None:
        files.write(_note(out), "begun", files.to_json(self))

    def checkpoint(self, out: Path) -> Path | None:
        """The newest checkpoint that the run has left."""
        return latest(out, since=_note(out).stat().st_mtime)  # by the clock of the disk, whoever's that is


def begun(out: Path) -> Begun | None:
    """Where this run began, if this is not its first attempt and an earlier one came so far."""
    if not attempt() or not _note(out).is_file():
        return None
    found = files.from_json(Begun, files.read(_note(out), "begun"))
    return found if found.run == _run() else None


def _note(out: Path) -> Path:
    return out / "rank-0.begun"


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


# -- the steps of earlier attempts ------------------------------------------------------------------------------------


def keep_steps(out: Path, rank: int, steps: list[StepResult]) -> None:
    """Note what the steps so far were like, beside a checkpoint."""
    files.write(_steps(out, rank), "steps", files.to_json(steps))


def kept_steps(out: Path, rank: int, begun: Begun, step: int) -> list[StepResult]:
    """The steps of this run before one that is trained (again) now."""
    if not _steps(out, rank).is_file():
        return []
    rows = [files.from_json(StepResult, row) for row in files.read(_steps(out, rank), "steps")]
    return [row for row in rows if begun.step <= row.step < step]


def _steps(out: Path, rank: int) -> Path:
    return out / f"rank-{rank}.steps"
