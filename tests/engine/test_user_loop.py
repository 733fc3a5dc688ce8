"""`trainplan.build` in a loop of one's own, under a plain torchrun: the same losses whatever the plan."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.systems import BLOCKS
from tests.engine.test_checkpoint import CHOICES, trainer_of
from trainplan.bench.pool import pool
from trainplan.plan.plan import Plan, plan

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

    chosen = plan(dp=2, bucket=300, blocks=6, overlap=overlap)
    ranks = pool(2).run(jobs.train, "idle", "sgd", chosen, [8, 8], {})
    assert ranks[0][0].losses == pytest.approx(ranks[1][0].losses)
    assert "unused" in ranks[0][0].weights
    assert "unused" not in ranks[0][0].state


def rate_by_hand(rank: int, world: int, chosen: Plan) -> tuple[bool, bool]:
    """Whether weights here change in a step, and whether they do in one whose learning rate is 0."""
    trainer = trainer_of(chosen, "tied", "grouped_sgd")
    changes, before = [], dict[str, torch.Tensor]()
    for rate in (None, None, 0.0):
        for group in trainer.param_groups if rate is not None else ():
            group["lr"] = rate
        trainer.step(trainer.workload.inputs(8, seed=0))
        trainer.gather()
        after = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        changes.append(any(not torch.equal(value, after[name]) for name, value in before.items()))
        before = after
    trainer.close()
    return changes[1], changes[2]


@pytest.mark.parametrize("choices", ["pipeline", "zero1 on two", "served"])
def test_the_learning_rate_is_set_by_hand_whatever_the_plan(choices: str) -> None:
    served = {"dp": 2, "exchange": "ps-bsp", "servers": 1}
    chosen = plan(blocks=BLOCKS["tied"], **(served if choices == "served" else CHOICES[choices]))
    assert pool(chosen.world).run(rate_by_hand, chosen) == [(True, False)] * chosen.world
