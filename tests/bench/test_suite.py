"""The benchmark suite: its cases, what a run of it leaves behind, and that it can be gone on with."""

import inspect
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from trainplan import api, cli, files
from trainplan.bench import suite as suite_module
from trainplan.bench.accuracy import Compared
from trainplan.bench.answers import Benched
from trainplan.bench.cases import HARD, NETWORKS, Case, Conditions, candidates, cases, hard, systems
from trainplan.bench.limit import UNFINISHED
from trainplan.bench.results import OUT_OF_MEMORY, Outcome, Result, load, read
from trainplan.bench.row import Row
from trainplan.bench.suite import Effort, Suite, reason, tightened
from trainplan.bench.uneven import described, uneven
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, RunError
from trainplan.plan.systems import SYSTEMS
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve
from trainplan.workload.datasets import DATASETS
from trainplan.workload.load import load as load_workload

TINY = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32,batch=4"


# -- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.system("bench", "R")
def test_the_suite_is_every_network_on_every_data_set_and_a_family_of_gpts() -> None:
    found = cases(workers=[2, 4])
    images = {(case.network, case.dataset) for case in found if case.dataset in DATASETS}
    assert images == {(network, data) for network in NETWORKS for data in DATASETS}
    assert len(images) == 24
    assert len({case.network for case in found if case.dataset == "text"}) == 3
    assert len(found) == 2 * 27
    assert len({case.file for case in found}) == len(found)
    for case in found:
        assert load_workload(case.workload).batch > 0
    assert [c.workload for c in cases(["vgg11"], ["mnist"], batch=8)] == ["vgg11:mnist,batch=8"]
    with pytest.raises(InputError, match="GPTs read text"):
        cases(["gpt-tiny"], ["mnist"])
    with pytest.raises(InputError, match="resnet18"):
        cases(["resnet81"])


def test_hard_cases_are_three_conditions_on_three_networks() -> None:
    found = hard([4, 8])
    assert len({case.file for case in found}) == len(found) == 18
    assert {str(case.conditions) for case in found} == set(map(str, HARD))
    assert {(case.network, case.dataset) for case in found} >= {("vgg11", "cifar10"), ("gpt-tiny", "text")}
    for case in found:
        assert load_workload(case.workload).batch >= 8
    with pytest.raises(InputError, match="cases of their own"):
        api.bench_run(hard=True, uneven=2)


def test_tight_memory_is_a_share_of_what_a_replica_takes(profile) -> None:
    """However much a process takes by itself: that many bytes of tensors fit, and a replica's do not."""
    case = Case("gpt", "text", TINY, 2, Conditions(tight=0.6))
    plain = cluster("2xcpu")
    node = plain.nodes[0]
    for context in (0, 10**9):
        there = replace(
            plain, nodes=(replace(node, devices=tuple(replace(d, context_bytes=context) for d in node.devices)),)
        )
        within = tightened(there, profile, case)
        whole, held = (predict(resolve(parse("dp=2"), profile, c, 4), profile, c, 4) for c in (there, within))
        assert whole.fits
        assert not held.fits
        assert held.limit_bytes == pytest.approx(context + 0.6 * held.peak.bytes, abs=2)
    assert suite_module._file(case, "cluster") != suite_module._file(replace(case, workload="other"), "cluster")
    assert suite_module._file(case, "profile") == suite_module._file(replace(case, conditions=Conditions()), "profile")


def test_what_cannot_be_made_here_is_left_out_and_said(tmp_path, monkeypatch) -> None:
    def cannot(case):
        raise RunError("a slow link", "it needs root", "sudo")

    monkeypatch.setattr(suite_module, "workers_of", cannot)
    suite = Suite([Case("gpt", "text", TINY, 2)], tmp_path, ["single"], Effort(), 1.0, "", lambda what, share: None)
    with pytest.raises(RunError, match="needs root"):  # there is nothing else
        suite.run()
    assert list(suite.left_out) == [f"{TINY} x2"]
    told = str(Benched((), "out", False, "next", ("a case: why not",)))
    assert "left out a case: why not" in told


