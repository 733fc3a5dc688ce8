"""Compiled blocks on real processes train as eager ones do, up to rounding in float32."""

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

from trainplan.bench.pool import pool
from trainplan.engine.launch import run
from trainplan.engine.trainer import build
from trainplan.plan.plan import Plan, plan
from trainplan.workload.load import load

MODEL = f"{Path(__file__).parent / 'user_model.py'}:curved"
PIPELINE = plan(pp=2, micro=2, schedule="1f1b", stages=(1,), blocks=2)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def train(rank: int, world: int, chosen: Plan, compiled: bool):
    config.compile_threads = 1  # no processes of the compiler's own, which would outlive this
    before = counters["stats"]["unique_graphs"]
    workload = load(MODEL)
    trainer = build(chosen, workload, seed=3, compiled=compiled)
    losses = [trainer.step(workload.inputs(8, step)).loss for step in range(3)]
    weights = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    trainer.close()
    return losses, weights, counters["stats"]["unique_graphs"] - before


def test_a_compiled_pipeline_is_the_eager_one() -> None:
    eager, compiled = (pool(2).run(train, PIPELINE, how) for how in (False, True))
    assert eager[1][0] == pytest.approx(compiled[1][0], rel=1e-5)
    for (_, want, none), (_, weights, graphs) in zip(eager, compiled, strict=True):
        assert none == 0 < graphs
        for name, weight in weights.items():
            torch.testing.assert_close(weight, want[name], **CLOSE)


@pytest.mark.slow
def test_a_compiled_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    result = run(MODEL, PIPELINE, steps=3, batch=8, out=tmp_path / "out", show=False, compiled=True)
    assert list((tmp_path / "cache").rglob("*.so"))
    assert result.losses == pytest.approx(run(MODEL, PIPELINE, steps=3, batch=8, show=False).losses, rel=1e-5)
