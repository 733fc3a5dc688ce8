"""Worked numbers of the orders of work: bubbles by either definition, other sizes, and copies of the weights."""

import pytest

from synthetic import chain
from tests.predict.pipelines import in_flight, pipeline, timed
from trainplan.plan.plan import plan
from trainplan.predict.clock import Played, bubble, compute_seconds
from trainplan.predict.memory import peaks
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import COMPUTES, Kind, Value

PASSES = [kind for kind in COMPUTES if kind is not Kind.STEP]


def span(found: Played) -> float:
    """The longest time from the first pass of a rank to its last: what zero-bubble papers divide by."""
    lists, kind = found.program.lists, found.program.kind
    rows = [[op for op in lists.row(rank) if kind[op] in PASSES] for rank in range(found.program.world)]
    return max(found.end[row].max() - found.start[row].min() for row in rows)


def idle_within_spans(found: Played) -> float:
    return 1 - float(compute_seconds(found).sum()) / (found.program.world * span(found))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (3, 9), (4, 7), (4, 16)])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 3, 1), (3, 3, 1), (2, 2, 3)])
def test_span_of_zb_h2(p, m, f, i, w) -> None:
    found = timed(pipeline("zb-h2", p, m), f, first=i, second=w)
    assert span(found) == m * (f + i + w) + (p - 1) * max(0, i - f, f + i - 2 * w)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 7), (4, 16), (5, 9)])
def test_zb_v_idles_nowhere_within_its_span(p: int, m: int) -> None:
    assert span(timed(pipeline("zb-v", p, m, 2), chunks=2)) == 3 * m


# Four ranks; 4, 8 and 16 micro-batches, F = I = W: share of the longest span in which ranks idle.
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h2", 1), ("zb-v", 2)])
def test_span_bubbles_as_numbers(schedule: str, chunks: int) -> None:
    found = [idle_within_spans(timed(pipeline(schedule, 4, m, chunks), chunks=chunks)) for m in (4, 8, 16)]
    assert found == pytest.approx((0.2, 0, 0), abs=1e-12)


# Four ranks, twelve micro-batches; F, I, W → seconds, and share of the longest span in which ranks idle.
UNEVEN = {
    ("zb-h1", 1, (1, 1.2, 0.8)): (40.2, None),
    ("zb-h2", 1, (1, 1.2, 0.8)): (39.0, 0.0476),
    ("zb-v", 2, (1, 1.2, 0.8)): (37.8, 0.0323),
    ("zb-h1", 1, (1, 1, 0.5)): (34.5, None),
    ("zb-h2", 1, (1, 1, 0.5)): (33.0, None),
    ("zb-v", 2, (1, 1, 0.5)): (31.5, None),
}


@pytest.mark.parametrize(("schedule", "chunks", "parts"), UNEVEN)
def test_zero_bubble_with_unequal_parts(schedule: str, chunks: int, parts: tuple[float, float, float]) -> None:
    f, i, w = parts
    seconds, idle = UNEVEN[schedule, chunks, parts]
    found = timed(pipeline(schedule, 4, 12, chunks), f, first=i, second=w, chunks=chunks)
    assert found.makespan == pytest.approx(seconds)
    if idle is not None:
        assert idle_within_spans(found) == pytest.approx(idle, abs=5e-5)


def test_bubbles_of_chimera_where_slots_are_equal() -> None:
    found = [bubble(timed(pipeline("chimera", 4, m), 1.0, 1.0)) for m in (4, 8, 16)]
    assert found == pytest.approx((0.2, 0.11111, 0.05882), abs=1e-5)


def test_bubble_of_gems_has_a_limit() -> None:
    """(p − 1) / (p + ½), with B = 2F and ever more micro-batches."""
    found = [bubble(timed(pipeline("gems", 4, m))) for m in (20, 200)]
    assert found == pytest.approx([3 / 4.5] * 2, abs=0.01)
    assert abs(found[1] - 3 / 4.5) < abs(found[0] - 3 / 4.5) < 0.006


