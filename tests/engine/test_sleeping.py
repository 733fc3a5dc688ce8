"""Schedules on the clock: where blocks only sleep, a step takes as long as predicted, and so does every kind of it.

A busy machine wakes sleepers too late, and we know by how much: that share of a step is allowed for, twice over (a
late rank makes others wait). And it does so now and then, while a wrong schedule is wrong every time: so whoever is off
is measured again, a few times, and so is what the machine takes for messages and between passes. Every time the blocks
sleep longer: a wrong schedule stays as wrong as it was, and what a slow machine takes besides is a smaller share.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest

from tests.engine import sleeping
from tests.engine.overlapping import hidden
from tests.engine.systems import Case
from trainplan.bench.pool import pool
from trainplan.bench.uneven import described, slow_ranks
from trainplan.engine.measurement import RunResult, together
from trainplan.predict.predict import Prediction, predict
from trainplan.report.joined import Joined, join

pytestmark = pytest.mark.alone
WARM_UP, STEPS = 1, 3
CLOSE = 0.05
TRIES = 5


def run(case: Case, times: tuple[float, ...] = (), stretch: float = 1.0) -> tuple[RunResult, float]:
    """Some steps under a plan, and the share of them by which the machine woke its sleepers too late."""
    ranks = pool(case.plan.world)
    ranks.run(sleeping.lateness)
    measured = ranks.run(sleeping.train, case.plan, case.sizes[0], WARM_UP, STEPS, times, stretch)
    result = together(measured, case.plan, WARM_UP)
    return result, max(ranks.run(sleeping.lateness)) / sum(result.step_seconds)


def predicted(case: Case, slower: int = 1, stretch: float = 1.0) -> Prediction:
    profile = sleeping.profile(bool(case.plan.slices), stretch)
    cluster = described(sleeping.cluster(case.plan.world, stretch), slower)
    return predict(case.plan, profile, cluster, case.sizes[0], keep=True)


def off(expected: Prediction, result: RunResult, joined: Joined, late: float = 0.0) -> list[str]:
    """What took longer or shorter than predicted, by more than a share of the step."""
    step = median(result.steady_seconds)
    rows = [("step", expected.step_s, step)] + [(row.name, row.predicted_s, row.measured_s) for row in joined.kinds]
    return [name for name, planned, real in rows if abs(planned - real) > (CLOSE + 2 * late) * step]


def params() -> Iterator:
    """Every day two plans of each system, and recomputation on one rank; elsewhere it is slow to say the same again."""
    known: Counter[str] = Counter()
    for case in sleeping.SYSTEMS:
        recomputes = case.plan.recompute != "none"
        known[case.key] += not recomputes
        daily = case.plan.world == 1 if recomputes else known[case.key] <= 2
        yield pytest.param(
            case, marks=[pytest.mark.system(case.key, "P"), *([] if daily else [pytest.mark.slow])], id=str(case)
        )


def as_predicted(case: Case, slower: int = 1) -> None:
    """All of it and every kind of it takes as long as predicted; the last half of the ranks is so many times slower."""
    times = tuple(float(slower) if rank in slow_ranks(case.plan.world) else 1.0 for rank in range(case.plan.world))
    for attempt in range(TRIES):
        stretch = 1.0 + attempt
        expected = predicted(case, slower, stretch)
        result, late = run(case, times, stretch)
        joined = join(expected.timeline(), result.timeline)
        assert joined.only_predicted == joined.only_measured == ()
        wrong = off(expected, result, joined, late)
        if not wrong:
            return
        sleeping.forget(0, 1)  # here, and wherever something was found
        for world in {1, case.plan.world}:
            pool(world).run(sleeping.forget)
    pytest.fail(
        f"{', '.join(wrong)} of {case}: a step of {median(result.steady_seconds):.4f} s, {late:.1%} late\n{joined}"
    )


@pytest.mark.parametrize("case", list(params()))
def test_a_step_takes_as_long_as_predicted(case: Case) -> None:
    as_predicted(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", "sleeping", {"dp": 2, "bucket": 100, "ratio": (2, 1)}, (9,)),
        Case("dapple", "sleeping", {"pp": 2, "stages": (3,), "micro": 3, "schedule": "1f1b"}, (6,)),
    ],
    ids=["replicas", "stages"],
)
def test_ranks_that_are_half_as_fast(case: Case) -> None:
    """Those of the last half: replicas with fewer samples, or stages with fewer blocks."""
    as_predicted(case, slower=2)
    alike = {key: value for key, value in case.choices.items() if key != "ratio"} | {
        "stages": (2,) * (case.plan.pp - 1)
    }
    assert predicted(case, slower=2).step_s < (1 - 2 * CLOSE) * predicted(replace(case, choices=alike), slower=2).step_s


GPIPE, NAIVE = (
    Case(word, "sleeping", {"pp": 2, "stages": (1,), "micro": 4, "schedule": word}, (8,)) for word in ("gpipe", "naive")
)


@pytest.fixture(scope="module")
def gpipe() -> RunResult:
    return run(GPIPE)[0]


def test_another_schedule_would_be_noticed(gpipe: RunResult) -> None:
    """The bound is tight enough to tell orders of work apart: the same stages, but the other order of work."""
    expected = predicted(NAIVE)
    alike = replace(expected.timeline(), title=gpipe.timeline.title)  # who joins two plans is told so
    assert "step" in off(expected, gpipe, join(alike, gpipe.timeline))


@pytest.mark.parametrize("key", ["zb-h1", "zb-h2"])
def test_gradients_of_weights_fill_gaps(key: str) -> None:
    """Blocks sleep long enough on the way to their weights: whole backward passes would be noticed above."""
    case = next(case for case in sleeping.SYSTEMS if case.key == key)
    whole = replace(case, choices={**case.choices, "schedule": "1f1b"})
    assert predicted(case).step_s < (1 - CLOSE) * predicted(whole).step_s


def test_a_load_is_hidden() -> None:
    """What is loaded takes long enough: had it been waited for, that would be noticed above. And it goes on within
    steps, not between them, where nobody looks."""
    waits, hides = (case for case in sleeping.SYSTEMS if case.key == "preload" and case.plan.pp == 1)
    assert predicted(hides).step_s < (1 - 4 * CLOSE) * predicted(waits).step_s
    shares = hidden(run(hides)[0].timeline.events)
    assert len(shares) == STEPS - 1
    assert min(shares) > 0.5  # all of it, but for when both begin


def test_a_message_ends_when_it_arrives_not_when_it_is_taken(gpipe: RunResult) -> None:
    """The second stage is the slow one: messages wait for it, and have long arrived when it takes them."""
    events = {event.name: event for event in gpipe.timeline.events}
    names = [f"{micro}@{step}" for micro in range(1, 4) for step in range(1, STEPS)]
    sent = [events[f"0SEND_F{name}"] for name in names]
    taken = [events[f"1RECV_F{name}"] for name in names]
    assert all(send.end <= receive.start for send, receive in zip(sent, taken, strict=True))
    on_its_way = median(send.end - send.start for send in sent)
    waiting = median(receive.start - send.end for send, receive in zip(sent, taken, strict=True))
    assert on_its_way < waiting / 4
