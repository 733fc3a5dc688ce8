"""Asynchronous servers under our own launcher: a worker that dies takes nobody with it, and nothing applied is lost."""

import json
import os
import platform
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.killed import LAST_WORDS
from trainplan.engine.asynchronous import Applied, histogram, load
from trainplan.engine.compare import compare, replayed
from trainplan.engine.independent import run_each
from trainplan.engine.job import Job
from trainplan.engine.launch import environment, gather, start
from trainplan.engine.measurement import RunResult
from trainplan.engine.worker import in_double
from trainplan.engine.world import TIMEOUT
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import brief, to_json
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import describe
from trainplan.workload.load import load as load_workload

MODEL = f"{Path(__file__).parent / 'user_model.py'}:build"
ROOT = Path(__file__).parents[2]
STEPS, BATCH = 5, 6
OPERATIONS = STEPS * (1 + 1 + 4 + 4)  # of a worker: forward, backward, four loads to the server, and four back
ASP = plan(dp=3, servers=1, exchange="ps-asp", blocks=4, bucket=200)
SSP = plan(dp=2, servers=1, exchange="ssp", bound=(1,), blocks=4, bucket=200)


def ran(chosen: Plan, folder: Path, **trouble: str) -> RunResult:
    job = Job(
        MODEL, to_json(chosen), BATCH, STEPS, str(folder), warm_up=STEPS, reference=False, keep_state=True, double=True
    )
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own["PYTHONPATH"]])
    log, module = folder / "ranks.log", "tests.engine.killed"
    return gather(job, chosen, run_each(job.save(), chosen, log, {**own, **trouble}, show=False, module=module))


def replays(chosen: Plan, folder: Path) -> list[list[Applied]]:
    """The weights that the servers of a run ended with are those that its record leads to."""
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
    return [load(folder / f"arrivals-{server}.json") for server in range(chosen.servers)]


# -- workers that are killed ----------------------------------------------------------------------------------------

SEEDS = 50
KEPT = ROOT / "benchmarks/data/kills.json"
COMMAND = f'pytest tests/engine/test_killed.py -k is_killed -m "slow or not slow" --kills {KEPT.relative_to(ROOT)}'


def drawn(seed: int) -> tuple[int, int]:
    """Who is killed, and before which of its operations."""
    draw = random.Random(seed)
    return draw.randrange(ASP.dp), draw.randint(1, OPERATIONS)


def keep(path: str | None, row: dict[str, Any]) -> None:
    """Put what became of a run into the file, beside those of other seeds."""
    if path is None:
        return
    file = Path(path)
    rows = [r for r in json.loads(file.read_text())["rows"] if r["seed"] != row["seed"]] if file.exists() else []
    about = {
        "machine": describe(torch.device("cpu")), "torch": torch.__version__, "python": platform.python_version(),
        "made": time.strftime("%Y-%m-%d", time.gmtime()), "command": COMMAND, "plan": brief(ASP), "steps": STEPS,
    }  # fmt: skip
    rows = sorted([*rows, row], key=lambda r: r["seed"])
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))], ids=lambda s: f"ps-asp-{s}"
)
@pytest.mark.system("ps-asp", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_worker_is_killed(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At an operation drawn by lot: the run ends, the others have done all their steps, the record has every push that
    the victim had an answer to, and replays to the weights: what was applied is in them, and no half of a push."""
    victim, at = drawn(seed)
    row: dict[str, Any] = {"seed": seed, "victim": victim, "at": at, "ended": False}
    began = time.monotonic()
    try:
        result = ran(ASP, tmp_path, VICTIM=str(victim), AT=str(at))
        row |= {"ended": True, "lost": result.lost, **json.loads((tmp_path / LAST_WORDS).read_text())}
        applied = [e for e in load(tmp_path / "arrivals-0.json") if e.worker >= 0]
        row |= {"applied": [sum(e.worker == worker for e in applied) for worker in range(ASP.dp)]}
        (record,) = replays(ASP, tmp_path)
        row |= {"found": sum(histogram(record).values())}  # updates that lead to the weights which are there
    finally:
        keep(request.config.getoption("--kills"), row | {"seconds": round(time.monotonic() - began, 1)})
    held(row)
    assert len(result.losses) == STEPS
    pushed = [[e.number for e in record if e.worker == worker] for worker in range(ASP.dp)]
    assert pushed == [list(range(count)) for count in row["applied"]]


def held(row: dict[str, Any]) -> None:
    """What became of a run is what should."""
    victim, at = drawn(row["seed"])
    assert (row["victim"], row["at"]) == (victim, at)
    assert row["ended"]
    assert row["lost"] == [victim]
    assert row["step"] == (at - 1) // (OPERATIONS // STEPS)
    assert row["found"] == sum(row["applied"])
    for worker, applied in enumerate(row["applied"]):
        if worker != victim:
            assert applied == STEPS
        else:  # what it had an answer to was applied; of what it never sent nothing can be
            assert row["answered"] <= applied <= row["step"] + 1


def test_fifty_workers_were_killed() -> None:
    """The record of all seeds, of which this suite runs one: none hung, and no update that was applied was lost."""
    kept = json.loads(KEPT.read_text())
    assert (kept["command"], kept["plan"], kept["steps"]) == (COMMAND, brief(ASP), STEPS)
    assert [row["seed"] for row in kept["rows"]] == list(range(SEEDS))
    for row in kept["rows"]:
        held(row)
        assert row["seconds"] < TIMEOUT.total_seconds()  # no rank waited until it was told to stop waiting
    kinds = {re.sub(r"[^A-Z_]", "", row["operation"]) for row in kept["rows"]}
    assert kinds == {"F", "B", "SEND_G", "RECV_W"}  # the lot fell on every kind
    partly = [row for row in kept["rows"] if row["applied"][row["victim"]] < row["step"] + 1]
    assert any("SEND_G" in row["operation"] for row in partly)  # some died with a push half sent


@pytest.mark.system("ssp", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_stalled_worker_blocks_the_others_exactly_at_the_bound_of_ssp(tmp_path: Path) -> None:
    """While worker 1 stands still before its second step, worker 0 is released once more than the bound says it leads
    by, and then only when worker 1 has pushed again."""
    ran(SSP, tmp_path, VICTIM="1", AT="11", STALL="1.5")
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
