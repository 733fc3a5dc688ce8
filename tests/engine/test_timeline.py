"""Program = timeline: what ran is what the program says, operation by operation.

Every system that is predicted and run has its measured timeline held against its program: the same operations, in the
same order on each resource of each rank, with the same bytes. Leaving an operation out of the lowering fails here.
"""

from collections import defaultdict

import pytest

from tests.engine import jobs
from tests.engine.systems import CASES, Case
from trainplan.bench.pool import pool
from trainplan.engine.measurement import Measurement, merge
from trainplan.plan.plan import plan
from trainplan.profile.structure import structure
from trainplan.program.lower import lower
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.timeline import Event

TIMED = [case for case in CASES if case.optimizer == "sgd" and case.model != "chain"]


def measured(case: Case) -> dict[int, list[Event]]:
    arguments = (case.model, case.optimizer, case.plan, [8, 8, 8, 8], case.fields, 2)
    results = (
        [jobs.train(0, 1, *arguments)] if case.plan.world == 1 else pool(case.plan.world).run(jobs.train, *arguments)
    )
    return {rank: events for rank, (_, events, _) in enumerate(results)}


def lane_of(event: Event) -> tuple:
    """What an event occupies on its rank; messages to different stages do not hold each other up."""
    lane = SPECS[Kind[event.kind]].lane
    return (lane, event.kind) if lane is not Lane.COMPUTE else (lane,)


def by_resource(events: list[Event]) -> dict[tuple, list[tuple[str, int]]]:
    found = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        found[lane_of(event)].append((event.name, event.bytes))
    return dict(found)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.system(c.key, "R"), id=str(c)) for c in TIMED])
def test_program_is_timeline(case: Case) -> None:
    job, _, captured = jobs.built(case.model, case.optimizer, **case.fields)
    program = lower(case.plan, structure(captured, job, job.inputs(2, 0)), 8, steps=2)
    for rank, events in measured(case).items():
        planned = [
            Event(program.name(op), Kind(program.kind[op]).name, rank, place, place, int(program.bytes[op]))
            for place, op in enumerate(program.lists.row(rank))
        ]
        assert by_resource(events) == by_resource(planned)


def test_the_two_ends_of_a_message_are_put_together() -> None:
    """Posted by one rank, arrived at another; a message that was posted behind another starts when that is over."""
    sent = (Event("0SEND_F0", "SEND_F", 0, 1.0, 1.1), Event("0SEND_F1", "SEND_F", 0, 2.0, 2.1))
    taken = (Event("1RECV_F0", "RECV_F", 1, 6.0, 6.5), Event("1RECV_F1", "RECV_F", 1, 8.0, 8.5))
    first = Measurement(0, 0, 0, (9.0,), (None,), (), 0, sent, {})
    second = Measurement(1, 0, 1, (9.0,), (0.5,), (), 0, taken, {"0SEND_F0": 3.0, "0SEND_F1": 4.0})
    merged = {e.name: (e.start, e.end) for e in merge([first, second], plan(pp=2, stages=(1,), blocks=2)).events}
    assert merged == {"0SEND_F0": (0, 2), "0SEND_F1": (2, 3), "1RECV_F0": (5, 5.5), "1RECV_F1": (7, 7.5)}


def test_a_collective_starts_when_its_last_member_comes() -> None:
    early = Measurement(0, 0, 0, (9.0,), (0.5,), (), 0, (Event("0LOSS", "LOSS", 0, 1.0, 5.5),), {})
    late = Measurement(1, 1, 0, (9.0,), (0.5,), (), 0, (Event("0LOSS", "LOSS", 1, 4.0, 5.0),), {})
    merged = merge([early, late], plan(dp=2, blocks=2)).events
    assert [(e.rank, e.start, e.end) for e in merged] == [(0, 0.0, 1.5), (1, 0.0, 1.0)]
