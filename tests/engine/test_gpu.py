"""The engine on a GPU: slices of one device talk over gloo, through pinned host memory."""

from dataclasses import replace
from statistics import median

import pytest
from torch import Tensor, nn

from tests.engine import jobs
from tests.engine.overlapping import hidden
from tests.engine.systems import CASES, Case
from tests.engine.test_asynchronous import CASES as ASYNCHRONOUS
from tests.engine.test_asynchronous import repeated
from tests.engine.test_equality import alone, hold
from tests.engine.test_timeline import agreed, program_of
from tests.engine.test_timeline import hold as hold_timeline
from tests.profiling.models import of
from trainplan.bench.pool import pool
from trainplan.engine.measurement import measure
from trainplan.engine.trainer import build
from trainplan.plan.decided import BY_PRIORITY
from trainplan.plan.plan import plan
from trainplan.program.timeline import Event
from trainplan.workload.batch import each_tensor

pytestmark = pytest.mark.gpu
# By priority pipelines do not go with weights that two stages hold.
ACROSS = [case for case in CASES if case.plan.exchange in BY_PRIORITY and case.plan.pp > 1]
PLAIN = [replace(case, model="chain") for case in ACROSS]  # a GPU does not drop what a CPU drops
CHOSEN = [case for case in [*CASES, *PLAIN] if (case.model == "tied" or case in PLAIN) and case.optimizer == "sgd"]
ONE_EACH = list({case.key: case for case in CHOSEN}.values())


def on_gpu(case: Case, sizes: tuple[int, ...], record: int = 0):
    arguments = (case.model, case.optimizer, case.plan, list(sizes), case.fields, record, "gloo-staged", "cuda")
    if case.plan.world == 1:
        return [jobs.train(0, 1, *arguments)]
    return pool(case.plan.world).run(jobs.train, *arguments)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_equality_on_a_gpu(case: Case) -> None:
    hold(case, alone(case), on_gpu(case, case.sizes))


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_program_is_timeline_on_a_gpu(case: Case) -> None:
    results = on_gpu(case, (8, 8, 8, 8), record=2)
    program = program_of(case, agreed([trained.agendas for trained, _, _ in results]), "gloo-staged")
    hold_timeline(program, {rank: events for rank, (_, events, _) in enumerate(results)})


@pytest.mark.parametrize(
    ("exchange", "model", "optimizer", "choices", "fields"),
    # A GPU does not drop what a CPU drops.
    [pytest.param(case[0], "tied", *case[2:], id="-".join(case[:3])) for case in ASYNCHRONOUS],
)
def test_replay_on_a_gpu(exchange: str, model: str, optimizer: str, choices: dict, fields: dict) -> None:
    """Asynchronous servers and their workers, each on a slice: what the servers recorded is done again by this process
    on its cores, and by as many on the GPU."""
    repeated(exchange, model, optimizer, choices, fields, "gloo-staged", "cuda")


# -- inputs ---------------------------------------------------------------------------------------------------------

WIDE, SAMPLES, STEPS = 8192, 8192, 6  # a quarter of a gigabyte a batch: about as long to copy as to compute


def trained(preload: str) -> tuple[list[float], list[Event]]:
    """Seconds of steps with large inputs, and what happened in them."""
    job = of(nn.Sequential(nn.Linear(WIDE, 1024), nn.ReLU(), nn.Linear(1024, 4)), (WIDE,), batch=SAMPLES)
    trainer = build(plan(preload=preload, blocks=2), job, backend="gloo-staged", device="cuda")
    assert len(trainer.captured.blocks) == 2
    batch = each_tensor(job.inputs(SAMPLES, 0), Tensor.pin_memory)
    measured = measure(trainer, [(batch, None)] * STEPS, warm_up=2)
    trainer.close()
    return list(measured.seconds[2:]), list(measured.events)


def test_the_copy_of_the_next_batch_overlaps() -> None:
    """It goes on while this one is computed, and a step is shorter by nearly all of it."""
    waits, _ = trained("off")
    hides, events = trained("on")
    shares, loads = hidden(events), [event for event in events if event.kind == "LOAD"]
    assert len(shares) == STEPS - 3
    assert min(shares) > 0.5
    assert {load.bytes for load in loads} == {SAMPLES * (4 * WIDE + 8)}
    assert median(waits) - median(hides) > 0.5 * median(load.end - load.start for load in loads)
