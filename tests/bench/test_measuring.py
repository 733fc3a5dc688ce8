"""What measures our engine and our predictions: torch's own means train as ours do, rows are whole, limits hold."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import campaign, engine, exchanges
from torch import Tensor, nn
from torch.nn import functional as F

from tests.synthetic import chain
from tests.test_docs import loaded
from trainplan import files
from trainplan.bench import suites
from trainplan.bench.accuracy import Compared
from trainplan.bench.by_hand import BY_HAND, Training, by_hand
from trainplan.bench.limit import UNFINISHED, Limit
from trainplan.bench.pool import pool
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.engine.measurement import RunResult
from trainplan.errors import RunError
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve
from trainplan.units import MIB
from trainplan.workload.load import load

# -- torch's own means ------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(torch.float64)


def trained(rank: int, world: int, name: str) -> dict[str, Tensor]:
    """Two steps on this rank's half of a batch; the weights afterwards, whole."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (6, 3))
    part, model = slice(rank * 2, rank * 2 + 2), layers()
    training = Training(model, F.mse_loss, x[part], y[part], torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    step = by_hand(name, training)
    step()
    step()
    dist.barrier()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_we_race_against_trains_the_whole_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (6, 3))
    alone = layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
    for weights in pool(2).run(trained, name):
        for own, expected in alone.named_parameters():
            torch.testing.assert_close(weights[own], expected.detach(), rtol=1e-9, atol=0)


# -- predicted against measured ---------------------------------------------------------------------------------------

TINY = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure(load(TINY), samples=[2, 4], repeats=1, verify=False)


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("dp=2 exchange=p3", {"NEGOTIATE", "REDUCE_GRAD", "F", "B", "STEP"}),
        ("dp=2 zero=3", {"GATHER_F", "SCATTER_GRAD", "F", "B", "STEP"}),
        ("dp=2 exchange=ps-asp servers=1", {"SEND_G", "RECV_G", "SEND_W", "RECV_W", "F", "B", "STEP"}),
    ],
)
def test_rows_of_exchanges(asked: str, kinds: set[str], profile: Profile) -> None:
    plan = Compared(TINY, asked, profile, cluster("3xcpu"), 4)
    plan.run(3)
    row = plan.row()
    assert kinds <= set(row.by_kind)
    assert all(measured > 0 for kind, (_, measured) in row.by_kind.items() if kind in ("F", "B"))
    assert row.raw_error == pytest.approx(row.predicted_s / row.measured_s - 1)
    assert row.asked == asked
    assert len(row.rounds) == 1
    # As long as a worker computes, at the least; of asynchronous ones a step is as many updates as there are workers.
    ahead = sum(row.by_kind[kind][1] for kind in ("F", "B"))
    assert 0.5 * ahead < row.measured_s < 5.0


@pytest.mark.parametrize("rated", [False, True])
def test_a_link_does_not_slow_down_with_processors(rated: bool, profile: Profile) -> None:
    """Everything takes three times as long; of a step across a link with a rate of its own, only what is computed."""
    slow = with_overrides(cluster("2xcpu"), {"link": "1MB/s"})
    plan = Compared(TINY, "dp=2", profile, slow, 4, rated_link=rated)
    alone = predict(plan.plan, profile, slow, 4)
    assert alone.exposed_comm_s > 0.2 * alone.step_s
    seconds = 3 * alone.step_s - (2 * alone.exposed_comm_s if rated else 0.0)
    reference = 3 * profile.provenance.reference_s
    same = replace(plan.predicted.timeline(), source="measured")
    plan.runs.append(RunResult("", [seconds], [0.0], [0], [reference], same, 0))
    row = plan.row()
    assert row.drift == pytest.approx(3)
    assert row.error == pytest.approx(0, abs=0.05 if rated else 1e-9)
    assert row.raw_error < -0.05


@pytest.mark.gpu
@pytest.mark.parametrize(
    "asked", ["dp=2 exchange=horovod", "dp=2 exchange=p3", "dp=2 zero=3", "dp=2 exchange=ps-asp servers=1"]
)
def test_rows_of_exchanges_on_a_gpu(asked: str) -> None:
    """All processes on one device, messages through the host."""
    here = replace(cluster("3xH200"), backend="gloo-staged")
    plan = Compared(TINY, asked, measure(load(TINY), device="cuda", samples=[2, 4], repeats=1, verify=False), here, 4)
    plan.run(3)
    row = plan.row()
    assert row.measured_s > 0
    assert {"F", "B", "STEP"} <= set(row.by_kind)


