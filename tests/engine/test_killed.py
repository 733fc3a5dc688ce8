"""Asynchronous servers under our own launcher: a worker that dies takes nobody with it, and nothing applied is lost."""

import json
import os
import platform
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trainplan
from tests.engine.asynchronous_job import by_the_rule
from tests.engine.killed import LAST_WORDS
from trainplan import files
from trainplan.cluster.parse import cluster
from trainplan.engine.asynchronous import GOODBYE, LOST, Applied, histogram, load
from trainplan.engine.compare import compare, replayed
from trainplan.engine.exactness import in_double
from trainplan.engine.independent import _Shown, _start, _Watch, run_each
from trainplan.engine.job import Job
from trainplan.engine.launch import environment, gather, start
from trainplan.engine.measurement import RunResult
from trainplan.engine.world import TIMEOUT
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import brief, to_json
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import describe
from trainplan.profile.measure import measure
from trainplan.profile.structure import structure
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.report.ran import Ran
from trainplan.workload.load import load as load_workload

MODEL = f"{Path(__file__).parent / 'user_model.py'}:build"
ROOT = Path(__file__).parents[2]
STEPS, BATCH = 5, 6
ASP = plan(dp=3, servers=1, exchange="ps-asp", blocks=4, bucket=200)
KILLED = {
    "ps-asp": ASP,
    "two-servers": replace(ASP, servers=2, split=4),
    "ssp": replace(ASP, servers=2, split=4, exchange="ssp", bound=(1,)),
}
SSP = plan(dp=2, servers=1, exchange="ssp", bound=(1,), blocks=4, bucket=200)


def ran(chosen: Plan, folder: Path, again: str = "", **trouble: str) -> RunResult:
    job = Job(
        MODEL, to_json(chosen), BATCH, STEPS, str(folder), warm_up=STEPS, reference=False, keep_state=True, double=True,
        again=again,
    )  # fmt: skip
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own["PYTHONPATH"]])
    log, module = folder / "ranks.log", "tests.engine.killed"
    return gather(job, chosen, run_each(job.save(), chosen, log, {**own, **trouble}, show=False, module=module))


def replays(chosen: Plan, folder: Path) -> list[list[Applied]]:
    """The weights that the servers of a run ended with are those that its record leads to, and whoever went on was
    released by the rule."""
    workload = in_double(load_workload(MODEL))
    skeleton = Skeleton(workload.build)
    skeleton.model.train()
    captured = capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")
    want = replayed(workload, captured, chosen, skeleton.materialise(None, 0), BATCH, 0, folder)
    for server in range(chosen.servers):
        there = torch.load(folder / f"rank-{chosen.workers + server}.pt", weights_only=False)["weights"]
        assert there.keys() == want.weights[server].keys()
        for name, weight in there.items():
            torch.testing.assert_close(weight, want.weights[server][name], rtol=1e-9, atol=1e-12)
    records = [load(folder / f"arrivals-{server}.json") for server in range(chosen.servers)]
    for record in records:
        by_the_rule(chosen, record)
    return records


# -- workers that are killed ----------------------------------------------------------------------------------------

SLOW = [pytest.mark.slow]
IDS = {"two-servers": "ps-asp-two-servers"}
SEEDS = {"ps-asp": 50, "two-servers": 4, "ssp": 2}
KEPT = ROOT / "benchmarks/data/kills.json"
COMMAND = f'pytest tests/engine/test_killed.py -k is_killed -m "slow or not slow" --kills {KEPT.relative_to(ROOT)}'


@cache
def operations(name: str) -> int:
    """That a worker does in a step: forward, backward (one, for all its pieces), what it sends to every server, and
    what comes back."""
    workload = in_double(load_workload(MODEL))
    captured = capture(workload.build().train(), workload.inputs(2, 0), workload.loss, device="cpu")
    program = lower(KILLED[name], structure(captured, workload, workload.inputs(2, 0)), BATCH, steps=1)
    kinds = [Kind(program.kind[op]) for op in program.lists.row(0)]
    return 1 + 1 + kinds.count(Kind.SEND_G) + kinds.count(Kind.RECV_W)


