"""Several nodes: clocks that differ, and runs whose nodes share nothing but a port."""

import doctest
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine import sleeping
from trainplan import files
from trainplan.bench import results
from trainplan.bench.believed import believed
from trainplan.bench.pool import pool
from trainplan.cluster.parse import cluster
from trainplan.engine import clocks, nodes
from trainplan.engine.job import Job
from trainplan.engine.launch import torchrun
from trainplan.engine.measurement import Measurement, together
from trainplan.errors import RunError
from trainplan.plan.plan import plan
from trainplan.plan.text import to_json
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.program.timeline import Timeline
from trainplan.workload.load import load

SHIFT = 3.7
MODEL = f"{Path(__file__).parent / 'user_model.py'}:build"
PIPELINE = plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=4)


def port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def side_by_side(commands: list[list[str]]) -> list[str]:
    """Start them all, as if each were on a machine of its own; what each printed."""
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), said
    return [out for out, _ in said]


def results_in(folders: list[Path]) -> tuple[Path, Path]:
    """The folder that has the results of both ranks, and the one that says so."""
    here, there = sorted(folders, key=lambda folder: not (folder / "rank-0.json").exists())
    assert (here / "rank-1.json").exists()
    assert not (there / "rank-1.json").exists()
    assert nodes.elsewhere(here) is None
    assert nodes.elsewhere(there) == nodes.Elsewhere(socket.gethostname(), str(here))
    timeline = Timeline.load(here / "timeline.json")
    assert {event.rank for event in timeline.events} == {0, 1}
    return here, there


@pytest.mark.usefixtures("quick_start")
def test_two_launchers_that_share_no_folder(tmp_path: Path) -> None:
    workload, there = load(MODEL), cluster("2x1xcpu")
    estimate(workload, there.device(0)).save(tmp_path / "profile.json")
    command = [
        sys.executable, "-m", "trainplan.cli", "run", MODEL, "--profile", str(tmp_path / "profile.json"), "--json",
        "--cluster", "2x1xcpu", "--plan", "pp=2 schedule=1f1b micro=2", "--steps", "4", "--nnodes", "2",
        "--endpoint", f"127.0.0.1:{port()}",
    ]  # fmt: skip
    folders = [tmp_path / "a", tmp_path / "b"]
    answers = [json.loads(text) for text in side_by_side([[*command, "--out", str(folder)] for folder in folders])]
    here, _ = results_in(folders)
    (ran,) = [answer for answer in answers if "results" not in answer]
    (away,) = [answer for answer in answers if "results" in answer]
    assert ran["out"] == str(here) == away["results"]["folder"]
    assert len(ran["losses"]) == 4
    assert ran["joined"]["only_predicted"] == ran["joined"]["only_measured"] == []
    kept = results.load(here / "run.json")  # by which a cluster can be calibrated
    (row,) = (result.row for result in kept.results)
    assert row is not None
    assert row.measured_s == ran["step_s"]
    assert row.spent.keys() == row.by_kind.keys() - {"wait"}
    timeline = Timeline.load(here / "timeline.json")
    passes = [event for event in timeline.events if event.kind == "F"]
    assert len(passes) == 2 * 2 * timeline.steps  # of two ranks, for two micro-batches
    spent = sum(event.end - event.start for event in passes) / timeline.steps / 2
    assert row.spent["F"] == pytest.approx(spent)  # by a step and a rank
    assert believed(kept) == (Profile.load(tmp_path / "profile.json"), there)


@pytest.mark.usefixtures("quick_start")
def test_two_nodes_under_a_plain_torchrun(tmp_path: Path) -> None:
    folders, meet = [tmp_path / "a", tmp_path / "b"], f"127.0.0.1:{port()}"
    jobs = [Job(MODEL, to_json(PIPELINE), 8, 3, str(folder)).save() for folder in folders]
    side_by_side([torchrun(job, 2, nnodes="2", endpoint=meet) for job in jobs])
    here, there = results_in(folders)
    assert (here / "rank-0.log").exists()
    assert "step 3/3" in (there / "rank-1.log").read_text()


# -- what ranks say to each other before and after, on processes that are kept --------------------------------------

JOB = Job(MODEL, to_json(PIPELINE), 8, 3, "")


