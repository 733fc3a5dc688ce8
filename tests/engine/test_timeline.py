"""Program = timeline: what ran is what the program says, operation by operation.

Every system that is predicted and run has its measured timeline held against its program: the same operations, in the
same order on each resource of each rank, with the same bytes. Leaving an operation out of the lowering fails here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.engine import jobs
from tests.engine.runs import RECORDED, TIMED, TIMED_DAILY, seen
from tests.engine.systems import Case
from tests.program.surgery import change, find, move, swap, twice, without
from trainplan.engine.measurement import Measurement, merge
from trainplan.plan import rules
from trainplan.plan.plan import plan
from trainplan.profile.trace import trace
from trainplan.program.agenda import Agenda, Agendas
from trainplan.program.check import check
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.lower import lower
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.program import Program
from trainplan.program.timeline import Event


def measured(case: Case) -> dict[int, list[Event]]:
    """What every rank did in the last steps."""
    return seen(case).events


def decided(case: Case) -> list[Agendas]:
    """What of each stage was exchanged when, where that was decided while running."""
    return agreed(seen(case).agendas)


def agreed(ranks: list[list[Agendas]]) -> list[Agendas]:
    """The agendas of all stages, by step: on all ranks that hold one they are the same."""
    found = [dict[int, Agenda]() for _ in max(ranks, key=len)]
    for own in ranks:
        for together, agendas in zip(found, own, strict=False):  # a rank whose stages nobody else holds has none
            assert all(together.setdefault(stage, agenda) == agenda for stage, agenda in agendas.items())
    return found


def lane_of(event: Event, groups: dict[str, int]) -> tuple:
    """What an event occupies on its rank; messages to different stages do not hold each other up, nor do sums in rounds
    of different groups, or those that are decided while running of different stages: each has a thread for them."""
    lane = SPECS[Kind[event.kind]].lane
    return (lane, event.kind, groups.get(event.name, -1)) if lane is not Lane.COMPUTE else (lane,)


def by_resource(events: list[Event], groups: dict[str, int]) -> dict[tuple, list[tuple[str, int]]]:
    found = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        found[lane_of(event, groups)].append((event.name, event.bytes))
    return dict(found)


def program_of(case: Case, agendas: Sequence[Agendas] = (), backend: str = "gloo") -> Program:
    """The two steps that are recorded; with what was decided in them, where the exchange decides while running."""
    shape = jobs.shape_of(case.model, **case.fields)
    if case.plan.away:  # then what is copied is what blocks save, as those say who have traced it
        shape = replace(shape, **saved(case.model))
    return lower(case.plan, shape, case.sizes[-1], backend, steps=RECORDED, agendas=agendas)


@cache
def saved(model: str) -> dict:
    """The parts of a profile that say what is saved."""
    job, _, captured = jobs.built(model, "sgd")
    shape, sizes = jobs.shape_of(model), (2, 4)  # bytes grow evenly
    traces = [trace(captured, job, size) for size in sizes]
    none = (0.0,) * len(sizes)
    nothing = {f"{way}_{what}": none for way in ("forward", "backward") for what in ("s", "issue_s", "workspace_bytes")}
    blocks = tuple(
        replace(block, **nothing, saved_bytes=tuple(float(t.blocks[number].saved_bytes) for t in traces))
        for number, block in enumerate(shape.blocks)
    )
    crossings = tuple(replace(c, saved_by=traces[0].saved_by.get(c.name, ())) for c in shape.crossings)
    return {"samples": sizes, "blocks": blocks, "crossings": crossings}


def hold(program: Program, events: dict[int, list[Event]]) -> None:
    """What every rank did is what the program says."""
    groups = {
        str(op): op.key.stage if op.key.kind is Kind.TICK else int(program.group[op.id])
        for op in program.ops()
        if program.classes[program.cost[op.id]].by in BY_ROUNDS
        or program.classes[program.cost[op.id]].background
        or op.key.kind is Kind.TICK
    }
    for rank, found in events.items():
        planned = [
            Event(program.name(op), Kind(program.kind[op]).name, rank, place, place, int(program.bytes[op]))
            for place, op in enumerate(program.lists.row(rank))
        ]
        assert by_resource(found, groups) == by_resource(planned, groups)


def params() -> Iterator:
    for case in TIMED:
        slow = [] if str(case) in TIMED_DAILY else [pytest.mark.slow]
        yield pytest.param(case, marks=[pytest.mark.system(case.key, "R"), *slow], id=str(case))


@pytest.mark.parametrize("case", list(params()))
def test_program_is_timeline(case: Case) -> None:
    """Where the order of the exchange was decided while running, all ranks have decided alike, and the program is that
    of their decision: it says which operations follow from it, what they wait for, and how many bytes they have."""
    events, agendas = measured(case), decided(case)
    assert len(agendas) == (RECORDED if case.plan.exchange in rules.DECIDED else 0)
    hold(check(program_of(case, agendas)), events)


# -- the test above can fail: the same timelines, held against programs that are wrong in one place -----------------

RIGHT = {
    "replicas": Case("ddp", "residual", {"dp": 2, "bucket": 200}),
    "pipeline": Case("dapple", "residual", {"pp": 2, "micro": 4, "schedule": "1f1b", "stages": (2,)}),
    "two parts": Case("zb-h1", "tied", {"pp": 2, "micro": 3, "schedule": "zb-h1", "stages": (2,)}),
    "two directions": Case("gems", "tied", {"pp": 2, "micro": 3, "schedule": "gems", "stages": (2,), "bucket": 200}),
    "slices": Case("terapipe", "gpt", {"pp": 2, "micro": 2, "schedule": "terapipe", "stages": (2,), "slices": (3, 5)}),
    "lockstep": Case("torchgpipe-as-found", "tied", {"pp": 2, "micro": 2, "schedule": "lockstep", "stages": (2,)}),
    "servers": Case("ps-bsp", "tied", {"dp": 2, "servers": 1, "exchange": "ps-bsp", "bucket": 300}),
    "inputs": Case("dataparallel", "tied", {"dp": 2, "exchange": "dataparallel", "bucket": 300, "preload": "off"}),
    "inputs ahead": Case("preload", "tied", {"pp": 2, "micro": 2, "stages": (4,), "preload": "on"}),
}


@cache
def ran(name: str) -> tuple[Program, dict[int, list[Event]]]:
    """A program that passes, and its timeline."""
    program, events = program_of(RIGHT[name]), measured(RIGHT[name])
    hold(program, events)
    return program, events


def first_of(program: Program, kind: Kind) -> int:
    return next(op.id for op in program.ops() if op.key.kind is kind)


def without_exchange(program: Program) -> Program:
    """No gradient is summed over the replicas."""
    return without(program, *(str(op) for op in program.ops() if op.key.kind is Kind.REDUCE_GRAD))


def without_one_exchange(program: Program) -> Program:
    """One bucket of one step is forgotten."""
    return without(program, "0REDUCE_GRAD.1@1")


def exchanges_swapped(program: Program) -> Program:
    return move(program, 0, "0REDUCE_GRAD.1", before="0REDUCE_GRAD")


def computations_swapped(program: Program) -> Program:
    """As GPipe would have it on the first stage: a forward pass before the backward pass that 1F1B puts first."""
    return move(program, 0, "0F2", before="0B0")


def messages_swapped(program: Program) -> Program:
    return move(program, 0, "0SEND_F1", before="0SEND_F0")


def without_a_message(program: Program) -> Program:
    return without(program, "0SEND_F1", "1RECV_F1")


def another_message(program: Program) -> Program:
    """The same operation once more."""
    return twice(program, "1SEND_B0")


def message_too_long(program: Program) -> Program:
    op = first_of(program, Kind.SEND_F)
    return change(program, "bytes", op, int(program.bytes[op]) + 1)


def bucket_too_short(program: Program) -> Program:
    op = first_of(program, Kind.REDUCE_GRAD)
    return change(program, "bytes", op, int(program.bytes[op]) - 8)


def without_gradients_of_weights(program: Program) -> Program:
    """The second part of one backward pass is forgotten."""
    return without(program, "1W1")


def gradients_of_weights_at_once(program: Program) -> Program:
    """As if the backward pass were whole: nothing is kept for the gap."""
    return move(program, 1, "1W0", before="1F1")


def whole_backward(program: Program) -> Program:
    return change(program, "kind", find(program, "0I1"), Kind.B)


def all_in_one_direction(program: Program) -> Program:
    """A pass of the second pipeline is taken for one of the first."""
    return change(program, "pipeline", find(program, "0F1^1"), 0)


def directions_swapped(program: Program) -> Program:
    """The second pipeline's micro-batch before the first one's."""
    return move(program, 1, "0F1^1", before="1F0")


def without_sum_of_directions(program: Program) -> Program:
    """The two copies of a stage never exchange a bucket of their gradients."""
    return without(program, "1REDUCE_GRAD.1")


def slices_swapped(program: Program) -> Program:
    """The gradients of the first tokens before those of the last, whose keys and values they are."""
    return swap(program, 1, "1B1", "1B1/1")


def without_a_slice(program: Program) -> Program:
    return without(program, "0SEND_F1/1", "1RECV_F1/1")


def slices_of_one_length(program: Program) -> Program:
    op = find(program, "0SEND_F0")
    return change(program, "bytes", op, int(program.bytes[find(program, "0SEND_F0/1")]))


def without_a_barrier(program: Program) -> Program:
    return without(program, "0BARRIER.4")


def another_barrier(program: Program) -> Program:
    return twice(program, "0BARRIER.9@1")


def without_a_push(program: Program) -> Program:
    """A server never gets a load of the second worker."""
    return without(program, "0SEND_G0.1>1^1", "1RECV_G0.1^1")


def loads_swapped(program: Program) -> Program:
    """A server steps with the second load before the first."""
    return swap(program, 2, "1STEP", "1STEP.1")


def weights_too_short(program: Program) -> Program:
    op = find(program, "1SEND_W0^1")
    return change(program, "bytes", op, int(program.bytes[op]) - 8)


def without_a_load(program: Program) -> Program:
    """The batch is on the device, and nobody knows how it came there."""
    return without(program, "0LOAD@1")


def inputs_too_short(program: Program) -> Program:
    op = find(program, "0SEND_INPUT0>0^1")
    return change(program, "bytes", op, int(program.bytes[op]) - 8)


def loads_whole_batch(program: Program) -> Program:
    """Every stage loads all of the batch, inputs and targets."""
    op = find(program, "1LOAD")
    return change(program, "bytes", op, int(program.bytes[op] + program.bytes[find(program, "0LOAD")]))


WRONG = {
    "replicas": (without_exchange, without_one_exchange, exchanges_swapped, bucket_too_short),
    "pipeline": (computations_swapped, messages_swapped, without_a_message, another_message, message_too_long),
    "two parts": (without_gradients_of_weights, gradients_of_weights_at_once, whole_backward),
    "two directions": (all_in_one_direction, directions_swapped, without_sum_of_directions),
    "slices": (slices_swapped, without_a_slice, slices_of_one_length),
    "lockstep": (without_a_barrier, another_barrier),
    "servers": (without_a_push, loads_swapped, weights_too_short),
    "inputs": (without_a_load, inputs_too_short),
    "inputs ahead": (without_a_load, loads_whole_batch),
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, several in WRONG.items() for wrong in several])
def test_a_wrong_program_is_noticed(name: str, wrong: Callable[[Program], Program]) -> None:
    program, events = ran(name)
    changed = wrong(program)
    with pytest.raises(AssertionError):
        hold(changed, events)


# -- putting together what the ranks noted --------------------------------------------------------------------------


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
