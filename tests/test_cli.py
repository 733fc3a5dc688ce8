"""The commands: the same as the public functions, readable by people and by programs, honest about what is wrong."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import trainplan
from search.models import model
from trainplan import api, cli
from trainplan.errors import InputError, PlanError, RunError, TrainplanError
from trainplan.program.timeline import Timeline

PROMISED = {
    "plan", "fits", "step_s", "samples_per_s", "epoch_s", "peak_bytes", "breakdown", "bubble", "exposed_comm_s", "mfu",
    "profile", "error",
}  # fmt: skip
GPT = "gpt:layers=2,hidden=64,heads=4,seq=16,vocab=50,batch=8"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A profile on disk."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    model(samples_per_epoch=6400).save(path)
    return str(path)


def call(*words):
    """A command in this process: what it prints to stdout."""
    result = CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def console(*words):
    """The console command in a process of its own."""
    line = [sys.executable, "-m", "trainplan.cli", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


# -- commands are functions -------------------------------------------------------------------------------------------


def commands():
    return {found.callback.__name__: found.callback for found in cli.app.registered_commands}


def test_commands_are_the_public_functions():
    assert tuple(commands()) == trainplan.COMMANDS
    for name, command in commands().items():
        ours = {p.name: p.default for p in inspect.signature(command).parameters.values()}
        assert ours.pop("json") is False, name
        function = inspect.signature(getattr(trainplan, name)).parameters
        # What is only there from Python: the parts of a module.
        own = {p.name: p.default for p in function.values() if p.kind is p.KEYWORD_ONLY}
        assert own in ({}, {"inputs": None, "loss": None, "optimizer": None}), name
        assert bool(own) == ("model" in function), name
        theirs = {p.name: p.default for p in function.values() if p.name not in own}
        assert list(ours) == list(theirs), name
        for parameter, default in ours.items():
            assert default == theirs[parameter] or (default == [] and theirs[parameter] == ()), (name, parameter)
        assert inspect.getdoc(command), name
        assert inspect.getdoc(getattr(api, name)), name


def test_answers_print_and_have_json():
    from trainplan.bench.calibrate import answer as calibrated
    from trainplan.report import answers, device, explain, influence, market, methods, movement, ran, roofline
    from trainplan.report import staleness as stale

    for name in trainplan.COMMANDS:
        for returned in inspect.signature(getattr(api, name)).return_annotation.split(" | "):
            rooms = (answers, calibrated, device, explain, influence, market, methods, movement, ran, roofline, stale)
            (answer,) = {vars(room)[returned] for room in rooms if returned in vars(room)}
            assert dataclasses.is_dataclass(answer), name
            assert "__str__" in vars(answer), name
            assert callable(answer.to_json), name


def test_importing_is_instant_and_needs_nothing():
    code = "import sys, trainplan; print([m for m in ('torch', 'numpy', 'numba', 'rich', 'typer') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_rooms_can_be_called_before_and_after_they_are_imported():
    code = """
import inspect, trainplan
first = inspect.signature(trainplan.predict)
import trainplan.predict.clock as clock, trainplan.cluster.parse, trainplan.profile.profile
assert clock.play and trainplan.predict.clock is clock
assert inspect.signature(trainplan.predict) == first == inspect.signature(trainplan.api.predict)
assert "H100" in str(trainplan.cluster("show", "8xH100-SXM"))
try:
    trainplan.nonsense
except AttributeError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "no attribute 'nonsense'" in ran.stdout


# -- answers ----------------------------------------------------------------------------------------------------------


def test_predict_json_has_what_was_promised(saved):
    data = json.loads(call("predict", saved, "--cluster", "4xTitanRTX", "--batch", 16, "--plan", "ddp", "--json"))
    assert data.keys() >= PROMISED
    assert data["plan"].startswith("dp=4")
    assert data["error"].keys() >= {"median", "worst", "runs"}
    assert sum(data["breakdown"].values()) == data["peak_bytes"]
    assert data["samples_per_s"] == pytest.approx(16 / data["step_s"])


