"""How many workers there may be, are, and are to be; and which of them torchrun says have gone."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainplan
from synthetic import chain
from trainplan import files
from trainplan.engine.attempt import keep_steps
from trainplan.engine.checkpoint_folder import ABOUT, About
from trainplan.engine.elastic import Change, _Training
from trainplan.engine.faults import gone
from trainplan.engine.job import Job
from trainplan.engine.trainer import StepResult
from trainplan.engine.worker import _device
from trainplan.engine.workers import Bounds, Workers
from trainplan.errors import InputError, RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import to_json

DP = plan(dp=2, blocks=4)


@pytest.mark.parametrize(
    ("words", "why", "instead"),
    [
        ("4", "the least and the most workers", "--elastic 1:4"),
        ("two:4", "the least and the most workers", "--elastic 1:2"),
        ("4:2", "above the most", "--elastic 2:4"),
        ("0:2", "nobody would be left", "--elastic 1:2"),
        ("0:0", "nobody would be left", "--elastic 1:1"),
    ],
)
def test_bounds_that_cannot_be(words: str, why: str, instead: str) -> None:
    with pytest.raises(InputError, match=f"--elastic {words}: .*{why}.*Try {instead}"):
        Bounds.parse(words)
    Bounds.parse(instead.removeprefix("--elastic "))


@pytest.mark.parametrize(
    ("bounds", "count", "why"),
    [
        ("1:8", 2, "there are 4 devices in the cluster. Try --elastic 1:4, or a larger --cluster"),
        ("3:4", 2, "the plan begins with 2 workers. Try --elastic 2:4"),
        ("1:2", 4, "the plan begins with 4 workers. Try --elastic 1:4"),
    ],
)
def test_workers_that_cannot_be(bounds: str, count: int, why: str) -> None:
    with pytest.raises(InputError, match=f"--elastic {bounds}: {why}"):
        Workers(Bounds.parse(bounds), count, 4)


def test_a_number_is_asked_for_by_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers, file = Workers(Bounds(2, 4), 3, 4), tmp_path / "workers"
    file.write_text("4\n")  # of an earlier run
    assert workers.begin(tmp_path) == file.stat().st_mtime
    assert (file.read_text(), workers.asked()) == ("3\n", None)
    file.write_text("4\n")
    assert workers.asked() == 4
    file.write_text("")  # somebody is at it
    assert workers.asked() is None
    file.write_bytes(b"\xff\xfe")
    assert workers.asked() is None
    assert capsys.readouterr().out == ""
    for words in ("5", "1", "many"):
        file.write_text(words)
        assert [workers.asked(), workers.asked()] == [None, None]
        said = capsys.readouterr().out
        assert said.count(f"'{words}' in {file}: it is a number from 2 to 4") == 1  # said once
    file.unlink()
    assert workers.asked() is None
    workers.become((0, 1))
    assert file.read_text() == "2\n"


def job(folder: Path, **fields) -> Job:
    return Job("synthetic", to_json(DP), 8, 4, str(folder), save_every=2, **fields)


@dataclass
class Answer:
    """What a search might say."""

    plan: Plan
    is_other: bool


@pytest.mark.parametrize("is_other", [True, False])
def test_nothing_stops_where_no_other_plan_is_worth_it(
    is_other: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers, answer = Workers(Bounds(1, 4), 2, 4), Answer(plan(dp=3, blocks=4), is_other)
    seen: list[Change] = []
    training = _Training(job(tmp_path), workers, lambda change: seen.append(change) or answer, 0, False)
    (tmp_path / "workers").write_text("3")
    assert training._planned(DP, 3) == ((answer, (0, 1, 2)) if is_other else None)
    assert [(change.was, change.now, change.steps_lost) for change in seen] == [((0, 1), (0, 1, 2), 0)]
    # Until the attempt is ended there are two; where it goes on, three, of whom one has nothing to do.
    assert workers.places == ((0, 1) if is_other else (0, 1, 2))
    assert ("dp=2 goes on: no other plan is worth" in capsys.readouterr().out) != is_other


def test_workers_that_nothing_fits_on_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(change: Change) -> Answer:
        raise RunError("going on with 1 worker", "no plan fits: it needs 9 GiB, and there are 8 GiB")

    workers = Workers(Bounds(1, 4), 2, 4)
    training = _Training(job(tmp_path), workers, refused, 0, False)
    (tmp_path / "workers").write_text("1")
    assert training._planned(DP, 1) is None
    assert "it needs 9 GiB, and there are 8 GiB\nso they stay 2\n" in capsys.readouterr().out
    assert ((tmp_path / "workers").read_text(), workers.asked()) == ("2\n", None)


def test_steps_after_the_checkpoint_are_not_counted_twice(tmp_path: Path) -> None:
    """Ranks keep their steps before they save: whoever is killed between has kept some that are trained again."""
    training = _Training(job(tmp_path), Workers(Bounds(1, 4), 2, 4), lambda change: Answer(DP, True), 0, False)
    for rank, (seconds, loss) in enumerate([(1.0, None), (2.0, 0.5)]):
        keep_steps(tmp_path, rank, [StepResult(step, loss, seconds + step, 8) for step in range(4)])
    (tmp_path / "checkpoint-2").mkdir()
    about = About("synthetic", "dp=2", "SGD", "", 2, 0, {})
    files.write(tmp_path / "checkpoint-2" / ABOUT, "checkpoint", files.to_json(about))
    training._go_on(plan(blocks=4))
    assert training.earlier == [StepResult(0, 0.5, 2.0, 8), StepResult(1, 0.5, 3.0, 8)]
    assert (training.job.steps, training.job.resume) == (2, str(tmp_path / "checkpoint-2"))
    training._go_on(DP)  # no further than that: nothing is counted again
    assert (len(training.earlier), training.job.steps) == (2, 2)
    assert (tmp_path / "attempt-1" / "rank-1.steps").exists()


def test_ranks_have_the_devices_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank has the fourth GPU where the second has gone; where there is only one, a slice of that."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for count, places, index in ((4, (), 2), (4, (0, 2, 3), 3), (1, (0, 2, 3), 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _device(job(tmp_path, device="cuda", places=places)) == torch.device("cuda", index)


def test_who_is_left(tmp_path: Path) -> None:
    workers = Workers(Bounds(1, 4), 4, 4)
    workers.begin(tmp_path)
    workers.lose([1], "rank 1 was killed", "")
    assert workers.places == (0, 2, 3)
    assert (tmp_path / "workers").read_text() == "3\n"
    workers.lose([1], "rank 1 was killed", "")  # which now has the third device
    assert workers.places == (0, 3)
    assert workers.with_count(3) == (0, 1, 3)  # the first that has none comes back
    (tmp_path / "workers").write_text("4")
    workers.lose([0], "rank 0 was killed", "")
    assert (workers.places, workers.asked()) == ((3,), 4)  # what somebody has just asked for is not written over
    with pytest.raises(RunError, match=r"--elastic 1:4: all gone; 0 workers left of 1, and 1 is the least. Try more"):
        workers.lose([0], "all gone", "more")


@given(st.data())
def test_devices_come_and_go_one_by_one(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 6))
    workers = Workers(Bounds(1, most), data.draw(st.integers(1, most)), most)
    for _ in range(4):
        before, count = set(workers.places), data.draw(st.integers(1, most))
        places = workers.with_count(count)
        assert len(set(places)) == count
        assert set(places) <= set(range(most))
        assert set(places) <= before or set(places) >= before  # nobody moves
        assert list(places) == sorted(places)
        workers.places = places


LOG = """
W1116 10:10:58 api.py:1028] Sending process 15256 closing signal SIGTERM
W1116 10:10:58 api.py:1028] Sending process 15259 closing signal SIGTERM
E1116 10:10:58 api.py:1002] failed (exitcode: -9) local_rank: 2 (pid: 15258) of binary: python
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 15256)  (SIGTERM)
[2]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 15257)
[3]:
  rank      : 3 (local_rank: 3)
  exitcode  : -15 (pid: 15259)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 15258)  (SIGKILL)
