"""What answers say of numbers that nobody gave, or that are none."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import trainplan
from search.models import model
from trainplan import api, cli
from trainplan.engine.compare import Comparison
from trainplan.engine.exactness import Exactness
from trainplan.report.answers import Compared
from trainplan.report.ran import Ran


def call(*words: object) -> str:
    """A command in this process: what it prints to stdout."""
    result = CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("assumed", "words"), [(False, "of 6,400 samples"), (True, "of 6,400 samples, assumed")])
def test_what_an_epoch_is_is_said(assumed: bool, words: str, tmp_path: Path) -> None:
    """Its seconds and its price rest on a number of samples, which may be nobody's."""
    path = tmp_path / "profile.json"
    model(samples_per_epoch=6400, epoch_assumed=assumed).save(path)
    there = ("--cluster", "4xTitanRTX", "--batch", 16)
    plan, best = ("predict", path, *there, "--plan", "dp=4"), ("recommend", path, *there, "--top", 1)
    rented = ("budget", path, "--machines", "4xTitanRTX", "--budget", 1e6, "--set", "price=1")
    assert f" ({words})\n" in call(*plan)
    assert f"\nepoch    {words}\n" in call(*best)
    assert f"\nepoch    {words}\n" in call(*rented)
    for asked in (plan, best, rented):
        data = json.loads(call(*asked, "--json"))
        assert (data["samples_per_epoch"], data["epoch_assumed"]) == (6400, assumed)


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_loss_that_is_no_number_is_said_and_null_in_json(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = trainplan.predict(model(device="cpu"), "dp=2", "2xcpu").prediction
    usual = Ran(prediction, (1.0,), (3.0, 2.0), (), "out", 0.0, warm_up=2)
    lost = (3.0, float("nan"), float("nan"))
    ran = dataclasses.replace(usual, losses=lost)
    assert "loss 3.0000 → nan in 3 steps; it is no finite number in step 2 of these, the first such" in str(ran)
    assert "finite" not in str(usual)
    exactness = Exactness(True, ("float64",), "", {"": 1e-9}, 1e-9, 1e-6)
    compared = Compared(Comparison("dp=2", 3, 8, (), lost, lost, SimpleNamespace(losses=lost), exactness), ran)
    monkeypatch.setattr(api, command, lambda *_: {"run": ran, "compare": compared}[command])
    data = json.loads(call(command, "model", "--plan", "dp=2", "--json"), parse_constant=pytest.fail)
    assert data["losses" if command == "run" else "losses_together"] == [3.0, None, None]
