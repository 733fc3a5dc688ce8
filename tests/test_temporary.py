"""A test session leaves nothing in the temporary directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = """
import atexit, os, subprocess, sys, tempfile

def test_leaves_a_folder_and_has_one_left():
    print("made", tempfile.mkdtemp())
    line = "import tempfile; print('made', tempfile.mkdtemp())"
    print(subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout)
    if not os.fork():
        atexit._run_exitfuncs()  # as it ends, which is not the end of the session
        os._exit(0)
    os.wait()
    assert os.path.isdir(tempfile.mkdtemp())
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
def test_what_tests_leave_is_removed_when_they_are_over(workers: list[str], tmp_path: Path) -> None:
    there = tmp_path / "temporary"
    there.mkdir()
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    plugins = ["-p", "temporary", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, *plugins, *workers, "-rP", "test_leaves.py"]
    hidden = ("PYTEST_", "TMPDIR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"TMPDIR": str(there), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = [Path(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("made ")]
    assert len(made) == 2
    assert all(path.is_relative_to(there) and path.parent != there for path in made)
    assert [path.name for path in there.iterdir() if not path.name.startswith("pytest-of-")] == []
