"""What nobody has seen work is said to be so, by whoever runs it: NCCL above one rank."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import trainplan
from search.models import model
from tests.test_cli import call
from trainplan import starting
from trainplan.engine import trainer
from trainplan.engine.measurement import RunResult
from trainplan.plan.plan import plan
from trainplan.program.lower.backend import BACKENDS
from trainplan.program.timeline import Timeline
from trainplan.report.ran import RanElsewhere
from trainplan.situation import situation
from trainplan.workload.load import load

GPT = "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=16,batch=4"
SAID = "NCCL above one rank is not tested"


def test_readme_says_the_same() -> None:
    assert SAID in " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_only_nccl_above_one_rank(name: str, ranks: int) -> None:
    said = BACKENDS[name].untested(ranks)
    assert said.startswith(SAID) == (name == "nccl" and ranks > 1)
    assert bool(said) == (f"{ranks} ranks" in said)


@pytest.mark.parametrize(("backend", "rank", "says"), [("nccl", 0, 1), ("nccl", 1, 0), ("gloo-staged", 0, 0)])
def test_whoever_builds_says_it_once(backend: str, rank: int, says: int, monkeypatch, capsys) -> None:
    """On the first rank, before anything could hang; that is what its log has, since logs are what ranks print."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(trainer, "Trainer", lambda *_, **given: SimpleNamespace(**given))
    built = trainer.build(plan(dp=2), load(GPT), backend=backend)
    assert built.backend == backend
    assert capsys.readouterr().out.count(SAID) == says


@pytest.mark.parametrize(("cluster", "line", "says"), [("2xTitanRTX", "dp=2", 1), ("1xTitanRTX", "single", 0)])
def test_a_run_says_it(cluster: str, line: str, says: int, tmp_path, monkeypatch) -> None:
    """What is written for torchrun, what has run here, and what has run elsewhere; in words and in JSON."""
    monkeypatch.chdir(tmp_path)
    replace(model(), workload=GPT, notes=("as it is",)).save("profile.json")
    words = ["run", "profile.json", "--cluster", cluster, "--plan", line, "--dry-run"]
    assert call(*words).count(SAID) == says
    assert json.loads(call(*words, "--json"))["untested"].count(SAID) == says

    s = situation("profile.json", cluster, None, None, (), None)
    expected = trainplan.predict("profile.json", line, cluster).prediction
    monkeypatch.setattr(starting, "keep", lambda *_: None)
    nothing = Timeline("measured", expected.plan.world, 0, ())
    ran = starting._ran(s, expected, RunResult("out", [], [], [], [], nothing, 0), s.cluster)
    assert str(ran).count(SAID) == says
    assert ran.to_json()["untested"].count(SAID) == says

    monkeypatch.setattr(starting, "launch", lambda *_, **__: SimpleNamespace(host="there", folder="runs"))
    monkeypatch.setattr(starting, "torch_device", lambda _: "cuda")
    away = starting.start(s, expected.plan, s.cluster, 1, None)
    assert isinstance(away, RanElsewhere)
    assert str(away).count(SAID) == away.to_json()["untested"].count(SAID) == says
    assert str(away).endswith("\nnote: as it is")
    assert away.to_json()["notes"] == ["as it is"]