"""


@pytest.mark.parametrize(
    ("code", "left", "lost"),
    [(-15, "", [1, 2]), (-9, "", [1, 2]), (3, "", [1, 2]), (1, "rank-1.lost", [2]), (1, "rank-1.error", [2])],
)
def test_who_has_gone_is_not_who_was_ended_because_of_it(code: int, left: str, lost: list[int], tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text(LOG.format(code))
    (tmp_path / "rank-0.lost").touch()
    if left:
        (tmp_path / left).touch()
    assert gone(tmp_path, tmp_path / "torchrun.log") == lost


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"save_every": 0}, "none is saved. Try --elastic 1:2 --save-every 10"),
        ({"nnodes": "2", "endpoint": "here:1"}, "--nnodes is 2"),
        ({"dry_run": True}, "torchrun alone does not plan again"),
        ({"elastic": "1:3"}, "there are 2 devices in the cluster"),
        ({"steps": 0}, "at least one step"),
        ({"plan": "ps-asp dp=1 servers=1"}, "ps-asp"),
    ],
)
def test_what_is_refused_leaves_nothing(given: dict, why: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fields = {"plan": "dp=2", "cluster": "2xcpu", "save_every": 1, "elastic": "1:2", "out": str(out), **given}
    with pytest.raises(trainplan.errors.TrainplanError, match=why):
        trainplan.run(chain(4, workload="examples/net.py:build"), **fields)
    assert not out.exists()
