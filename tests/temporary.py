"""A temporary directory of a test session's own, removed with all that is left there: a pytest plugin.

Tests run what users run, and that may leave something: the folder of a run that was given none, torchrun's, sockets of
processes that were killed. What the session starts is told of this directory by its environment. pytest's own folders
stay where they always are, so that one can look at them afterwards.
"""

import atexit
import os
import shutil
import tempfile


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has that of the session already
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="trainplan-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    """When the session's process ends: not when one does that it was forked into."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
