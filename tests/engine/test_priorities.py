"""Exchanges that are decided while running, on the clock: sleeping blocks and a slow link, which sleeps as well.

What priorities gain they gain across the step boundary, so steps are measured, and held against the prediction. And
what was decided can be replayed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.engine import sleeping
from tests.engine.systems import FUSED, Case
from tests.engine.test_sleeping import CLOSE, TRIES
from tests.engine.test_timeline import decided, hold, measured, program_of
from trainplan.bench.pool import pool
from trainplan.cluster.cluster import Cluster, Curve
from trainplan.engine.measurement import Measurement, measure, together
from trainplan.engine.trainer import Trainer
from trainplan.errors import InputError, PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.predict.predict import predict
from trainplan.program.agenda import Agenda, Agendas

BLOCK = 4 * (sleeping.WIDTH**2 + 2 * sleeping.WIDTH)  # bytes of gradients of a block
RATE = BLOCK / 56e-3  # bytes a second
STRETCH = (
    2.0  # naps and sums are long beside what a slow machine adds to them, and that is much: a step has many rounds
)
BATCH, WARM_UP, STEPS = 8, 1, 3


class SleepingLink:
    """Sums that take as long as their bytes, one after the other."""

    def __init__(self, fast: Callable[[Tensor], dist.Work], rate: float) -> None:
        self.fast, self.rate, self.free = fast, rate, 0.0

    def __call__(self, tensor: Tensor) -> "SleepingLink.Sum":
        self.free = max(self.free, time.perf_counter()) + tensor.nbytes / self.rate
        return SleepingLink.Sum(self.fast(tensor), self.free)

    class Sum:
        def __init__(self, work: dist.Work, until: float) -> None:
            self.work, self.until = work, until

        def wait(self) -> None:
            self.work.wait()
            time.sleep(max(0.0, self.until - time.perf_counter()))


def train(rank: int, world: int, choices: Plan, stretch: float) -> Measurement:
    """On every rank: some steps over the slow link, on which everything takes so many times as long as is written."""
    sleeping.wake()
    job, skeleton, captured = sleeping._captured()
    trainer = Trainer(choices, job, captured, lambda names: skeleton.materialise(names, 0))
    exchange = trainer.part.exchanges[0]
    exchange.sum = SleepingLink(exchange.sum, RATE / stretch)
    with sleeping.stretched(stretch):
        found = measure(trainer, [(job.inputs(BATCH, 0), None)] * (WARM_UP + STEPS), warm_up=WARM_UP)
    dist.barrier()
    trainer.close()
    return found


def cluster(latency: float, stretch: float) -> Cluster:
    """The sleepers' machine with that link, on which messages and small sums take so long."""
    small, large = 16, 16 + BLOCK  # no gradient is smaller, and what is passes by the link
    seconds = (latency, latency, latency + stretch * small / RATE, latency + stretch * large / RATE)
    here = sleeping.cluster(2, stretch)
    (node,) = here.nodes
    nodes = (replace(node, inside=replace(node.inside, latency_s=latency)),)
    return replace(here, nodes=nodes, collectives=(Curve("all_reduce", 2, (0, 8, small, large), seconds),))


@cache
def step(choices: Plan) -> float:
    """Seconds of a step, as measured, once these are those that are predicted: as if nothing had been stretched. A step
    has many rounds, and how long one takes depends on how busy the machine is: that is taken from the run, and nothing
    else. As in `test_sleeping`, whoever is off is measured again, and longer."""
    for attempt in range(TRIES):
        stretch = STRETCH * (1 + attempt)
        pool(2).run(sleeping.lateness)
        result = together(pool(2).run(train, choices, stretch), choices, WARM_UP)
        late = max(pool(2).run(sleeping.lateness)) / sum(result.step_seconds)
        rounds = [event.end - event.start for event in result.timeline.events if event.kind == "NEGOTIATE"]
        latency = max(0.0, median(rounds) - sleeping._dispatch())
        expected = predict(choices, sleeping.profile(stretch=stretch), cluster(latency, stretch), BATCH).step_s
        # A step gives back its loss before its gradients are summed, and the last one is nobody's forward pass.
        found = median(result.step_seconds[WARM_UP + 1 :])
        if abs(found - expected) <= (CLOSE + 2 * late) * expected:
            return found / stretch
    pytest.fail(f"{choices.exchange}: a step of {found:.4f} s, predicted {expected:.4f}, {late:.1%} late")


def sleepers(word: str, **numbers) -> Plan:
    return plan(dp=2, blocks=len(sleeping.BLOCKS), exchange=word, key=word, **numbers)


HOROVOD_ASLEEP = sleepers("horovod", threshold=2 * BLOCK, cycle=5e-3)


