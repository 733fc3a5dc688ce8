"""Tests in several processes, and tests that measure time alone: a pytest plugin.

Under `pytest -n 3` a test marked `alone` waits until those that run in other processes are over, and no other starts
before it has ended. Everybody takes their turn at a first lock; whoever wants to be alone keeps it, so that those who
do not mind company cannot keep overtaking. Several such tests in a row are alone together: between any two of them the
other process would start one of its own, which may be a long one, and this one would wait for it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

# Files that take longest come first: the processes should end at the same time.
LONGEST_FIRST = (
    "engine/test_equality.py", "engine/test_timeline.py", "test_docs.py", "test_lint.py", "engine/test_launch.py",
    "test_cli.py", "installing/", "engine/", "profiling/", "search/", "cluster/",
)  # fmt: skip


def place(nodeid: str) -> int:
    """Where a test stands in the order of files.

    >>> place("tests/test_docs.py::test_links"), place("tests/plan/test_text.py::test_words")
    (2, 11)
    """
    return next((n for n, part in enumerate(LONGEST_FIRST) if f"tests/{part}" in nodeid), len(LONGEST_FIRST))


# Files that share what takes long to make, so one process runs them: the second finds what the first has made.
TOGETHER = {"tests/engine/test_timeline.py": "tests/engine/test_equality.py"}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which machines with a GPU need not have
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile` has it, but some files go together."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Files(config, log) if config.getoption("dist") == "loadfile" else None


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Held by nobody else, or only by others that hold it in the same way."""
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield


class Turns:
    """Locks around tests, in the worker processes of one session."""

    def __init__(self) -> None:
        session = Path(tempfile.gettempdir()) / f"trainplan-tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
        self.turn, self.room = session.with_suffix(".turn"), session.with_suffix(".room")
        self.is_alone, self.both = False, ExitStack()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        if item.get_closest_marker("alone"):
            if not self.is_alone:
                self.both.enter_context(locked(self.turn, fcntl.LOCK_EX))
                self.both.enter_context(locked(self.room, fcntl.LOCK_EX))
            try:
                return (yield)
            finally:
                self.is_alone = nextitem is not None and nextitem.get_closest_marker("alone") is not None
                if not self.is_alone:
                    self.both.close()
        with locked(self.turn, fcntl.LOCK_EX):
            room = self.room.open("w")
            fcntl.flock(room, fcntl.LOCK_SH)
        with room:
            return (yield)
