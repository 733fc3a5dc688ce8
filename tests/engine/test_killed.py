"""Asynchronous servers under our own launcher: a worker that dies takes nobody with it, and nothing applied is lost."""

import os
import random
from pathlib import Path

import pytest
import torch

from trainplan.engine.asynchronous import Applied, histogram, load
from trainplan.engine.compare import compare, replayed
from trainplan.engine.independent import run_each
from trainplan.engine.job import Job
from trainplan.engine.launch import environment, gather, start
from trainplan.engine.measurement import RunResult
from trainplan.engine.worker import in_double
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import to_json
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
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


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))], ids=lambda s: f"ps-asp-{s}"
)
@pytest.mark.system("ps-asp", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_worker_is_killed(seed: int, tmp_path: Path) -> None:
    """At an operation drawn by lot: the run ends, the others have done all their steps, and the record replays to the
    weights: every push that was applied is in them, and no half of one."""
    draw = random.Random(seed)
    victim, at = draw.randrange(ASP.dp), draw.randint(1, OPERATIONS)
    result = ran(ASP, tmp_path, VICTIM=str(victim), AT=str(at))
    assert result.lost == [victim]
    (record,) = replays(ASP, tmp_path)
    pushed = {worker: [e.number for e in record if e.worker == worker] for worker in range(ASP.dp)}
    assert all(pushed[worker] == list(range(STEPS)) for worker in range(ASP.dp) if worker != victim)
    assert pushed[victim] == list(range(len(pushed[victim])))
    assert len(result.losses) == STEPS
    assert sum(histogram(record).values()) == sum(map(len, pushed.values()))


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
