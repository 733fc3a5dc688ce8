"""A rank fails, torchrun starts all of them again, and training goes on from the last checkpoint."""

from pathlib import Path

import pytest

from tests.engine.test_launch import MODEL, PIPELINE
from trainplan.engine.feed import batches
from trainplan.engine.job import Job
from trainplan.engine.launch import run, torchrun
from trainplan.engine.trainer import build
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import to_json
from trainplan.workload.load import load

STEPS = 5
DATA = {"data": "memory", "samples": 24}  # three steps an epoch: what is resumed lies in the second


def undisturbed(chosen: Plan, **fields) -> list[float]:
    """The losses of a run in which nothing goes wrong, in this process."""
    workload = load(MODEL)
    trainer = build(chosen, workload, seed=3)
    job = Job(MODEL, to_json(chosen), 8, STEPS, "", seed=3, **fields)
    return [trainer.step(batch, whole).loss for batch, whole in batches(trainer, job, STEPS)]


@pytest.mark.usefixtures("quick_start")
def test_a_run_is_started_again_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt fails before there is a checkpoint, the second after it."""
    monkeypatch.setenv("TROUBLE", f"twice:{tmp_path}")
    out = tmp_path / "out"
    (out / "checkpoint-9").mkdir(parents=True)  # of another run, which used the same folder
    (out / "checkpoint-9" / "trainplan.json").write_text("{}")
    result = run(
        MODEL, PIPELINE, steps=STEPS, batch=8, out=out, show=False, seed=3, save_every=2, max_restarts=2,
        verified=True,  # that would call the loss, which counts its calls to fail in time
        **DATA,
    )  # fmt: skip
    assert len(result.step_seconds) == STEPS
    monkeypatch.delenv("TROUBLE")
    assert result.losses == pytest.approx(undisturbed(plan(blocks=4), **DATA), rel=1e-5)
    said = (out / "rank-0.log").read_text()
    assert "attempt 2, from the beginning\n" in said
    assert f"attempt 3, from {out / 'checkpoint-2'}\n" in said
    steps = (out / "rank-1.log").read_text()
    for attempt in ("first", "second"):  # what happened stays in the log
        assert f"ValueError: the {attempt} attempt went wrong" in steps
    for number in range(STEPS):
        assert steps.count(f"step {number + 1}/{STEPS} ") == 1
    assert list(out.glob("rank-*.error")) == []


def test_restarts_are_counted_from_zero() -> None:
    assert "--max-restarts" not in torchrun(Path("job.json"), 2)
    with pytest.raises(RunError, match="0 times or more"):
        torchrun(Path("job.json"), 2, max_restarts=-1)