def agreed(rank: int, world: int, jobs: list[Job]) -> Job | str:
    try:
        return nodes.agree(jobs[rank])
    except RunError as error:
        return str(error)


def test_nodes_that_were_told_different_things_say_so_on_every_node() -> None:
    errors = pool(2).run(agreed, [JOB, replace(JOB, steps=4, seed=1)])
    assert errors[0] == errors[1]
    assert "rank 0 has steps=3, seed=0, and that of rank 1 has steps=4, seed=1" in errors[0]


def test_the_plan_is_rank_0s_where_nodes_have_cut_elsewhere() -> None:
    other = replace(JOB, plan=to_json(plan(pp=2, micro=2, schedule="1f1b", stages=(3,), blocks=4)), out="b")
    assert pool(2).run(agreed, [JOB, other]) == [JOB, replace(JOB, out="b")]


def test_checkpoints_need_a_folder_that_all_nodes_see(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    shared = [replace(JOB, save_every=2, out=str(tmp_path))] * 2
    assert pool(2).run(agreed, shared) == shared
    errors = pool(2).run(agreed, [shared[0], replace(shared[0], out=str(tmp_path / "b"))])
    assert errors[0] == errors[1]
    assert "their folders are not one" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]  # nothing is left of looking


def handed(rank: int, world: int, folder: Path) -> None:
    nodes.hand_over(Measurement(rank, 0, (rank,), (1.0,), (None,), (), 0, (), {}), PIPELINE, folder)


def test_nodes_that_share_a_folder_find_the_results_there(tmp_path: Path) -> None:
    pool(2).run(handed, tmp_path)
    ranks = [files.from_json(Measurement, files.read(tmp_path / f"rank-{rank}.json", "rank")) for rank in (0, 1)]
    assert [rank.stages for rank in ranks] == [(0,), (1,)]
    assert nodes.elsewhere(tmp_path) is None


# -- clocks ---------------------------------------------------------------------------------------------------------


def shifted(rank: int, world: int, seconds: float, *arguments) -> tuple[Measurement, clocks.Reading]:
    """Train where rank 1 is on a machine that was started so many seconds earlier."""
    clock = time.perf_counter
    if rank == 1:
        time.perf_counter = lambda: clock() + seconds
    try:
        return sleeping.train(rank, world, *arguments), clocks.read()
    finally:
        time.perf_counter = clock


@pytest.mark.alone
@pytest.mark.parametrize("seconds", [0.0, SHIFT])
def test_events_of_two_clocks_are_brought_together(seconds: float) -> None:
    chosen = plan(pp=2, stages=(2,), micro=2, schedule="1f1b", blocks=4)
    ranks = pool(2).run(shifted, seconds, chosen, 4, 1, 3)
    reading = ranks[1][1]
    assert abs(reading.offset + seconds) <= reading.within < 0.05
    assert reading.offset == 0.0 or seconds  # one machine, one clock, exactly
    measured = [measurement for measurement, _ in ranks]
    within = measured[1].within
    assert measured[0].within == 0 < within
    result = together(measured, chosen, 1)
    # What causes something comes before it, however far the two clocks were apart.
    events = {event.name: event for event in result.timeline.events}
    for step in ("", "@1", "@2"):
        for micro in range(2):
            there, back = events[f"0SEND_F{micro}{step}"], events[f"1SEND_B{micro}{step}"]
            assert (
                events[f"0F{micro}{step}"].end <= there.start <= there.end <= events[f"1F{micro}{step}"].start + within
            )
            assert events[f"1B{micro}{step}"].end <= back.start <= back.end <= events[f"0B{micro}{step}"].start + within
            assert there.end - there.start < 0.05 + within
    assert result.timeline.duration == pytest.approx(sum(result.steady_seconds), abs=0.05)


def test_clocks_that_drift() -> None:
    """Rank 0's clock is 10 s ahead, and gains 100 µs every second: two readings are enough."""
    answers = [[(t, t + 0.002, 10 + (t + 0.001) * (1 + 1e-4))] for t in (100.0, 200.0)]
    readings = [clocks.nearest(several) for several in answers]
    for moment in (100.0, 130.0, 170.0, 200.0):
        assert clocks.aligned(moment, readings) == pytest.approx(10 + moment * (1 + 1e-4), abs=1e-6)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(clocks) == (0, 4)
