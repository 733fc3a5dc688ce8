"""Profiles that are remembered, and what makes them forgotten."""

import subprocess
import sys

import pytest

from trainplan.profile import cache
from trainplan.profile.cache import measured, place
from trainplan.workload.load import load

from . import models

SOURCE = """
import torch
from torch import nn

def net(width={width}):
    return {{
        "model": nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)),
        "inputs": lambda samples, seed: (torch.randn(samples, 8), torch.zeros(samples, dtype=torch.long)),
        "loss": "cross_entropy",
        "batch": 4,
    }}
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def calls(monkeypatch):
    """How often something was measured."""
    found = []
    real = cache.measure

    def counted(*args, **options):
        found.append(args)
        return real(*args, **options)

    monkeypatch.setattr(cache, "measure", counted)
    return found


def file(tmp_path, width=16):
    (tmp_path / "model.py").write_text(SOURCE.format(width=width))
    return f"{tmp_path}/model.py:net"


def test_the_second_time_nothing_is_measured(tmp_path, calls):
    workload = load(file(tmp_path))
    first = measured(workload, samples=[1, 2], repeats=1)
    assert measured(load(file(tmp_path)), samples=[1, 2], repeats=1) == first
    assert len(calls) == 1
    assert measured(workload, samples=[1, 2], repeats=1, refresh=True).provenance.repeats == 1
    assert len(calls) == 2


def test_what_it_depends_on_is_part_of_its_name(tmp_path):
    def where(name=models.GPT, **options):
        return place(load(name, **options.pop("load", {})), "cpu", options)

    known = where()
    assert known == where()
    assert known != where(f"{models.GPT},batch=32")
    assert known != where("gpt:layers=1,hidden=64,heads=4,seq=64,vocab=500")
    assert known != where(samples=[1, 2])
    assert known != where(compile=True)
    assert known != where(load={"loss": lambda output, targets: output.sum()})
    own = where(file(tmp_path))
    assert own == where(file(tmp_path))
    changed = file(tmp_path, width=17)
    assert own != where(changed)


def test_a_changed_machine_or_version_is_another_profile(monkeypatch):
    workload = load(models.GPT)
    known = place(workload, "cpu", {})
    monkeypatch.setattr(cache.here, "versions", lambda: {"torch": "9.9"})
    other = place(workload, "cpu", {})
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_own_code", lambda: "other")
    assert len({known, other, place(workload, "cpu", {})}) == 3


def test_another_process_looks_in_the_same_place():
    code = (
        "from trainplan.profile.cache import place; from trainplan.workload.load import load;"
        f"print(place(load({models.GPT!r}), 'cpu', {{'samples': [1]}}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(place(load(models.GPT), "cpu", {"samples": [1]}))


def test_a_broken_file_is_as_good_as_none(tmp_path, calls):
    workload = load(file(tmp_path))
    first = measured(workload, samples=[1], repeats=1)
    options = {"samples": [1], "compile": False, "repeats": 1, "seconds": cache.SECONDS, "verify": True}
    path = place(workload, "cpu", options)
    assert path is not None
    assert path.is_file()
    path.write_text(path.read_text()[:100])
    assert measured(workload, samples=[1], repeats=1).workload == first.workload
    assert len(calls) == 2


def test_a_module_from_python_is_measured_every_time(calls):
    assert place(models.skip(), "cpu", {}) is None
    for _ in range(2):
        measured(models.skip(), samples=[1], repeats=1)
    assert len(calls) == 2