def test_candidates_are_the_systems_that_run(monkeypatch) -> None:
    found = candidates(4)
    built = {key for key, row in SYSTEMS.items() if row.choices is not None}
    assert set(found.values()) == set(systems()) <= built
    assert {"single", "ddp", "zero3", "gpipe", "dapple", "zb-h1", "ps-bsp"} <= set(systems())
    assert found["ps-bsp dp=3 servers=1"] == found["ps-bsp dp=2 servers=2"] == "ps-bsp"
    assert not any("servers=2" in line for line in candidates(3))  # one worker alone has nobody to be stale against
    assert set(candidates(1).values()) == {"single"}
    alike = candidates(2, ["single", "ddp", "gpipe"], uneven=True)
    assert list(alike) == ["single", "ddp dp=2 ratio=1,1", "gpipe pp=2 dp=1"]
    sliced = replace(SYSTEMS["ddp"], key="new", choices="tp=2")  # predicted only
    monkeypatch.setitem(SYSTEMS, "new", sliced)
    assert "new" not in systems()
    monkeypatch.setitem(SYSTEMS, "new", replace(sliced, choices="schedule=gpipe"))
    assert candidates(2)["new pp=2 dp=1"] == "new"
    with pytest.raises(InputError, match="no system that can be run"):
        systems(["nonsense"])


def test_commands_of_the_suite_are_public_functions() -> None:
    for found in cli.bench.registered_commands:
        name = found.callback.__name__
        assert name == f"bench_{found.name}"
        ours = {p.name: p.default for p in inspect.signature(found.callback).parameters.values()}
        assert ours.pop("json") is False, name
        theirs = {p.name: p.default for p in inspect.signature(getattr(api, name)).parameters.values()}
        assert list(ours) == list(theirs), name
        for parameter, default in ours.items():
            assert default == theirs[parameter] or (default == [] and theirs[parameter] == ()), (name, parameter)
        assert inspect.getdoc(found.callback), name
        assert inspect.getdoc(getattr(api, name)), name


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure(load_workload(TINY), samples=[2, 4], repeats=1, verify=False)


def started(folder: Path, profile: Profile, words: list[str], minutes: float = 10.0, **conditions) -> Suite:
    """A suite of one tiny case that needs neither a probe nor a profile: they are there from an earlier call."""
    (case,) = cases(workloads=[TINY], conditions=Conditions(**conditions))
    there = cluster("2xcpu")
    there.save(folder / suite_module._file(case, "cluster"))
    profile.save(folder / suite_module._file(case, "profile"))
    return Suite([case], folder, words, Effort(steps=1, rounds=1), minutes, "trainplan bench run", lambda *_: None)


@pytest.mark.parametrize(
    ("words", "asked"), [(["ddp"], ["ddp dp=2"]), (["recommended"], ["recommended"]), (["ddp", "recommended"], None)]
)
def test_our_own_pick_is_a_candidate_like_the_others(tmp_path, profile, words, asked) -> None:
    suite = started(tmp_path, profile, words)
    assert list(suite._lines(suite.cases[0])) == (asked or ["ddp dp=2", "recommended"])


def test_who_calls_again_is_told_so_by_the_exit_code(tmp_path, monkeypatch) -> None:
    left = Benched((), str(tmp_path), unfinished=True, again="trainplan bench run")
    monkeypatch.setattr(api, "bench_run", lambda *_: left)
    assert CliRunner().invoke(cli.app, ["bench", "run", "--minutes", "0.1"]).exit_code == UNFINISHED
    monkeypatch.setattr(api, "bench_run", lambda *_: replace(left, unfinished=False))
    assert CliRunner().invoke(cli.app, ["bench", "run"]).exit_code == 0