@pytest.mark.gpu
@pytest.mark.parametrize("system", engine.REPLICAS)
def test_races_on_a_gpu(system: str) -> None:
    """Ours runs; torch's own does, or fails in its own place."""
    try:
        row = engine.compared(system, 2, 2, "cuda")
    except RunError as error:
        if system not in ("zero-2", "zero-3") or not engine.refused_by_torch(error, "cuda"):
            raise
        pytest.skip(f"FSDP2 does not run here: {str(error).strip().splitlines()[-1]}")
    assert row["ours_s"] > 0


def test_exchanges_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = exchanges.measured(2, (4096, 8004), 3, cluster("2xcpu"))
    assert {row.exchange for row in rows} == set(exchanges.names(2))
    assert {row.bytes for row in rows} == {4096, 8000}
    assert all(row.measured_s > 0 and row.predicted_s == row.closed_s > 0 for row in rows)  # nothing was probed
    about = {"machine": "this one", "torch": "2", "made": "today", "command": "python"}
    files.write(tmp_path / "alone.json", "exchanges", {**about, "rows": files.to_json(rows)})
    tables = loaded("tables")
    monkeypatch.setattr(tables, "DATA", tmp_path)
    shown = tables.rewritten("<!-- exchanges alone --><!-- /exchanges --> <!-- engine never --><!-- /engine -->")
    assert "| exchange | ranks | 4 KiB | 8 KiB |" in shown
    assert f"| ring | 2 | {1e3 * next(r.measured_s for r in rows if r.exchange == 'ring'):.3f} (" in shown
    assert "<!-- engine never -->\nNot measured yet.\n<!-- /engine -->" in shown


# -- limits, and going on ---------------------------------------------------------------------------------------------


def test_a_limit_is_a_code() -> None:
    enough, none = Limit(3600), Limit(0)
    assert (enough.over(), none.over()) == (False, True)
    enough.leave()
    with pytest.raises(SystemExit) as left:
        none.leave()
    assert left.value.code == UNFINISHED


HALF = """
import sys, pathlib
file = pathlib.Path(sys.argv[2])
file.write_text((file.read_text() if file.exists() else "") + "x")
sys.exit(75 if len(file.read_text()) < 2 else 0)
"""


def test_a_campaign_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.py").write_text(HALF)
    (tmp_path / "bad.py").write_text("raise SystemExit('no')")
    found = [
        campaign.Part("a", "half", (str(tmp_path / "half.py"), "--out", "{out}/a.txt"), 20),
        campaign.Part("b", "bad", (str(tmp_path / "bad.py"),), 20),
        campaign.Part("c", "elsewhere", (str(tmp_path / "bad.py"),), 20, "gpu"),
    ]
    monkeypatch.setattr(campaign, "parts", lambda quick: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call(*more: str) -> tuple[dict[str, str], str]:
        monkeypatch.setattr(sys, "argv", ["campaign.py", "--out", str(tmp_path / "c.zip"), "--minutes", "3", *more])
        campaign.main()
        archive = campaign.Archive(tmp_path / "c.zip", None)
        states = {key: str(entry["state"]) for key, entry in archive.log().items()}
        written = (archive.folder / "a.txt").read_text()
        archive.close()
        return states, written

    assert call() == ({"a": "unfinished", "b": "failed"}, "x")
    assert "c  elsewhere: left out, torch" in capsys.readouterr().out
    assert call() == ({"a": "done", "b": "failed"}, "xx")
    assert call() == ({"a": "done", "b": "failed"}, "xx")
    assert "bad" not in capsys.readouterr().out.rpartition("half")[2]  # what failed is not tried again by itself
    with pytest.raises(SystemExit):
        call("--parts", "z")


def test_every_exchange_that_is_to_be_measured_is_a_plan() -> None:
    """Also of a model with few blocks: ZeRO-R's rows say how many of them offload."""
    profile = chain(8, forward=1e-3, backward=2e-3, weights=4 * MIB)
    found = [resolve(parse(line), profile, cluster("4xcpu"), 16) for line in suites.exchanges(4)]
    assert len(set(found)) == len(found)
    assert any(plan.away for plan in found)
