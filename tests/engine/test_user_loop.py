"""`trainplan.build` in a loop of one's own, under a plain torchrun: the same losses whatever the plan."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.systems import BLOCKS
from tests.engine.test_checkpoint import CHOICES, trainer_of
from trainplan.bench.pool import pool
from trainplan.errors import PlanError, RunError
from trainplan.plan.plan import Plan, plan
from trainplan.workload.batch import split

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


@pytest.mark.parametrize("choices", [{"micro": 4}, {"micro": 4, "preload": "on"}], ids=str)
def test_the_last_batch_of_an_epoch_may_be_too_small(choices: dict) -> None:
    """After good steps: the message names what would have to be split, and the loader's way out."""
    trainer = trainer_of(plan(blocks=BLOCKS["tied"], **choices), "tied", "sgd")
    trainer.step(trainer.workload.inputs(8, 0))
    said = r"a batch of 1 sample under plan .*micro=4.*1 replica × 4 micro-batches. Try batches of 4 .*drop_last=True"
    with pytest.raises(PlanError, match=said):
        trainer.step(trainer.workload.inputs(1, 0))


def fed_apart(rank: int, world: int, chosen: Plan, sizes: tuple[int, int]) -> str:
    """What a rank says that is fed its own batch, as by a DistributedSampler."""
    trainer = trainer_of(chosen, "tied", "sgd")
    said = ""
    try:
        trainer.step(trainer.workload.inputs(sizes[rank], seed=rank))
    except RunError as error:
        said = str(error)
    trainer.close()
    return said


@pytest.mark.parametrize(
    ("choices", "sizes", "why", "instead"),
    [
        ({"dp": 2}, (4, 4), "other samples than rank 0", r"; or trainer.step\(part, whole=8\)"),
        ({"dp": 2}, (8, 6), "6 samples, and rank 0 8", r"; or trainer.step\(part, whole=14\)"),
        (CHOICES["pipeline"], (8, 8), "other samples than rank 0", "without a DistributedSampler.$"),
    ],
)
def test_ranks_that_are_fed_apart_are_refused_at_once(choices: dict, sizes: tuple, why: str, instead: str) -> None:
    ranks = pool(2).run(fed_apart, plan(blocks=BLOCKS["tied"], **choices), sizes)
    assert ranks[0] == ranks[1]
    assert re.search(f"rank 1 was given {why}, and a step takes the whole batch.*{instead}", ranks[0]), ranks[0]


def fed_its_part(rank: int, world: int) -> tuple[float | None, float | None]:
    """The loss of a batch that every rank is given whole, and of one of which it is given its part."""
    found = []
    for parts in (False, True):
        trainer = trainer_of(plan(dp=2, blocks=BLOCKS["tied"]), "tied", "sgd")
        batch = trainer.workload.inputs(8, 0)
        found.append((trainer.step(split(batch, (4, 4))[rank], whole=8) if parts else trainer.step(batch)).loss)
        trainer.close()
    return found[0], found[1]


def test_a_rank_is_fed_its_part_where_it_says_so() -> None:
    for whole, part in pool(2).run(fed_its_part):
        assert whole == pytest.approx(part)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_tensor_that_samples_share_is_not_split(rows: int) -> None:
    """It has as many rows as the example that is captured (2), or as a whole batch (8)."""
    import torch
    from torch import nn

    import trainplan

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)) * table.sum(0))

    def inputs(samples: int, seed: int) -> tuple:
        table = torch.arange(3.0 * rows).view(rows, 3) / 10
        return (torch.randn(samples, 3), table), torch.randn(samples, 2)

    model, batch = Weighted(), inputs(8, 0)
    expected = nn.functional.mse_loss(model(*batch[0]), batch[1]).item()
    trainer = trainplan.build("micro=2", model, "mse", inputs=inputs, batch=8)
    try:
        assert trainer.step(batch).loss == pytest.approx(expected)
    finally:
        trainer.close()