@pytest.mark.system("bench", "R")
def test_what_ran_and_what_failed_are_results_and_are_not_measured_again(tmp_path, profile, monkeypatch) -> None:
    suite = started(tmp_path, profile, ["single", "ddp", "preload", "hsdp"])
    (outcome,) = suite.run()
    assert not suite.unfinished
    assert {r.asked for r in outcome.results} == {"single", "ddp dp=2", "preload dp=2", "hsdp dp=2"}
    assert {r.asked for r in outcome.ran} == {"single", "ddp dp=2", "preload dp=2"}
    assert all(r.row.spent.keys() >= {"F", "B", "STEP"} for r in outcome.ran)  # by which a cluster is calibrated
    assert all(0 < took < 2 * r.row.measured_s for r in outcome.ran for took in (r.row.spent["F"], r.row.spent["B"]))
    assert "not two groups of two" in next(r.failure for r in outcome.results if r.system == "hsdp")
    ddp = outcome.known("ddp dp=2")
    assert ddp
    assert ddp.row
    assert ddp.measured_s == pytest.approx(ddp.row.predicted_s / (1 + ddp.row.error))
    assert ddp.published_s is not None
    assert ddp.predicted_bytes > 0
    (kept,) = [load(path) for path in tmp_path.glob("*.json") if files.kind(path) == "bench"]
    assert kept == outcome
    assert kept.torch == torch.__version__
    assert kept.machine
    assert kept.python
    # Once more: nothing is left to do, so nothing is run.
    monkeypatch.setattr(Compared, "run", lambda *_: pytest.fail("it was measured already"))
    again = started(tmp_path, profile, ["single", "ddp", "preload", "hsdp"])
    assert again.planned == 0
    assert again.run() == [outcome]
    # One that is new is measured, and only that.
    ran: list[str] = []
    monkeypatch.setattr(Compared, "run", lambda self, steps: ran.append(self.asked) or 1 / 0)
    (more,) = started(tmp_path, profile, ["single", "ddp", "zero1"]).run()
    assert ran == ["zero1 dp=2"]
    assert more.known("zero1 dp=2").failure == "division by zero"
    assert more.known("ddp dp=2") == ddp


def test_two_names_of_one_plan_are_measured_once(tmp_path, profile, monkeypatch) -> None:
    monkeypatch.setitem(SYSTEMS, "twin", replace(SYSTEMS["single"], key="twin"))
    ran: list[str] = []
    original = Compared.run
    monkeypatch.setattr(Compared, "run", lambda self, steps: (ran.append(self.asked), original(self, steps)))
    (outcome,) = started(tmp_path, profile, ["single", "twin"]).run()
    assert ran == ["single"]
    assert outcome.known("twin") is outcome.known("single")
    assert outcome.results[0].also == ("twin",)


def test_one_failure_does_not_stop_the_others_and_memory_is_said(tmp_path, profile, monkeypatch) -> None:
    original = Compared.run

    def run(self: Compared, steps: int) -> None:
        if self.plan.zero:
            raise RunError("2 processes", "rank 1 failed\ntorch.OutOfMemoryError: CUDA out of memory. 3 GiB")
        original(self, steps)

    monkeypatch.setattr(Compared, "run", run)
    (outcome,) = started(tmp_path, profile, ["zero1", "single"]).run()
    failed = outcome.known("zero1 dp=2")
    assert failed.too_big
    assert "3 GiB" in failed.failure
    assert [r.asked for r in outcome.ran] == ["single"]
    assert reason(ValueError()) == "ValueError"


def test_what_cannot_fit_is_not_run_where_nothing_would_stop_it(tmp_path, profile, monkeypatch) -> None:
    monkeypatch.setattr(Compared, "run", lambda *_: pytest.fail("it does not fit"))
    suite = started(tmp_path, profile, ["single", "ddp"])
    small = cluster("2xcpu")
    tight = suite_module.limited(small, small.device(0).context_bytes + 1000)
    tight.save(tmp_path / suite_module._file(suite.cases[0], "cluster"))
    (outcome,) = suite.run()
    assert [r.failure.partition(":")[0] for r in outcome.results] == [OUT_OF_MEMORY] * 2
    assert not any(r.fits for r in outcome.results)


def test_it_stops_in_time_and_says_so(tmp_path, profile) -> None:
    suite = started(tmp_path, profile, ["single"], minutes=0.0)
    (outcome,) = suite.run()
    assert suite.unfinished
    assert outcome.results == ()


