"""Simulated time equals what is known in closed form. (Numbers for each order: test_orders.py; memory:
test_memory_forms.py.)"""

import itertools

import numpy as np
import pytest

from synthetic import chain
from tests.predict.pipelines import pipeline, timed
from trainplan.plan.plan import plan
from trainplan.predict.clock import bubble, play, seconds_by_kind
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind

GRID = [
    (p, m, f, b) for p, m, (f, b) in itertools.product(range(2, 7), range(1, 13), ((1, 1), (1, 2), (2, 3)))
]  # fmt: skip


@pytest.mark.system("gpipe", "P")
def test_bubble_of_gpipe() -> None:
    for p, m, forward, backward in GRID:
        played = timed(pipeline("gpipe", p, m), forward, backward)
        assert played.makespan == (m + p - 1) * (forward + backward)
        assert bubble(played) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.system("dapple", "P")
def test_bubble_of_1f1b_dapple() -> None:
    for p, m, forward, backward in GRID:
        played = timed(pipeline("1f1b", p, m), forward, backward)
        assert played.makespan == (m + p - 1) * (forward + backward)
        assert bubble(played) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.system("naive", "P")
def test_time_of_naive() -> None:
    for p, m, forward, backward in GRID:
        played = timed(pipeline("naive", p, m), forward, backward)
        assert played.makespan == m * p * (forward + backward)
        assert bubble(played) == pytest.approx((p - 1) / p, abs=1e-12)


@pytest.mark.parametrize(("stages", "message", "slope"), [(4, 0.5, 3.75), (4, 1.0, 4.5), (8, 0.5, 3.875)])
def test_steady_period_of_1f1b(stages: int, message: float, slope: float) -> None:
    """F + B + 2c(p−1)/p."""
    short, long = (timed(pipeline("1f1b", stages, m), message=message).makespan for m in (4 * stages, 8 * stages))
    assert (long - short) / (4 * stages) == pytest.approx(slope)
    assert slope == 3 + 2 * message * (stages - 1) / stages


def test_unequal_stages() -> None:
    forward = np.array([1.0, 3.0, 2.0, 1.0])
    assert timed(pipeline("gpipe", 4, 8), forward, 2 * forward).makespan == 84
    assert timed(pipeline("1f1b", 4, 8), forward, 2 * forward).makespan == 78


@pytest.mark.system("single", "P")
def test_time_of_a_single_device() -> None:
    played = timed(check(lower(plan(blocks=3), chain(3), 4)), 3.0, 6.0, STEP=0.5)
    assert played.makespan == 9.5
    assert bubble(played) == 0.0


@pytest.mark.system("accumulate", "P")
def test_time_of_accumulate() -> None:
    for micro in range(1, 6):
        played = timed(check(lower(plan(micro=micro, blocks=3), chain(3), 8)), 3.0, 6.0, STEP=0.5)
        assert played.makespan == micro * 9 + 0.5


@pytest.mark.system("ddp", "P")
def test_time_of_ddp_with_a_bucket_a_block() -> None:
    """Buckets go one after the other, each once its block's backward is over: the step ends with the last of them."""
    blocks = 5
    program = check(lower(plan(dp=2, bucket=1000, blocks=blocks), chain(blocks), 2))
    pieces = program.kind == Kind.B
    for exchange in (0.0, 0.5, 2.0, 2.5, 10.0):
        run = seconds_by_kind(
            program, {Kind.F: blocks, Kind.B: 0, Kind.REDUCE_GRAD: exchange, Kind.LOSS: 0, Kind.STEP: 0.25}
        )
        run[pieces] = 2.0
        wanted = blocks + max(2 * (k + 1) + (blocks - k) * exchange for k in range(blocks)) + 0.25
        assert play(program, run).makespan == wanted
        off = check(lower(plan(dp=2, bucket=1000, blocks=blocks, overlap="off"), chain(blocks), 2))
        assert play(off, run).makespan == blocks * (1 + 2 + exchange) + 0.25


@pytest.mark.system("ddp", "P")
def test_ddp_exchanges_once_however_many_passes() -> None:
    for micro in (1, 2, 5):
        program = check(lower(plan(dp=2, micro=micro, bucket=10**9, blocks=2), chain(2), 2 * micro))
        assert timed(program, REDUCE_GRAD=7.0).makespan == micro * 3 + 7


def test_recomputation_costs_a_forward_pass() -> None:
    for schedule, p, m in (("gpipe", 4, 8), ("1f1b", 4, 8), ("naive", 3, 4)):
        played = timed(pipeline(schedule, p, m, recompute="full"), 1.0, 2.0)
        if schedule == "naive":
            # The gradient arrives after the last stage has recomputed; the others do so while they wait for it.
            assert played.makespan == m * (p * 1 + 1 + p * 2)
        else:
            assert played.makespan <= (m + p - 1) * (1 + 1 + 2)
            assert played.makespan >= m * (1 + 1 + 2)