def test_predict_in_python_is_the_same(saved):
    told = json.loads(call("predict", saved, "--cluster", "4xTitanRTX", "--batch", 16, "--plan", "pp=2", "--json"))
    answer = trainplan.predict(model(samples_per_epoch=6400), "pp=2", "4xTitanRTX", batch=16)
    assert answer.to_json() == told
    assert "stages" in answer.prediction.to_json()["choices"]


def test_what_ifs_change_the_answer(saved):
    there = ("--cluster", "4xTitanRTX", "--batch", 16, "--plan", "dp=4", "--json")
    usual = json.loads(call("predict", saved, *there))
    slow = json.loads(call("predict", saved, *there, "--set", "link=1GB/s"))
    tight = json.loads(call("predict", saved, *there, "--set", "memory=1GiB", "--set", "latency=1ms"))
    assert slow["step_s"] > usual["step_s"]
    assert usual["fits"]
    assert not tight["fits"]
    asked = json.loads(call("predict", saved, *there[:-3], "--plan", "dp=4 memory=1GiB", "--json"))
    assert not asked["fits"]


def test_predict_for_people(saved, tmp_path):
    path = tmp_path / "plan.json.gz"
    text = call("predict", saved, "--cluster", "4xTitanRTX", "--plan", "gpipe", "--trace", path)
    for word in ("model ", "cluster ", "NVLink", "step ", "epoch ", "memory   fits", "bubble", "MFU = ", "error "):
        assert word in text
    assert path.stat().st_size > 100


def test_recommend_for_people(saved):
    text = call("recommend", saved, "--cluster", "4xTitanRTX", "--batch", 16, "--memory", "660MiB", "--top", 3)
    places = [
        text.index(word)
        for word in (
            "model    synthetic: 33.6 M parameters in 8 blocks", "cluster  4xTitanRTX", "plans bounded",
            "step ms", "why", "does not fit", "MFU = 3 × forward", "error    ", "next     trainplan run",
        )
    ]  # fmt: skip
    assert places == sorted(places)
    assert "; try " in text
    assert len(re.findall(r"^ +\d  ", text, re.MULTILINE)) == 6  # three rows, three reasons


def test_recommend_json(saved):
    data = json.loads(call("recommend", saved, "--cluster", "4xTitanRTX", "--batch", 16, "--json"))
    assert [plan["step_s"] for plan in data["plans"]] == sorted(plan["step_s"] for plan in data["plans"])
    assert all(plan.keys() >= PROMISED | {"why"} for plan in data["plans"])
    assert data["rejected"] == []
    assert data["considered"] == data["simulated"] + data["pruned"]


def test_the_next_command_can_be_typed(saved):
    import shlex

    data = json.loads(call("recommend", saved, "--cluster", "4xTitanRTX", "--batch", 16, "--json"))
    explain = next(line for line in data["next"] if line.startswith("trainplan explain"))
    assert "where a step goes" in call(*shlex.split(explain)[1:])


def test_nothing_fits_is_said(saved):
    text = call("recommend", saved, "--cluster", "2xTitanRTX", "--memory", "510MiB")
    assert "nothing fits" in text
    assert "does not fit" in text


def test_timelines_predicted_and_saved(saved, tmp_path):
    there = ("--cluster", "4xTitanRTX", "--batch", 16)
    drawn = call("timeline", saved, "--plan", "pp=2 micro=4", *there, "--width", 60)
    assert "rank 1" in drawn
    plan = trainplan.predict(saved, "pp=2 micro=4", "4xTitanRTX", batch=16, trace=str(tmp_path / "t.json")).prediction
    line = plan.timeline()
    path = tmp_path / "timeline.json"
    Timeline("measured", line.world, line.steps, line.events, line.title).save(path)
    assert "rank 1" in call("timeline", path)
    both = call("timeline", saved, "--plan", "pp=2 micro=4", *there, "--measured", path, "--trace", tmp_path / "x.gz")
    assert "error 0.0 %" in both
    data = json.loads(call("timeline", saved, "--plan", "pp=2 micro=4", *there, "--measured", path, "--json"))
    assert data["joined"]["total"]["error"] == pytest.approx(0, abs=1e-9)


