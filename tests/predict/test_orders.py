"""Times and memory of the orders of work against what is known of them in closed form, over random sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.predict.pipelines import in_flight, pipeline, timed
from trainplan.predict.clock import bubble

few = settings(max_examples=40, deadline=None)
seconds = st.integers(1, 4).map(float)


@pytest.mark.system("dapple", "P")
@few
@given(st.integers(1, 6), st.integers(1, 12), seconds, seconds, st.floats(0, 1))
def test_dapple_early_waits_for_no_message(p, m, f, b, share) -> None:
    if p == 1:
        return
    c = share * (f + b) / 2
    made = pipeline("1f1b-early", p, m)
    assert timed(made, f, b, message=c).makespan == pytest.approx((m + p - 1) * (f + b) + 2 * (p - 1) * c)
    assert [in_flight(made, r) for r in range(p)] == [min(m, 2 * (p - r) - 1) for r in range(p)]


@pytest.mark.system("interleaved", "P")
@few
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 4), seconds, seconds)
def test_interleaved_shrinks_the_bubble(p, rounds, v, f, b) -> None:
    m = p * rounds
    made = pipeline("interleaved", p, m, v)
    assert timed(made, f, b, chunks=v).makespan == pytest.approx((m + (p - 1) / v) * (f + b))
    wanted = [min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]
    assert [in_flight(made, r) for r in range(p)] == wanted


@pytest.mark.system("looped-bfs", "P")
@few
@given(st.integers(2, 5), st.integers(0, 8), st.integers(2, 4), seconds, seconds)
def test_looped_bfs_has_the_same_bubble_and_holds_everything(p, more, v, f, b) -> None:
    m = p + more
    made = pipeline("looped", p, m, v)
    assert timed(made, f, b, chunks=v).makespan == pytest.approx((m + (p - 1) / v) * (f + b))
    assert {in_flight(made, r) for r in range(p)} == {m * v}


@pytest.mark.system("zb-h1", "P")
@few
@given(st.integers(2, 5), st.integers(0, 8), seconds, seconds, seconds)
def test_zb_h1_fills_the_bubble_with_weights(p, more, f, i, w) -> None:
    m = p + more
    made = pipeline("zb-h1", p, m)
    assert timed(made, f, first=i, second=w).makespan == m * (f + i + w) + (p - 1) * max(f, i, f + i - w)
    assert {in_flight(made, r) for r in range(p)} == {p}


@pytest.mark.system("zb-h2", "P")
@few
@given(st.integers(2, 4), st.integers(0, 8), seconds, seconds, seconds)
def test_zb_h2_fills_the_start_too(p, more, f, i, w) -> None:
    m = 2 * p - 1 + more
    made = pipeline("zb-h2", p, m)
    assert timed(made, f, first=i, second=w).makespan == m * (f + i + w) + (p - 1) * max(f, i - f, f + i - 2 * w)
    assert {in_flight(made, r) for r in range(p)} == {2 * p - 1}


@pytest.mark.system("zb-v", "P")
@few
@given(st.integers(2, 5), st.integers(0, 8))
def test_zb_v_has_no_bubble_but_the_way_down(p, more) -> None:
    m = 2 * p - 1 + more
    made = pipeline("zb-v", p, m, 2)
    assert timed(made, chunks=2).makespan == 3 * m + (p - 1) / 2
    assert {in_flight(made, r) for r in range(p)} == {2 * p}


@pytest.mark.system("gems", "P")
@few
@given(st.integers(2, 6), st.integers(2, 10), seconds, st.integers(0, 3))
def test_gems_keeps_one_micro_batch_alive(p, m, f, more) -> None:
    b = f + more
    made = pipeline("gems", p, m)
    assert timed(made, f, b).makespan == p * f + m * p * b + (m - 1) * f
    assert {in_flight(made, r) for r in range(p)} == {1}


@pytest.mark.system("chimera", "P")
@few
@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 4), st.integers(1, 4))
def test_chimera_has_half_the_bubble_where_slots_are_equal(depth, units, pairs) -> None:
    if depth // 2 % pairs:
        return
    made = pipeline("chimera", depth, units * depth, pairs=pairs)
    assert timed(made, 1.0, 1.0).makespan == 2 * units * depth + depth / pairs - 2
    if pairs == 1:
        direct = (5 * depth - 4) + (units - 1) * (4 * depth - 2)
        assert timed(made).makespan == direct
        held = [depth // 2 + 1 + min(r, depth - 1 - r) for r in range(depth)]
        assert [in_flight(made, r) for r in range(depth)] == held


@pytest.mark.system("chimera", "P")
@few
@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 3))
def test_chimera_doubled_repairs_longer_backwards(depth, units) -> None:
    micro = 2 * depth * units
    made = pipeline("chimera-doubled", depth, micro)
    assert timed(made).makespan == 3 * micro + 1.5 * (depth - 2)
    held = [3 * depth // 2 + 1 + min(r, depth - 1 - r) for r in range(depth)]
    assert [in_flight(made, r) for r in range(depth)] == held


# p = 4; m = 4, 8, 16; F = 1, B = 2 or I = W = 1.
BUBBLES = {
    ("gpipe", 1): (0.42857, 0.27273, 0.15789),
    ("1f1b", 1): (0.42857, 0.27273, 0.15789),
    ("interleaved", 2): (0.27273, 0.15789, 0.08571),
    ("looped", 2): (0.27273, 0.15789, 0.08571),
    ("zb-h1", 1): (0.2, 0.11111, 0.05882),
    ("zb-h2", 1): (0.25, 0.11111, 0.05882),
    ("zb-v", 2): (0.2, 0.05882, 0.03030),
    ("chimera", 1): (0.25, 0.2, 0.17241),
    ("gems", 1): (0.69231, 0.68, 0.67347),
    ("naive", 1): (0.75, 0.75, 0.75),
}


@pytest.mark.parametrize(("schedule", "chunks"), BUBBLES)
def test_bubbles_as_numbers(schedule: str, chunks: int) -> None:
    found = [bubble(timed(pipeline(schedule, 4, m, chunks), chunks=chunks)) for m in (4, 8, 16)]
    assert found == pytest.approx(BUBBLES[schedule, chunks], abs=5e-6)


# p = 4, F = 1, B = 2 (I = W = 1); m = 8, 16, 32; latency of a message .5 and 1.
WITH_MESSAGES = {
    ("gpipe", 1): ((36, 60, 108), (39, 63, 111)),
    ("1f1b", 1): ((41, 71, 131), (49, 85, 157)),
    ("1f1b-early", 1): ((36, 60, 108), (39, 63, 111)),
    ("zb-h1", 1): ((33, 57, 105), (41, 71, 131)),
    ("interleaved", 2): ((35.5, 59.5, 107.5), (46, 75.5, 134.5)),
    ("chimera", 1): ((35.5, 67.5, 131.5), (41, 77, 149)),
}


@pytest.mark.parametrize(("schedule", "chunks"), WITH_MESSAGES)
def test_what_messages_cost_each_order(schedule: str, chunks: int) -> None:
    """1F1B is slower than GPipe as soon as a message takes time at all: GPipe pays for filling and draining,
    (m+p−1)(F+B) + 2(p−1)c, and 1F1B for every round."""
    for latency, wanted in zip((0.5, 1.0), WITH_MESSAGES[schedule, chunks], strict=True):
        made = [pipeline(schedule, 4, m, chunks) for m in (8, 16, 32)]
        assert [timed(one, message=latency, chunks=chunks).makespan for one in made] == list(wanted)