@pytest.mark.alone
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(sleepers(word, **numbers), marks=pytest.mark.system(word, "P"), id=word)
        for word, numbers in (
            ("p3", {"slice": 32}),
            ("bytescheduler", {"slice": 32, "credit": 40}),
            ("pace", {"slice": 24, "fused": (3, 3, 3, 3)}),
        )
    ],
)
def test_priorities_gain_across_steps_as_predicted(choices: Plan) -> None:
    """Horovod waits for everything before the next step begins. By priority, the first block's gradients overtake
    others, and these go while it runs: that is an eighth of a step here, of which a busy machine may take a half."""
    assert step(choices) < (1 - CLOSE) * step(HOROVOD_ASLEEP)


@pytest.mark.alone
@pytest.mark.system("horovod", "P")
def test_horovod_takes_as_long_as_predicted_and_credit_for_everything_is_first_in_first_out() -> None:
    fifo = sleepers("bytescheduler", slice=32, credit=10**6)
    assert step(fifo) == pytest.approx(step(HOROVOD_ASLEEP), rel=0.1)


# -- replay ---------------------------------------------------------------------------------------------------------

HOROVOD = Case("horovod", "tied", {"dp": 2, "exchange": "horovod", "threshold": 400, "cycle": 1e-3})
REPLAYED = [
    HOROVOD,
    Case("p3", "tied", {"dp": 2, "exchange": "p3", "slice": 100}),
    Case("bytescheduler", "tied", {"dp": 2, "exchange": "bytescheduler", "slice": 64, "credit": 150}),
    Case("pace", "tied", {"dp": 2, "exchange": "pace", "slice": 150, "fused": FUSED["tied"]}),
]


def backwards(agenda: Agenda) -> Agenda:
    """The same parts in an order that nobody would decide: the first are ready last. The first round has none, the
    second two by themselves, and what is left is summed by threes, where parts may be put together at all.

    >>> backwards((((0,), (1,)), ((2,), (3,))))
    ((), ((3,), (2,)), ((1,), (0,)))
    >>> backwards((((0, 1),), ((2, 3, 4, 5),)))
    ((), ((5,), (4,)), ((3, 2, 1), (0,)))
    """
    parts = sorted((part for round_ in agenda for together in round_ for part in together), reverse=True)
    several = 3 if any(len(together) > 1 for round_ in agenda for together in round_) else 1
    rest = [tuple(parts[at : at + several]) for at in range(2, len(parts), several)]
    return ((), tuple((part,) for part in parts[:2]), tuple(rest))


def follow(rank: int, world: int, case: Case, agendas: list[Agendas]) -> tuple[list, list[Agendas]]:
    from tests.engine import jobs

    job, model, captured = jobs.built(case.model, case.optimizer)
    values = jobs.values_of(model)
    trainer = Trainer(case.plan, job, captured, lambda names: values, seed=7)
    count = sum(len(together) for round_ in agendas[0][0] for together in round_)
    with pytest.raises(InputError, match=f"a step has {count}"):
        trainer.replay([{0: agendas[0][0][:-1]}])
    trainer.replay(agendas)
    trainer.record()
    for number in range(2):
        trainer.step(job.inputs(8, seed=number))
    trainer.settle()
    events, found = trainer.events(8), list(trainer.agendas)
    dist.barrier()
    trainer.close()
    return events, found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.system(case.key, "R"), id=case.key) for case in REPLAYED]
)
def test_decisions_can_be_replayed(case: Case) -> None:
    """What was decided, and what never would be: the timeline is that of the program of the agenda."""
    once = decided(case)[0]
    agendas = [once, {0: backwards(once[0])}]
    assert agendas[1] != once
    results = pool(2).run(follow, case, agendas)
    assert all(found == agendas for _, found in results)
    hold(program_of(case, agendas), {rank: events for rank, (events, _) in enumerate(results)})


@pytest.mark.parametrize("case", REPLAYED, ids=lambda case: case.key)
def test_another_decision_would_be_noticed(case: Case) -> None:
    events, agendas = measured(case), decided(case)
    with pytest.raises(AssertionError):
        hold(program_of(case, [{0: backwards(agendas[0][0])}, agendas[1]]), events)


def refused(rank: int, world: int, choices: Plan, optimizer: str) -> str:
    from tests.engine import jobs
    from trainplan.workload.workload import Workload

    job, model, captured = jobs.built("tied", "sgd")
    if optimizer == "own":
        import torch

        class Own(torch.optim.SGD):
            """Somebody's own."""

        job = replace(job, optimizer=lambda named: Own([p for _, p in named], lr=0.1))
    assert isinstance(job, Workload)
    values = jobs.values_of(model)
    trainer = Trainer(choices, job, captured, lambda names: values)
    try:
        with pytest.raises(PlanError) as caught:
            trainer.step(job.inputs(8, seed=0))
    finally:
        dist.barrier()
    return str(caught.value)


def test_an_optimizer_that_may_look_at_several_tensors_at_once_is_refused() -> None:
    choices = plan(dp=2, blocks=8, exchange="p3", slice=100)
    for said in pool(2).run(refused, choices, "own"):
        assert "block by block" in said
        assert "exchange=all-reduce" in said
