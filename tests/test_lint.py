"""ruff and mypy have nothing to say: what `make lint` runs, as tests, so that others run beside them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMANDS = [line.strip().removeprefix("$(BIN)/") for line in RECIPE[1].splitlines()] if RECIPE else []


def test_there_is_something_to_run() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"ruff", "mypy"}


@pytest.mark.parametrize("command", COMMANDS)
def test_lint(command: str) -> None:
    tool, *arguments = command.split()
    beside = Path(sys.executable).parent / tool
    done = subprocess.run([beside, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