def test_cluster_shown_and_saved(tmp_path):
    path = tmp_path / "cluster.json"
    text = call("cluster", "show", "2x8xH100-SXM", "--set", "network=eth100", "-o", path)
    assert "InfiniBand" not in text.split("changed:")[0].split("network")[1].split("\n")[0]
    assert "saved to" in text
    assert json.loads(call("cluster", "show", path, "--json"))["nodes"][0]["devices"][0]["name"] == "H100-SXM"


def test_systems_table_and_json():
    rows = json.loads(call("systems", "--json"))
    assert len(rows) > 60
    by_key = {row["key"]: row for row in rows}
    assert by_key["gpipe"].keys() >= {"group", "key", "name", "needs", "has", "tests"}
    assert set(by_key["gpipe"]["tests"]) == set(by_key["gpipe"]["has"])
    assert "S" in by_key["gpipe"]["has"]
    text = call("systems", "gpipe", "ddp")
    assert "GPipe" in text
    assert "of 2 have all they need" in text


def test_version_and_help():
    assert call("--version").startswith("trainplan ")
    for name in trainplan.COMMANDS:
        assert "--json" in call(name, "--help")


def test_a_saved_profile_needs_no_torch(saved):
    code = f"""
import sys
from trainplan import cli
sys.argv = ["trainplan", "recommend", {saved!r}, "--cluster", "2x4xTitanRTX"]
try:
    cli.main()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "next     trainplan run" in ran.stdout


# -- what is refused --------------------------------------------------------------------------------------------------


def test_refusals_go_to_stderr_with_code_2_and_no_traceback(saved):
    ran = console("predict", saved, "--cluster", "4xTitanRTX", "--plan", "dp=8")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.strip() == ("PlanError: plan 'dp=8': it needs 8 × 1 = 8 devices, and there are 4. Try dp=4 pp=1.")


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xA100"], InputError, "A100-40, A100-80"),
        (["predict", "SAVED", "--plan", "dpp=2", "--cluster", "4xTitanRTX"], PlanError, "no choice named 'dpp'"),
        (["predict", "SAVED", "--plan", "ddq", "--cluster", "4xTitanRTX"], PlanError, "Try ddp"),
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xT4"], PlanError, "a profile made on TitanRTX"),
        (["predict", "SAVED", "--plan", "tp=2", "--cluster", "4xT4"], PlanError, "a profile made on TitanRTX"),
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xTitanRTX", "--batch", "1"], PlanError, "Try dp=1"),
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xTitanRTX", "--batch", "0"], PlanError, "at least one"),
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xTitanRTX", "--set", "link"], InputError, "KEY=VALUE"),
        (["predict", "SAVED", "--plan", "dp=2", "--cluster", "4xTitanRTX", "--set", "lnk=1"], InputError, "link"),
        (["predict", "none.json", "--plan", "dp=2", "--cluster", "4xTitanRTX"], InputError, "cannot be read"),
        (["recommend", "SAVED", "--cluster", "4xTitanRTX", "--memory", "lots"], InputError, "12GiB"),
        (["recommend", "SAVED", "--cluster", "4xTitanRTX", "--run"], RunError, "this machine has none"),
        (["run", "SAVED", "--plan", "dp=2", "--cluster", "4xTitanRTX", "--steps", "0"], PlanError, "at least one step"),
        (["cluster", "4xTitanRTX"], InputError, "cluster show 4xTitanRTX"),
        (["cluster", "frob"], InputError, "Try cluster show, or cluster probe."),
        (["cluster", "probe", "4xTitanRTX"], InputError, "only this machine"),
        (["systems", "gpip"], InputError, "Try gpipe"),
        (["systems", "foo"], InputError, "Try trainplan systems, which lists them all"),
        (["timeline", "SAVED"], InputError, "it is a trainplan profile, and a timeline was expected"),
    ],
)
def test_refusals_say_why_and_what_works(words, kind, message, saved):
    with pytest.raises(TrainplanError) as error:
        call(*(saved if word == "SAVED" else word for word in words))
    assert type(error.value) is kind
    assert message in str(error.value)


def test_broken_and_foreign_files(tmp_path):
    broken, foreign = tmp_path / "broken.json", tmp_path / "foreign.json"
    broken.write_text('{"trainplan": "profile", ')
    foreign.write_text('{"a": 1}')
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"trainplan": "profile", "format": 1, "data": {"workload": 3}}')
    with pytest.raises(InputError, match=r"profile .*damaged\.json"):
        call("predict", damaged, "--plan", "single", "--cluster", "1xT4")
    for path, message in ((broken, "broken JSON at line 1"), (foreign, "not a trainplan profile")):
        with pytest.raises(InputError, match=message):
            call("predict", path, "--plan", "single", "--cluster", "1xT4")


def test_profile_does_not_offer_profiles():
    assert "profile.json" in call("predict", "--help")
    assert "profile.json" not in call("profile", "--help").split("Options")[0]


def test_a_suggested_system_is_built():
    from trainplan.errors import nearest
    from trainplan.plan.systems import SYSTEMS
    from trainplan.report.systems import systems

    unbuilt = {row.key for row in SYSTEMS.values() if not row.choices}
    for key in sorted(unbuilt)[:40]:
        assert nearest(f"{key}x", SYSTEMS)  # which may well be the one that is not there
        with pytest.raises(InputError) as error:
            systems([f"{key}x"])
        assert not unbuilt & set(error.value.instead.split(", "))


# -- runs that are refused, or short ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "/nonexistent"], "it is not there"),
        (["--data", "nosuch"], "not a kind of data"),
        (["--data", "folder:/nope"], "no such folder"),
        (["--data", "memory", "--samples", "3"], "it has 3 samples, and a batch has"),
        (["--samples", "-4"], "--samples -4"),
        (["--save-every", "-1"], "--save-every -1"),
        (["--max-restarts", "-1"], "-1 restarts"),
        (["--nnodes", "two"], "--nnodes two"),
        (["--out", "FILE"], "is a file, and a run needs a folder"),
        (["--out", "FILE/below"], "is a file, and a run needs a folder"),
        (["--out", "FILE", "--dry-run"], "is a file, and a run needs a folder"),
        (["--data", "nosuch", "--dry-run"], "not a kind of data"),
    ],
)
def test_what_is_known_to_fail_is_refused_before_anything_is_started(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("started"))
    monkeypatch.setattr("tempfile.mkdtemp", lambda *a, **k: pytest.fail("a folder was made"))
    monkeypatch.chdir(tmp_path)
    profile, file = tmp_path / "profile.json", tmp_path / "file"
    file.write_text("mine")
    dataclasses.replace(model(device="cpu"), workload=GPT).save(profile)
    words = [word.replace("FILE", str(file)) for word in words]
    with pytest.raises(TrainplanError, match=message):
        call("run", profile, "--plan", "dp=2", "--cluster", "2xcpu", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "profile.json"]
    assert file.read_text() == "mine"


def ran(seconds):
    from trainplan.report.ran import Ran

    there = model(device="cpu")
    p = trainplan.predict(there, "dp=2", "2xcpu").prediction
    return Ran(p, tuple(seconds), (3.0, 2.0), (5 * 2**30, 7 * 2**30), "out", 0.0, warm_up=2)


def test_steps_of_the_warm_up_are_no_measurement():
    short = ran([])
    assert (short.step_s, short.error, short.corrected_error) == (None, None, None)
    assert "measured not known: the first 2 steps warm up" in str(short)
    assert "--steps 3" in str(short)
    assert "error" not in str(short)
    assert json.loads(json.dumps(short.to_json()))["error"] is None
    assert "(one step), error" in str(ran([1.0]))
    assert "on the slowest rank (median of 2 steps), error" in str(ran([1.0, 1.0]))


def test_memory_of_the_fullest_rank_is_shown_beside_what_was_predicted():
    done = ran([1.0])
    rank = done.prediction.peak.rank
    measured = done.peak_bytes[rank]
    assert done.to_json()["memory"] == {
        "rank": rank, "predicted_bytes": done.prediction.peak_bytes, "measured_bytes": measured,
    }  # fmt: skip
    assert re.search(rf"peak memory of rank {rank} .*{measured / 2**30:.2f} GiB", str(done))
    assert "resident memory of the process" in str(done)
    there = dataclasses.replace(done.prediction, device="T4", peak_bytes=done.prediction.peak.bytes + 2**30)
    on_gpu = dataclasses.replace(done, prediction=there)
    assert on_gpu.memory[1] == there.peak.bytes  # torch counts what it allocates
    assert "driver and libraries take 1.00 GiB more" in str(on_gpu)


def test_timelines_of_two_plans_are_not_joined(saved, tmp_path):
    path = tmp_path / "timeline.json"
    trainplan.timeline(saved, "dp=2", "2xTitanRTX", batch=16).timelines[0].save(path)
    with pytest.raises(InputError, match=r"one is of the plan 'pp=2.*the other of 'dp=2.*Try --plan 'dp=2"):
        call("timeline", saved, "--plan", "pp=2", "--cluster", "2xTitanRTX", "--batch", 16, "--measured", path)


def test_a_dry_run_only_writes_the_job(tmp_path):
    profile = dataclasses.replace(model(device="cpu"), workload=GPT)
    profile.save(tmp_path / "profile.json")
    text = call(
        "run", tmp_path / "profile.json", "--plan", "dp=2", "--cluster", "2xcpu", "--out", tmp_path / "o", "--dry-run"
    )
    assert (tmp_path / "o" / "job.json").is_file()
    assert "torchrun --standalone --nproc-per-node 2 -m trainplan.run" in text


def test_a_plan_of_another_model_is_refused(saved):
    from trainplan.plan.plan import plan

    with pytest.raises(PlanError, match="made for 5 blocks, and the model has 8"):
        trainplan.predict(saved, plan(dp=2, blocks=5), cluster="4xTitanRTX")


def test_usage_errors_have_code_2():
    ran = console("predict")
    assert ran.returncode == 2
    assert "Missing argument" in ran.stderr
    assert isinstance(cli.app, typer.Typer)


def test_a_profile_of_this_machine_needs_no_probe_of_its_links(monkeypatch):
    monkeypatch.setattr("trainplan.cluster.probe.probe.probe", lambda *a, **k: pytest.fail("probed"))
    asked = []
    monkeypatch.setattr(
        "trainplan.profile.cache.measured", lambda workload, **fields: asked.append(fields) or model(device="cpu")
    )
    call("profile", GPT, "--cluster", "local:cpu")
    assert [fields["device"] for fields in asked] == ["cpu"]


# -- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_start")
def test_profile_recommend_and_run(tmp_path, monkeypatch):
    """A real model, measured; plans for two cores; the best one and one core, run; predicted beside measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "profile.json"
    text = call("profile", GPT, "--cluster", "2xcpu", "-o", path)
    assert "lm_head" in text
    assert "the sum of the blocks is" in text
    data = json.loads(call("recommend", path, "--cluster", "2xcpu", "--run", "--steps", 4, "--json"))
    assert {run["predicted"]["choices"]["dp"] * run["predicted"]["choices"]["pp"] for run in data["runs"]} == {1, 2}
    for run in data["runs"]:
        assert len(run["losses"]) == 4
        assert run["step_s"] > 0
        assert run["joined"]["only_predicted"] == run["joined"]["only_measured"] == []
        kinds = {row["name"] for row in run["joined"]["kinds"]}
        assert kinds >= {"F", "B", "STEP"}
        whole = sum(row["predicted_s"] for row in run["joined"]["kinds"])
        assert whole == pytest.approx(run["joined"]["total"]["predicted_s"])
    # A second question is answered from the cache: nothing is measured again.
    monkeypatch.setattr("trainplan.profile.cache.measure", lambda *a, **k: pytest.fail("measured again"))
    assert "single" in call("recommend", GPT, "--cluster", "2xcpu")
