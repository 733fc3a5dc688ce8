"""Runs on processes of their own, started as a user starts them, and what happens when a rank fails."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import trainplan
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.engine.launch import check_request, run, torchrun
from trainplan.errors import InputError, RunError
from trainplan.plan.plan import Plan, plan
from trainplan.profile.measure import measure
from trainplan.program.timeline import Timeline
from trainplan.report.ran import Ran
from trainplan.workload.load import load

MODEL = f"{Path(__file__).parent / 'user_model.py'}:build"
PIPELINE = plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=4)
REPLICAS = plan(dp=2, blocks=4)


def two_cores() -> Cluster:
    """Two cores of one machine."""
    node = Node("node", (Device("cpu", 2 * 10**9, {}, 1e9),) * 2, Link("inside", 1e-4, 1e9))
    return Cluster("two", (node,), "gloo")


def processes(folder: Path) -> list[int]:
    """Processes that work in a run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.mark.usefixtures("quick_start")
def test_a_run_leaves_losses_a_timeline_and_a_log_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    result = run(MODEL, PIPELINE, steps=4, batch=8, out=tmp_path, show=False)
    assert list(elsewhere.iterdir()) == []
    assert len(result.losses) == len(result.step_seconds) == 4
    assert result.losses[0] == pytest.approx(
        run(MODEL, plan(blocks=4), steps=1, batch=8, show=False).losses[0], rel=1e-5
    )
    log = (tmp_path / "rank-1.log").read_text()
    assert re.search(r"step 4/4  loss [\d.]+  [\d.]+ m?s on rank 1  ", log)  # whose clock it is
    assert (tmp_path / "rank-0.log").exists()
    timeline = Timeline.load(tmp_path / "timeline.json")
    assert timeline == result.timeline
    assert timeline.steps == 2
    assert {e.name for e in timeline.of_rank(1)} >= {"1F0", "1B1@1", "1STEP"}


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("chosen", [PIPELINE, plan(dp=2, servers=1, exchange="ps-asp", blocks=4, bucket=200)])
def test_a_loss_that_is_no_number_is_told_once_and_kept_as_null(chosen: Plan, tmp_path: Path) -> None:
    """The first step is as usual, its update is not. Nothing that the run leaves has Python's word for it."""
    result = run(f"{MODEL},optimizer=sgd,lr=1e30", chosen, steps=4, batch=8, out=tmp_path, show=False)
    assert math.isfinite(result.losses[0])
    assert len(result.losses) == 4
    assert math.isnan(result.losses[-1])
    logs = "".join(path.read_text() for path in tmp_path.glob("rank-*.log"))
    assert logs.count("the first that is no finite number; training goes on") == 1
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text(), parse_constant=lambda word, path=path: pytest.fail(f"{word} in {path}"))


@pytest.mark.usefixtures("quick_start")
def test_a_frozen_first_stage_is_predicted_and_measured_over_the_same_moments(tmp_path: Path) -> None:
    """It waits for no gradient and begins the next step at once, predicted and measured: no reference kernel comes
    between two steps, and on either side every rank's step is from the end of its own last computation to that of the
    next."""
    model = MODEL.replace(":build", ":frozen")
    profile = measure(load(model), samples=[4], repeats=1, seconds=0.1)
    answer = trainplan.run(
        model, "pp=2 schedule=1f1b micro=2 stages=2", two_cores(), steps=5, profile=profile, out=str(tmp_path)
    )
    assert isinstance(answer, Ran)
    assert answer.joined is not None
    assert answer.joined.only_predicted == answer.joined.only_measured == ()
    passes = {row.name: row.predicted_s for row in answer.joined.ops if row.name in ("0F0", "0F1", "1F0", "1F1")}
    assert len(passes) == 4
    assert min(passes.values()) > 0
    assert answer.joined.steps == len(answer.step_seconds) - 1
    assert answer.joined.total.predicted_s == pytest.approx(answer.prediction.step_s)  # as in the headline


@pytest.mark.parametrize(
    ("trouble", "chosen", "noticed"),
    [
        ("raise on rank 1", PIPELINE, ""),
        ("build on rank 1", PIPELINE, ""),
        pytest.param("kill on rank 1", PIPELINE, "waiting for rank 1 failed", marks=pytest.mark.slow),
        ("kill on rank 1", REPLICAS, "rank-0: .*Connection (closed|reset) by peer"),
    ],
    ids=["raises in a pipeline", "raises when it is built", "is killed in a pipeline", "is killed among replicas"],
)
def test_a_failing_rank_stops_all_ranks(
    trouble: str, chosen: Plan, noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: str
) -> None:
    """One that is killed is started as users start it; what one says that raises does not depend on how it was."""
    monkeypatch.setenv("TROUBLE", trouble)
    if not noticed:
        monkeypatch.setattr(sys, "executable", forked_python)
    monkeypatch.setenv("MOMENT", str(tmp_path / "moment"))
    with pytest.raises(RunError) as error:
        run(MODEL, chosen, steps=4, batch=8, out=tmp_path, show=False)
    assert time.time() - float((tmp_path / "moment").read_text()) < 30  # since it failed: starting takes its own time
    assert processes(tmp_path) == []
    if not noticed:
        assert "rank 1 failed" in str(error.value)
        wrong = "function" if trouble.startswith("build") else "loss"
        assert "Traceback (most recent call last)" in str(error.value)
        assert str(error.value).strip().endswith(f"ValueError: the user's {wrong} went wrong")
    else:
        assert "rank 1 was killed (SIGKILL)" in str(error.value)
        # The other one says what it noticed, unless torchrun was faster in ending it.
        ended = "closing signal SIGTERM" in (tmp_path / "torchrun.log").read_text()
        told = "rank-0: " in str(error.value)
        assert told or ended
        assert not told or re.search(noticed, str(error.value))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_whoever_is_ended_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, and what schedulers send: both go through the command, whose ranks are in a group of their own."""
    script = (
        "from trainplan import cli; from trainplan.engine.launch import run; from trainplan.plan.plan import plan\n"
        f"cli.app = lambda: run({MODEL!r}, plan(dp=2, blocks=4), steps=1000, batch=8, out={str(tmp_path)!r})\n"
        "cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TROUBLE": "slow"},
        stderr=subprocess.DEVNULL, start_new_session=True,
        # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert any("step 2/" in line for line in process.stdout)
    assert len(processes(tmp_path)) >= 2
    process.send_signal(how)
    assert process.wait(30) == 128 + how
    deadline = time.monotonic() + 10
    while processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(tmp_path) == []


def test_under_a_plain_torchrun(tmp_path: Path) -> None:
    from trainplan.engine.job import Job
    from trainplan.plan.text import to_json

    job = Job(MODEL, to_json(plan(dp=2, blocks=4)), 8, 3, str(tmp_path))
    command = torchrun(job.save(), 2)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout


def test_a_checkpoint_between_two_names_is_rank_0s_to_put_back(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is not there"):
        check_request(resume=str(tmp_path / "checkpoint-2"))
    (tmp_path / ".checkpoint-2.old").mkdir()
    check_request(resume=str(tmp_path / "checkpoint-2"))


def test_a_run_needs_as_many_ranks_on_every_node() -> None:
    with pytest.raises(RunError, match="every node must run as many"):
        torchrun(Path("job.json"), 3, nnodes="2", endpoint="host:1234")
    with pytest.raises(RunError, match="where to meet"):
        torchrun(Path("job.json"), 4, nnodes="2")
