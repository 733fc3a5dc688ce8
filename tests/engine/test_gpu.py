"""The engine on a GPU: slices of one device talk over gloo, through pinned host memory."""

import pytest

from tests.engine import jobs
from tests.engine.systems import CASES, Case
from tests.engine.test_equality import alone, hold
from tests.engine.test_timeline import by_resource
from trainplan.bench.pool import pool
from trainplan.profile.structure import structure
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.timeline import Event

pytestmark = pytest.mark.gpu
CHOSEN = [case for case in CASES if case.model == "tied" and case.optimizer == "sgd"]


def on_gpu(case: Case, sizes: tuple[int, ...], record: int = 0):
    arguments = (case.model, case.optimizer, case.plan, list(sizes), case.fields, record, "gloo-staged", "cuda")
    if case.plan.world == 1:
        return [jobs.train(0, 1, *arguments)]
    return pool(case.plan.world).run(jobs.train, *arguments)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_equality_on_a_gpu(case: Case) -> None:
    hold(case, alone(case), on_gpu(case, case.sizes))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_program_is_timeline_on_a_gpu(case: Case) -> None:
    job, _, captured = jobs.built(case.model, case.optimizer, **case.fields)
    program = lower(case.plan, structure(captured, job, job.inputs(2, 0)), 8, "gloo-staged", steps=2)
    for rank, (_, events, _) in enumerate(on_gpu(case, (8, 8, 8, 8), record=2)):
        planned = [
            Event(program.name(op), Kind(program.kind[op]).name, rank, place, place, int(program.bytes[op]))
            for place, op in enumerate(program.lists.row(rank))
        ]
        assert by_resource(events) == by_resource(planned)
