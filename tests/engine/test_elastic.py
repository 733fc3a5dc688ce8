"""Workers come and go while a model is trained: what comes of it is what one process would have made of the batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from synthetic import chain
from tests.engine.test_launch import processes
from trainplan.cluster.parse import cluster
from trainplan.engine.elastic import Change, train
from trainplan.engine.exactness import in_double
from trainplan.engine.feed import batches
from trainplan.engine.job import Job
from trainplan.engine.measurement import RunResult
from trainplan.engine.trainer import build
from trainplan.engine.workers import Bounds, Workers
from trainplan.plan.plan import plan
from trainplan.plan.text import parse, to_json
from trainplan.search.replan import Asked, Replanned, replan
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load

ROOT = Path(__file__).parents[2]
MODEL = f"{Path(__file__).parent / 'elastic_model.py'}:build"
FOUR = cluster("4xcpu")
# Blocks that compute for long, so that every worker is worth having.
PROFILE = chain(4, 1e-2, 2e-2, flat=False, samples=(1, 2, 4, 8), workload=MODEL, weights=288)
BATCH, STEPS = 8, 7
DATA = {"data": "memory", "samples": 24}  # three steps an epoch: what is gone on with lies in the second


def elastic(
    line: str, bounds: str, folder: Path, events: list[dict], monkeypatch: pytest.MonkeyPatch
) -> tuple[RunResult, list[Replanned]]:
    """Train in float64 on workers to which these events happen."""
    monkeypatch.setenv("EVENTS", json.dumps(events))
    monkeypatch.setenv("FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    first = resolve(parse(line), PROFILE, FOUR, BATCH)
    asked = Asked(parse(line), PROFILE, FOUR, BATCH, first.world)
    out = folder / "run"
    (out / "checkpoint-9").mkdir(parents=True)  # of another run, which used the same folder
    (out / "checkpoint-9" / "trainplan.json").write_text("{}")
    os.utime(out / "checkpoint-9" / "trainplan.json", (0, 0))
    (out / "attempt-7").mkdir()
    job = Job(
        MODEL, to_json(first), BATCH, STEPS, str(out), seed=3, save_every=2, keep_state=True, double=True,
        reference=False, **DATA,
    )  # fmt: skip

    def again(change: Change) -> Replanned:
        found = replan(asked, change.plan, change.was, change.now, change.steps_lost, change.restart_s)
        (folder / "planned").touch()
        return found

    return train(job, Workers(Bounds.parse(bounds), first.world, FOUR.world), again, show=False)


def undisturbed() -> tuple[list[float], dict[str, torch.Tensor]]:
    """What torch makes of the same batches in one process: losses, and weights in the end."""
    workload = in_double(load(MODEL))
    trainer = build(plan(blocks=4), workload, seed=3)
    job = Job(MODEL, {}, BATCH, STEPS, "", seed=3, **DATA)
    net, losses = workload.build(), []
    net.load_state_dict(trainer.parameters)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batch, _ in batches(trainer, job, STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(*batch.args), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(net.named_parameters())


def same(result: RunResult, folder: Path) -> None:
    losses, weights = undisturbed()
    assert len(result.step_seconds) == STEPS
    assert result.losses == pytest.approx(losses, rel=1e-9)
    found: dict[str, torch.Tensor] = {}
    for path in (folder / "run").glob("rank-*.pt"):
        found |= torch.load(path, weights_only=False)["weights"]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.system("budget", "R")
@pytest.mark.usefixtures("quick_start")
def test_budget_goes_on_with_the_workers_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four replicas that share their states, one is killed in step 4: three go on after step 2."""
    kill = {"what": "kill", "rank": 2, "call": 4}
    result, changes = elastic("dp=4 zero=1", "2:4", tmp_path, [kill], monkeypatch)
    same(result, tmp_path)
    (change,) = changes
    assert change.workers == (4, 3)
    assert (change.before.plan.dp, change.plan.dp, change.plan.zero) == (4, 3, 1)
    assert change.steps_lost == 1
    said = capsys.readouterr().out
    assert "rank 2 was killed (SIGKILL)" in said
    assert "dp=4 is not kept: it was for 4 workers" in said
    assert "the batch stays 8 samples" in said
    run = tmp_path / "run"
    assert f"after step 2 from {run / 'checkpoint-2'}" in said
    assert (run / "workers").read_text() == "3\n"
    assert json.loads((run / "job.json").read_text())["data"]["places"] == [0, 1, 3]  # the device of rank 2 has gone
    assert (run / "attempt-1" / "rank-3.log").exists()
    assert [path.name for path in run.glob("attempt-*")] == ["attempt-1"]
    assert processes(tmp_path) == []


@pytest.mark.system("budget", "R")
@pytest.mark.usefixtures("quick_start")
def test_budget_grows_when_more_workers_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a pipeline of two ranks to two of them: its words are kept, and it stops only at a checkpoint."""
    # In the second step, of two micro-batches each; it must be ended before the last.
    ask = {"what": "ask", "rank": 1, "call": 3, "count": 4, "last": 2 * STEPS}
    result, changes = elastic("pp=2 schedule=1f1b micro=2", "2:4", tmp_path, [ask], monkeypatch)
    same(result, tmp_path)
    (change,) = changes
    assert change.workers == (2, 4)
    assert change.left == ()
    assert (change.plan.dp, change.plan.pp, change.plan.schedule, change.plan.micro) == (2, 2, "1f1b", 2)
    assert change.after.step_s < change.before.step_s
    assert "4 workers are asked for, instead of 2" in capsys.readouterr().out
    assert processes(tmp_path) == []


@pytest.mark.system("budget", "R")
@pytest.mark.usefixtures("quick_start")
def test_budget_ends_below_the_least_number_of_workers(tmp_path: Path) -> None:
    """As a user has it: a rank raises, and the same workers try again; then one is killed, and too few are left."""
    events = [{"what": "raise", "rank": 1, "call": 4}, {"what": "kill", "rank": 1, "call": 2}]
    run = tmp_path / "run"
    PROFILE.save(tmp_path / "profile.json")
    command = [
        sys.executable, "-m", "trainplan", "run", MODEL, "--profile", str(tmp_path / "profile.json"), "--cluster",
        "2xcpu", "--plan", "dp=2", "--steps", "6", "--save-every", "2", "--elastic", "2:2", "--max-restarts", "1",
        "--out", str(run),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    own = {**os.environ, "EVENTS": json.dumps(events), "FOLDER": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=own)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ValueError: the user's loss went wrong" in done.stdout
    assert "no worker has gone: the same ones try again" in done.stdout
    assert "rank 1 was killed (SIGKILL); 1 worker left of 2, and 2 is the least" in done.stderr
    assert f"Try --elastic 1:2 --resume {run / 'checkpoint-2'}." in done.stderr
    assert "Traceback" not in done.stderr
    assert processes(tmp_path) == []
