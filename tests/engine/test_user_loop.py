"""`trainplan.build` in a loop of one's own, under a plain torchrun: the same losses whatever the plan."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "user_loop.py"


def losses(plan: str, ranks: int, folder: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(SCRIPT),
    ]
    done = subprocess.run([*command, plan, str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "trainplan.json").exists()
    return sorted({line for line in done.stdout.splitlines() if line.startswith(("loss", "evaluated"))})


@pytest.mark.usefixtures("quick_start")
def test_the_same_losses_whatever_the_plan(tmp_path: Path) -> None:
    alone = losses("single", 1, tmp_path / "alone")
    assert len(alone) == 4
    assert losses("pp=2 schedule=1f1b micro=2", 2, tmp_path / "pipeline") == alone
    assert losses("dp=2 overlap=off", 2, tmp_path / "replicas") == alone


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_parameter_that_nothing_reads(overlap: str) -> None:
    from tests.engine import jobs
    from trainplan.bench.pool import pool
    from trainplan.plan.plan import plan

    chosen = plan(dp=2, bucket=300, blocks=6, overlap=overlap)
    ranks = pool(2).run(jobs.train, "idle", "sgd", chosen, [8, 8], {})
    assert ranks[0][0].losses == pytest.approx(ranks[1][0].losses)
    assert "unused" in ranks[0][0].weights
    assert "unused" not in ranks[0][0].state
