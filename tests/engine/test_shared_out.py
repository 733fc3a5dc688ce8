"""ZeRO on real processes: bytes of weights, gradients and states apart, and what a step sends, against the formulas."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine import jobs
from tests.engine.test_bytes import DEVICES, carried, carried_by
from trainplan.bench.pool import pool
from trainplan.engine.trainer import Trainer, build
from trainplan.plan.plan import Plan, plan
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.traffic import sent_by_rank
from trainplan.workload.workload import Batch, Loss, Workload

STAGES = [pytest.param(z, marks=pytest.mark.system(f"zero{z}", "R"), id=f"zero{z}") for z in (1, 2, 3)]
KINDS = (Value.WEIGHTS, Value.GRADIENTS, Value.OPTIMIZER)


def distinct(tensors: list[Tensor]) -> int:
    """Bytes of all storages behind these tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resident(rank: int, world: int, chosen: Plan) -> tuple[list[int], list[int], int]:
    """Bytes of weights, gradients and states that this rank has between steps, and by the program; and all weights."""
    job, model, captured = jobs.built("tied", "adamw")
    trainer = Trainer(chosen, job, captured, lambda names: jobs.values_of(model), shape=jobs.shape_of("tied"))
    for number in range(2):
        trainer.step(job.inputs(2 * world, number))
    held = trainer.part.held[0]
    shards = held.shards
    weights = list(held.parameters.values()) + (shards.own if shards is not None else [])
    gradients = [p.grad for p in [*held.parameters.values(), *held.stepped.values()] if p.grad is not None]
    # The number of the step is one number a parameter, and not a state of its elements.
    states = [v for entries in held.optimizer.state.values() for key, v in entries.items() if key != "step"]
    program = lower(chosen, replace(trainer.shape, state_bytes_per_parameter=16.0), 2 * world)  # two float64 each
    found = [distinct(weights), distinct(gradients), distinct(states)]
    said = [program.bytes_at_start(rank, kind) for kind in KINDS]
    whole = sum(p.numel() * 8 for p in model.parameters())
    dist.barrier()
    trainer.close()
    return found, said, whole


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("zero", STAGES)
def test_states_are_as_large_as_formula_and_program_say(zero: int, world: int) -> None:
    """Of Ψ bytes: weights Ψ or Ψ/N, gradients Ψ or Ψ/N, Adam's states 2Ψ or 2Ψ/N, but for what shares are filled up
    with."""
    ranks = pool(world).run(resident, plan(dp=world, zero=zero, bucket=400, blocks=8))
    psi = ranks[0][2]
    shared = [zero == 3, zero >= 2, True]
    for found, said, _ in ranks:
        for real, program, whole, is_shared in zip(found, said, (psi, psi, 2 * psi), shared, strict=True):
            assert real == program
            if not is_shared:
                assert 0 <= real - whole <= 0.2 * whole
    for place, (whole, is_shared) in enumerate(zip((psi, psi, 2 * psi), shared, strict=True)):
        together = sum(found[place] for found, _, _ in ranks)
        assert 0 <= together - whole * (1 if is_shared else world) <= 0.2 * whole * world


WIDTH, SAMPLES = 640, 4


def wide() -> Workload:
    """Two large matrices, in float32: next to nothing but them is sent."""
    return Workload(
        "wide",
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        lambda samples, seed: Batch(samples, (torch.ones(samples, WIDTH),), {}, torch.zeros(samples, WIDTH)),
        Loss(lambda output, target: (output - target).square().mean(), lambda batch: batch.samples),
        lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1),
        batch=SAMPLES,
        samples_per_epoch=SAMPLES,
    )


def stepping(rank: int, world: int, zero: int) -> tuple[int, int, int]:
    """Bytes on the interface during a step and in as long a time without one; and by the program."""
    job = wide()
    trainer = build(plan(dp=world, zero=zero, bucket=2**20, blocks=2), job)
    batch = job.inputs(SAMPLES, 0)
    for _ in range(2):  # DDP has its own buckets in the first
        trainer.step(batch)
    dist.barrier()
    before, began = carried_by(), time.perf_counter()
    dist.barrier()
    trainer.step(batch)
    dist.barrier()
    after = carried_by()
    time.sleep(time.perf_counter() - began)
    beside = carried_by() - after
    said = int(sent_by_rank(trainer.program(SAMPLES)).sum())
    dist.barrier()
    trainer.close()
    return after - before, beside, said


@pytest.mark.alone
@pytest.mark.parametrize("zero", [0, *STAGES])
def test_a_step_sends_what_formula_and_program_say(zero: int) -> None:
    """Ψ bytes of gradients and of weights go round: 2Ψ a step, as in plain data parallelism, and 3Ψ under zero=3, but
    for the weights that forward ends with and backward begins with. Each time (N − 1)/N of it for each of N ranks."""
    if not DEVICES.exists():
        pytest.skip(f"{DEVICES} cannot be read")
    world, layer = 2, 4 * (WIDTH * WIDTH + WIDTH)
    formula = (world - 1) * (5 if zero == 3 else 4) * layer

    def attempt() -> tuple[int, int]:
        found, beside, said = pool(world).run(stepping, zero)[0]
        assert said == pytest.approx(formula, rel=1e-3)
        return found, beside

    carried(formula, attempt)