def drawn(name: str, seed: int) -> tuple[int, int]:
    """Who is killed, and before which of its operations."""
    draw = random.Random(seed)
    return draw.randrange(KILLED[name].dp), draw.randint(1, STEPS * operations(name))


PLANS = {name: brief(chosen) for name, chosen in KILLED.items()}


def keep(path: str | None, row: dict[str, Any]) -> None:
    """Put what became of a run into the file, beside those of other seeds."""
    if path is None:
        return
    file = Path(path)
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [r for r in kept if (r["of"], r["seed"]) != (row["of"], row["seed"])]
    about = {
        "machine": describe(torch.device("cpu")), "torch": torch.__version__, "python": platform.python_version(),
        "made": time.strftime("%Y-%m-%d", time.gmtime()), "command": COMMAND, "plans": PLANS, "steps": STEPS,
    }  # fmt: skip
    rows = sorted([*rows, row], key=lambda r: (list(KILLED).index(r["of"]), r["seed"]))
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(
            name, seed, id=f"{IDS.get(name, name)}-{seed}",
            marks=[pytest.mark.system(KILLED[name].exchange, "R"), *SLOW * bool(seed or name == "ssp")],
        )
        for name, seeds in SEEDS.items() for seed in range(seeds)
    ],
)  # fmt: skip
@pytest.mark.usefixtures("quick_start")
def test_a_worker_is_killed(name: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At an operation drawn by lot: the run ends, the others have done all their steps, the record has every push that
    the victim had an answer to, and replays to the weights: what was applied is in them, and no half of a push."""
    chosen, (victim, at) = KILLED[name], drawn(name, seed)
    row: dict[str, Any] = {"of": name, "seed": seed, "victim": victim, "at": at, "ended": False}
    began = time.monotonic()
    try:
        result = ran(chosen, tmp_path, VICTIM=str(victim), AT=str(at))
        row |= {"ended": True, "lost": result.lost, **json.loads((tmp_path / LAST_WORDS).read_text())}
        records = [load(tmp_path / f"arrivals-{server}.json") for server in range(chosen.servers)]
        row |= {"applied": [[sum(e.worker == w for e in own) for w in range(chosen.dp)] for own in records]}
        replays(chosen, tmp_path)
        row |= {"found": [sum(histogram(own).values()) for own in records]}  # that lead to the weights which are there
    finally:
        keep(request.config.getoption("--kills"), row | {"seconds": round(time.monotonic() - began, 1)})
    held(row)
    assert len(result.losses) == STEPS
    pushed = [[[e.number for e in own if e.worker == worker] for worker in range(chosen.dp)] for own in records]
    assert pushed == [[list(range(count)) for count in counts] for counts in row["applied"]]


def held(row: dict[str, Any]) -> None:
    """What became of a run is what should."""
    victim, at = drawn(row["of"], row["seed"])
    servers = KILLED[row["of"]].servers
    assert (row["victim"], row["at"]) == (victim, at)
    assert row["ended"]
    assert row["lost"] == [victim]
    assert row["step"] == (at - 1) // operations(row["of"])
    assert len(row["applied"]) == len(row["found"]) == servers
    assert row["found"] == [sum(counts) for counts in row["applied"]]
    assert max(counts[victim] for counts in row["applied"]) >= row["answered"]
    for counts in row["applied"]:
        for worker, applied in enumerate(counts):
            if worker != victim:
                assert applied == STEPS
            else:  # what it had an answer to was applied (by the first of several), and nothing it never sent
                assert row["answered"] - (servers > 1) <= applied <= row["step"] + 1


def test_fifty_workers_were_killed() -> None:
    """The record of all seeds, of which this suite runs two, the first with one server and with two: none hung, and no
    update that was applied was lost."""
    kept = json.loads(KEPT.read_text())
    assert (kept["command"], kept["plans"], kept["steps"]) == (COMMAND, PLANS, STEPS)
    assert [(row["of"], row["seed"]) for row in kept["rows"]] == [
        (n, s) for n, count in SEEDS.items() for s in range(count)
    ]
    for row in kept["rows"]:
        held(row)
        assert row["seconds"] < TIMEOUT.total_seconds()  # no rank waited until it was told to stop waiting
    kinds = {re.sub(r"[^A-Z_]", "", row["operation"]) for row in kept["rows"]}
    assert kinds == {"F", "B", "SEND_G", "RECV_W"}  # the lot fell on every kind
    partly = [row for row in kept["rows"] if min(c[row["victim"]] for c in row["applied"]) < row["step"] + 1]
    assert any("SEND_G" in row["operation"] for row in partly)  # some died with a push half sent


@pytest.mark.system("ssp", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_loss_under_ssp_is_repeated(tmp_path: Path) -> None:
    """Worker 1 dies in its second step. When servers repeat what they recorded, it is there, and left to itself at the
    same place: the others do not wait for it, and the weights are the same."""
    then, now = tmp_path / "then", tmp_path / "now"
    for folder in (then, now):
        folder.mkdir()
    assert ran(SSP, then, VICTIM="1", AT="12").lost == [1]
    assert ran(SSP, now, again=str(then), VICTIM="none").lost == [1]
    (first,), (second,) = replays(SSP, then), [load(now / "arrivals-0.json")]
    assert [(e.whose, e.number, e.released) for e in second] == [(e.whose, e.number, e.released) for e in first]
    assert next((e.left, e.number) for e in first if e.worker < 0) == (1, LOST)
    weights = [torch.load(folder / "rank-2.pt", weights_only=False)["weights"] for folder in (then, now)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.system("ssp", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_stalled_worker_blocks_the_others_exactly_at_the_bound_of_ssp(tmp_path: Path) -> None:
    """While worker 1 stands still before its second step, worker 0 is released once more than the bound says it leads
    by, and then only when worker 1 has pushed again."""
    ran(SSP, tmp_path, VICTIM="1", AT="11", STALL="1.5", UNTIL="0:2")
    (record,) = replays(SSP, tmp_path)
    second = next(place for place, e in enumerate(record) if (e.worker, e.number) == (1, 1))
    before = record[:second]
    ahead = [e for e in before if e.worker == 0]
    assert [e.number for e in ahead] == [0, 1, 2]  # worker 1 has pushed once: a lead of 1, and one more step
    assert ahead[-1].released == ()  # so it waits
    assert 0 in record[second].released  # until worker 1 pushes
    assert record[second].moment - ahead[-1].moment > 0.5


@pytest.mark.system("ps-asp", "R")
@pytest.mark.usefixtures("quick_start")
def test_compare_with_what_ps_asp_recorded() -> None:
    found = compare(MODEL, plan(dp=2, servers=2, split=4, exchange="ps-asp", blocks=4, bucket=200), steps=3, batch=6)
    assert found.same, found.differences
    assert {d.what for d in found.differences} >= {"loss", "weights"}


def test_what_our_own_launcher_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"on one machine, and --nnodes is 3.*exchange=ps-bsp"):
        start(MODEL, SSP, steps=1, batch=6, out=tmp_path, nnodes="3", endpoint="here:1")
    with pytest.raises(RunError, match=r"not started again.*leaving --max-restarts out"):
        start(MODEL, SSP, steps=1, batch=6, out=tmp_path, max_restarts=1)


# -- what `run` says of it ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_start")
def test_what_run_answers_when_its_first_worker_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another worker tells how training goes on; the answer names who was lost, and is of those that are left."""
    monkeypatch.setattr("trainplan.engine.launch.run_each", partial(run_each, module="tests.engine.killed"))
    for name, value in {"PYTHONPATH": str(ROOT), "VICTIM": "0", "AT": str(2 * operations("ps-asp"))}.items():
        monkeypatch.setenv(name, value)
    profile = measure(load_workload(MODEL), samples=[2], repeats=1, seconds=0.1)
    answer = trainplan.run(MODEL, ASP, cluster("4xcpu"), BATCH, steps=20, profile=profile, out=str(tmp_path))
    assert isinstance(answer, Ran)
    assert answer.lost == (0,)
    assert [number is None for number in answer.peak_bytes] == [True, False, False, False]
    assert answer.memory is not None
    assert answer.memory[0] != 0
    assert answer.joined is not None
    assert answer.joined.unmeasured == (0,)
    assert not any(row.rank == 0 for row in answer.joined.ops)
    data = json.loads(json.dumps(answer.to_json()))
    assert (data["lost"], data["peak_bytes"][0], data["joined"]["unmeasured"]) == ([0], None, [0])
    assert "worker 0 was lost, and the others went on without it" in str(answer)
    assert "without rank 0, of which nothing was measured" in str(answer)
    said = capsys.readouterr().out
    assert "worker 0 was lost: it was killed (SIGKILL)" in said
    assert re.search(r"step 20/20 .* on rank 1 ", said)


def killing(rank: int, how: signal.Signals) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts ranks, one of which is sent a signal at once."""

    def start(job: Path, which: int, *arguments: Any) -> subprocess.Popen[bytes]:
        process = _start(job, which, *arguments)
        if which == rank:
            process.send_signal(how)
        return process

    return start


@pytest.mark.usefixtures("quick_start")
def test_a_rank_that_dies_while_all_join_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainplan.engine.independent._start", killing(1, signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 was killed \(SIGKILL\), before all ranks had met"):
        ran(ASP, tmp_path, VICTIM="none")
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(("victim", "why"), [("2", "without a server"), ("0", "no worker is left")])
def test_who_was_killed_is_named_when_nobody_can_go_on(victim: str, why: str, tmp_path: Path) -> None:
    """A server; or the only worker."""
    chosen = SSP if victim == "2" else plan(servers=1, exchange="ps-asp", blocks=4, bucket=200)
    with pytest.raises(RunError, match=rf"rank {victim} was killed \(SIGKILL\), and .*{why}.*rank-{victim}\.log"):
        ran(chosen, tmp_path, VICTIM=victim, AT="7")


def test_a_worker_that_servers_gave_up_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands still when all others are through. One that said goodbye may take its time to write what it has."""
    monkeypatch.setattr("trainplan.engine.independent._SOON", 0.2)
    record = [Applied(-1, GOODBYE, 0.0, 0, (), left=0), Applied(-1, LOST, 0.0, 0, (), left=1)]
    files.write(tmp_path / "arrivals-0.json", "arrivals", [files.to_json(entry) for entry in record])
    ranks = [subprocess.Popen(["sleep", seconds], start_new_session=True) for seconds in ("1", "60", "0")]
    watch = _Watch(ranks, SSP, tmp_path / "ranks.log", lambda rank: True, _Shown(tmp_path, False))
    began = time.monotonic()
    assert watch.through() == [1]
    assert time.monotonic() - began < 20
    assert "worker 1 is ended: its servers have given it up" in capsys.readouterr().out
    assert [process.returncode for process in ranks] == [0, -signal.SIGKILL, 0]


@pytest.mark.usefixtures("quick_start")
def test_whoever_waits_under_ssp_outlives_a_worker_that_stands_still(tmp_path: Path) -> None:
    """Worker 1 stops before its second step until worker 0 begins its last, which it may only when the server has
    given up worker 1: worker 0 has waited for that as long as the server, and goes on."""
    result = ran(SSP, tmp_path, VICTIM="1", AT="11", STALL="0", UNTIL="0:4", PATIENCE="8")
    assert result.lost == [1]
    assert len(result.losses) == STEPS