# -- sizes that the closed forms do not cover -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "seconds", "peak"),
    [(10, 34.5, [12, 10, 8, 6]), (6, 22.5, None), (3, 15.0, None), (8, 28.5, [11, 9, 7, 5])],
)
def test_interleaved_with_other_numbers_of_micro_batches(micro: int, seconds: float, peak: list[int] | None) -> None:
    """Two chunks on four ranks. With fewer micro-batches than ranks the closed form (13.5) does not hold."""
    made = pipeline("interleaved", 4, micro, 2)
    assert timed(made, chunks=2).makespan == seconds
    if peak:
        assert [in_flight(made, rank) for rank in range(4)] == peak


@pytest.mark.parametrize(("schedule", "ranks", "micro", "peak"), [("zb-h1", 4, 8, [4] * 4), ("zb-h2", 3, 6, [5] * 3)])
def test_what_zero_bubble_lists_hold(schedule: str, ranks: int, micro: int, peak: list[int]) -> None:
    made = pipeline(schedule, ranks, micro)
    assert [in_flight(made, rank) for rank in range(ranks)] == peak


# Depth, micro-batches, seconds of backward → seconds of chimera, chimera-doubled and 1f1b.
UNITS = {
    (4, 8, 2): (30, 27, 33),
    (4, 16, 2): (58, 51, 57),
    (4, 24, 2): (86, 75, 81),
    (8, 16, 2): (66, 57, 69),
    (8, 24, 2): (96, None, 93),
    (8, 32, 2): (126, 105, 117),
    (4, 8, 3): (42, 36, 44),  # with recomputation, for which the doubled one has reason
    (4, 16, 3): (82, 70, 76),
}


@pytest.mark.parametrize(("depth", "micro", "backward"), UNITS)
def test_chimera_beside_1f1b(depth: int, micro: int, backward: int) -> None:
    """Directly put together, units cost more than 1F1B's from (2D − 1) / (D − 2) of them on; doubled ones never do."""
    for schedule, wanted in zip(("chimera", "chimera-doubled", "1f1b"), UNITS[depth, micro, backward], strict=True):
        if wanted is not None:
            assert timed(pipeline(schedule, depth, micro), 1.0, backward).makespan == wanted, schedule
    if backward == 2:
        direct, _, plain = UNITS[depth, micro, backward]
        assert (direct > plain) == (micro / depth > (2 * depth - 1) / (depth - 2))


def test_what_chimera_doubled_holds() -> None:
    assert [in_flight(pipeline("chimera-doubled", 4, 8), rank) for rank in range(4)] == [7, 8, 8, 7]


# -- copies of the weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chunks", "pairs", "copies"),
    [
        ("naive", 1, 1, 1), ("gpipe", 1, 1, 1), ("lockstep", 1, 1, 1), ("looped", 2, 1, 2), ("1f1b", 1, 1, 1),
        ("1f1b-early", 1, 1, 1), ("interleaved", 2, 1, 2), ("zb-h1", 1, 1, 1), ("zb-h2", 1, 1, 1), ("zb-v", 2, 1, 2),
        ("gems", 1, 1, 2), ("chimera", 1, 1, 2), ("chimera", 1, 2, 4), ("chimera-doubled", 1, 1, 2),
    ],
)  # fmt: skip
def test_weights_of_a_rank(schedule: str, chunks: int, pairs: int, copies: int) -> None:
    """Stages of 1000 bytes each: several chunks are several stages, and directions are copies."""
    made = pipeline(schedule, 4, 8, chunks, pairs=pairs)
    assert [made.bytes_at_start(rank, Value.WEIGHTS) for rank in range(4)] == [1000 * copies] * 4


@pytest.mark.system("gems", "P")
def test_memory_of_gems() -> None:
    """Two copies of weights, gradients and optimizer state, and the activations of one micro-batch: 2(P + G + O) + A,
    where GPipe has one copy, and the activations of all."""
    profile = chain(4, saved=10_000, boundary=0, state_bytes_per_parameter=8.0)
    held = {}
    for schedule in ("gems", "gpipe"):
        made = check(lower(plan(pp=4, micro=8, schedule=schedule, stages=(1, 2, 3), blocks=4), profile, 8))
        held[schedule] = [peak.breakdown for peak in peaks(timed(made))]
    for rank in range(4):
        assert held["gems"][rank] == {"weights": 2000, "gradients": 2000, "optimizer": 4000, "saved": 10_000}
        assert held["gpipe"][rank]["saved"] == 80_000
        assert held["gpipe"][rank]["weights"] == 1000
