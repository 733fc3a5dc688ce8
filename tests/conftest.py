"""Settings that every test shares."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import evidence
import forks
import temporary
import turns

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start hundreds of processes. Where Python is told to keep no bytecode, each would compile all of our files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No deadline: an example may be slow because of others. The same examples every time: what passed here passes there,
# and who looks for new ones says so (`pytest --hypothesis-profile hunt tests/solve`).
settings.register_profile("shared machine", deadline=None, derandomize=True)
settings.register_profile("hunt", deadline=None, derandomize=False, max_examples=1000)
settings.load_profile("shared machine")

EVIDENCE = pytest.StashKey[evidence.Evidence]()


def pytest_addoption(parser):
    parser.addoption("--write-evidence", action="store_true", help="rewrite plan/evidence.json from the markers")
    parser.addoption("--kills", help="a file that keeps what became of each run whose worker was killed")
    parser.addoption("--measured", help="a folder with published measurements, for tests that hold against them")


def pytest_configure(config):
    config.pluginmanager.register(temporary)
    config.addinivalue_line("markers", "system(key, letter): this test backs a letter (P, S, R) of a system")
    config.stash[EVIDENCE] = evidence.Evidence(config)
    config.pluginmanager.register(config.stash[EVIDENCE])
    config.pluginmanager.register(turns)
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(turns.Turns())


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: turns.place(item.nodeid))


def pytest_collection_finish():
    """What is there by now stays: the garbage collector need not visit a million objects again and again."""
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def measured(request):
    """The folder of published measurements; without the option, a test that needs them is skipped."""
    folder = request.config.getoption("--measured")
    if folder is None:
        pytest.skip("needs --measured FOLDER, with published measurements")
    return Path(folder)


@pytest.fixture
def gathered(request):
    """The markers of this session, and what became of their tests."""
    return request.config.stash[EVIDENCE]


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory):
    """The path of a Python that starts at once (`forks.py`)."""
    with forks.executable(tmp_path_factory.mktemp("forks")) as program:
        yield program


@pytest.fixture
def quick_start(forked_python, monkeypatch):
    """Processes that the test starts by `sys.executable`, and that these start, have the libraries already."""
    monkeypatch.setattr(sys, "executable", forked_python)
