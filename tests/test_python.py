"""Models from Python: every question takes an `nn.Module` or a `Workload`; what runs elsewhere needs a name."""

import dataclasses
import re

import pytest

import trainplan
from search.models import model
from trainplan.errors import InputError, RunError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A profile on disk."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    model(samples_per_epoch=6400).save(path)
    return str(path)


@pytest.fixture
def net():
    from torch import nn

    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))


def example():
    import torch

    return torch.zeros(4, 20), torch.zeros(4, dtype=torch.long)


def test_every_question_takes_a_module(net):
    own = {"inputs": example(), "loss": "cross_entropy", "optimizer": "sgd"}
    there = {"cluster": "2xA100-80", "batch": 8}
    predicted = trainplan.predict(net, "dp=2", **there, **own)
    assert (predicted.profile.workload, predicted.prediction.batch) == ("module:Sequential", 8)
    assert predicted.profile.optimizer == "sgd"
    assert trainplan.predict(net, "dp=2", **there, **{**own, "optimizer": None}).profile.optimizer == "adamw"
    assert trainplan.profile(net, **there, **own).profile.batch == 8
    assert "where a step goes" in str(trainplan.explain(net, "dp=2", **there, **own))
    assert "rank 1" in str(trainplan.timeline(net, "dp=2", **there, **own))
    found = trainplan.recommend(net, **there, **own)
    assert found.recommendation.ranked
    assert "trainplan run" not in str(found)  # there is no such command for it
    workload = trainplan.load(net, **own, batch=8)
    assert isinstance(workload, trainplan.Workload)
    told = trainplan.predict(workload, "dp=2", "2xA100-80").to_json()
    assert told == predicted.to_json()
    changed = trainplan.predict(workload, "dp=2", "2xA100-80", optimizer="adam")
    assert changed.profile.optimizer == "adam"


def test_a_profile_takes_no_parts(saved):
    with pytest.raises(InputError, match="loss= with a profile"):
        trainplan.predict(saved, "dp=2", "4xTitanRTX", loss="mse")


@pytest.mark.parametrize("function", [trainplan.run, trainplan.compare], ids=["run", "compare"])
def test_a_module_cannot_travel_to_other_processes(function, net, monkeypatch):
    monkeypatch.setattr("trainplan.situation.profile_for", lambda *a, **k: pytest.fail("measured for nothing"))
    own = {"inputs": example(), "loss": "cross_entropy"}
    with pytest.raises(RunError, match=r"new processes.* Try a function in a file .*path/file.py:function"):
        function(net, "single", "1xcpu")
    with pytest.raises(RunError, match="new processes"):
        function(trainplan.load(net, **own), "single", "1xcpu")
    # A name that brings back another workload than this one is no better than none.
    with pytest.raises(RunError, match=r"what the name .resnet18:mnist. stands for there is not this one"):
        function("resnet18:mnist", "single", "1xcpu", loss=lambda output, targets: output.sum())


def test_a_workload_with_a_name_travels():
    from trainplan.situation import made_in_python

    workload = trainplan.load("resnet18:mnist", batch=8)
    assert made_in_python(workload, runs=True) == workload
    assert made_in_python(trainplan.load(workload, batch=4), runs=True).batch == 4  # a run is told its batch


def test_a_profile_of_a_module_cannot_be_run():
    nameless = dataclasses.replace(model(device="cpu"), workload="module:Net")
    with pytest.raises(RunError, match="made in Python"):
        trainplan.run(nameless, "single", cluster="1xcpu", steps=1)


@pytest.mark.usefixtures("quick_start")
def test_the_python_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    """A module asked about, a workload made, and one run, as docs/guide.md has it."""
    from pathlib import Path

    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    section = guide.partition("### From Python")[2].partition("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), {})
    said = capsys.readouterr().out
    assert "ran dp=2: predicted" in said
    assert re.search(r"peak memory of rank \d +[\d.]+ GiB +[\d.]+ GiB\nmeasured is the resident memory", said)


def test_open_choices_are_made_for_the_device_that_is_asked_for(monkeypatch):
    from trainplan.plan.text import parse
    from trainplan.situation import ranks

    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks(parse("dp=16"), 16, "cpu") == "16xcpu"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert ranks(parse("dp=16"), 16, "cuda") == "2x8xH100-SXM"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Nobody's 3000")
    with pytest.warns(UserWarning, match="not in the catalogue"):
        assert ranks(parse("dp=16"), 16, "cuda") == "16xcpu"