def test_a_model_that_cannot_be_profiled_is_a_result(tmp_path, profile, monkeypatch) -> None:
    suite = started(tmp_path, profile, ["single", "ddp"])
    (tmp_path / suite_module._file(suite.cases[0], "profile")).unlink()

    def measure(*_: object, **__: object) -> Profile:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(suite_module, "measure", measure)
    (outcome,) = suite.run()
    assert all(r.too_big for r in outcome.results)
    assert len(outcome.results) == 2


# -- uneven workers ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_last_half_shares_its_cores() -> None:
    own = os.sched_getaffinity(0)
    with uneven(2, times=2) as place:
        with place(1, 2):
            there = os.sched_getaffinity(0)
        assert len(there) == 1
        assert os.sched_getaffinity(0) == own
        import psutil

        (beside,) = [p for p in psutil.Process().children() if p.cpu_affinity() == list(there)]
        before = sum(beside.cpu_times()[:2])
        deadline = time.monotonic() + 20
        while sum(beside.cpu_times()[:2]) < before + 0.1:
            assert time.monotonic() < deadline, "it does not count"
            time.sleep(0.02)
    assert not beside.is_running()
    slowed = described(cluster("4xcpu"), 2)
    assert [device.name for device in slowed.nodes[0].devices] == ["cpu"] * 2 + ["cpu, 2 times slower"] * 2
    with pytest.raises(RunError, match="a core of its own"), uneven(10_000, 2):
        pass


# -- files ------------------------------------------------------------------------------------------------------------


def test_older_files_are_cases_too() -> None:
    data = Path(__file__).parents[2] / "benchmarks" / "data"
    found = read([data])
    assert {outcome.dataset for outcome in found} == {"cifar10", "imagenet", "text"}
    assert {outcome.workers for outcome in found} >= {2, 4}
    kept = [path for path in data.glob("*.json") if files.kind(path) == "accuracy"]
    assert {outcome.at for outcome in found} == set(map(str, kept))
    for outcome in found:
        assert {r.row.ranks for r in outcome.ran} <= {1, outcome.workers}
    assert {"single", "dp", "naive", "gpipe", "1f1b", "zb-h1"} <= {r.system for o in found for r in o.results}
    with pytest.raises(InputError, match="no results in it"):
        read([data.parents[1] / "examples"])


def test_a_result_is_readable_by_others(tmp_path) -> None:
    outcome = Outcome("here", "cpu", "2.13", "2026-01-01", "", "vgg11", "mnist", "vgg11:mnist", 2, 8)
    outcome.save(tmp_path / "one.json")
    assert json.loads((tmp_path / "one.json").read_text())["trainplan"] == "bench"
    assert load(tmp_path / "one.json") == outcome


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("measured_s", -1.0, r"results\[0\].row.measured_s: it is -1.0, and a number from 0"),
        ("error", -1.0, r"results\[0\].row: predicted_s is 1.0 and error -1.0: nothing is measured so"),
        ("predicted_s", 0.0, "predicted_s is 0.0 and error 0.5"),
    ],
)
def test_a_result_that_cannot_be_is_refused(tmp_path, field, value, said) -> None:
    row = Row("w", "single", "single", 1, 8, 1.0, 1.5, 0.5, 0.5, 0.01, 5, {})
    results = (Result("single", "single", "single", row=replace(row, **{field: value})),)
    outcome = Outcome("here", "cpu", "2.13", "2026-01-01", "", "vgg11", "mnist", "vgg11:mnist", 1, 8, results=results)
    outcome.save(tmp_path / "one.json")
    with pytest.raises(InputError, match=f"{said}.*trainplan bench run"):
        load(tmp_path / "one.json")


@pytest.mark.gpu
def test_a_worker_is_held_to_its_memory() -> None:
    try:
        suite_module._hold_to(0, 1, 2**28)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2**29, dtype=torch.uint8, device="cuda")
        assert reason(caught.value).startswith(OUT_OF_MEMORY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
