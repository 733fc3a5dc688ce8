"""The thesis's equations for torchgpipe, beside our program of it: where they are exact, and what they leave out."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.errors import InputError
from trainplan.plan.placement import placement
from trainplan.plan.plan import plan
from trainplan.predict.clock import Played, bubble, play, seconds_by_kind
from trainplan.predict.memory import in_flight
from trainplan.predict.thesis import compute_seconds, exchange_seconds, horovod_seconds, link_seconds
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import COMPUTES, SENDS, Kind
from trainplan.program.program import CostClass, Program


@cache
def program(workers: int, micro: int, schedule: str = "lockstep") -> Program:
    """A block a stage."""
    choices = plan(
        pp=workers, micro=micro, schedule=schedule, stages=tuple(range(1, workers)), blocks=workers
    )  # fmt: skip
    return check(lower(choices, chain(workers), micro))


def played(made: Program, forward=1.0, backward=2.0, links=(), barrier=0.0) -> Played:
    """Seconds of a pass (of all stages alike, or one for each), and of a message over each link."""
    run = seconds_by_kind(made, dict.fromkeys(Kind, 0.0) | {Kind.BARRIER: barrier})
    for kind, value in ((Kind.F, forward), (Kind.B, backward)):
        of = made.kind == kind
        run[of] = np.broadcast_to(value, int(made.stage.max()) + 1)[made.stage[of]]
    sends = np.isin(made.kind, SENDS)
    over = np.array(links or (0.0,) * (made.world - 1), dtype=float)
    run[sends] = over[np.minimum(made.stage, made.peer_stage)[sends]]
    return play(made, run)


def by_equation(workers: int, micro: int, forward: float, backward: float, links) -> float:
    return compute_seconds(workers * micro * (forward + backward), workers, micro) + exchange_seconds(links, micro)


# -- the equations ------------------------------------------------------------------------------------------------


def test_equation_61_on_the_configurations_of_table_61() -> None:
    """A to E, four workers: what the thesis printed is rounded."""
    exact = [compute_seconds(1.0, 4, micro) for micro in (12, 12, 20, 28, 30)]
    assert exact == pytest.approx([0.3125, 0.3125, 0.2875, 0.276786, 0.275], abs=5e-7)
    assert [round(value, 2) for value in exact] == [0.31, 0.31, 0.29, 0.28, 0.28]


@pytest.mark.parametrize(
    ("workers", "micro", "wanted"),
    [
        (4, 1, 1.0), (4, 4, 0.4375), (4, 8, 0.34375), (4, 24, 0.28125), (4, 32, 0.273438), (2, 8, 0.5625),
        (8, 8, 0.234375),
    ],
)  # fmt: skip
def test_equation_61_worked(workers: int, micro: int, wanted: float) -> None:
    assert compute_seconds(1.0, workers, micro) == pytest.approx(wanted, abs=1e-6)


# Bytes a sample at three cuts (MB), micro-batches × samples → seconds, over NVLink, PCIe, NVLink.
WORKED = [
    ((0.262144, 0.131072, 0.065536), 32, 64, 0.050360),
    ((1.048576, 0.524288, 0.262144), 32, 64, 0.199401),
    ((0.524288, 0.262144, 0.262144), 32, 64, 0.100390),
    ((3.211264, 1.605632, 0.802816), 12, 24, 0.088371),
    ((3.211264, 1.605632, 0.802816), 12, 32, 0.117734),
    ((8.388608, 4.194304, 4.194304), 12, 4, 0.038982),
]


@pytest.mark.parametrize(("boundaries", "micro", "samples", "wanted"), WORKED)
def test_equation_62_worked(boundaries: tuple[float, ...], micro: int, samples: int, wanted: float) -> None:
    rates = (48e9, 11e9, 48e9)
    links = [link_seconds(10e-6, rate, size * 1e6, samples) for rate, size in zip(rates, boundaries, strict=True)]
    assert exchange_seconds(links, micro) == pytest.approx(wanted, abs=5e-7)


def test_equation_62_on_two_workers_and_on_one() -> None:
    assert exchange_seconds([link_seconds(0.01, 100e6, 1e6, 10)], 4) == pytest.approx(0.88)
    assert exchange_seconds([], 4) == 0.0


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda: compute_seconds(1.0, 0, 4), "count from 1"),
        (lambda: exchange_seconds([1.0] * 5, 3), r"with 6 workers it wants 4 micro-batches or more"),
        (lambda: exchange_seconds([1.0], 0), r"with 2 workers it wants 1 micro-batches or more"),
    ],
)
def test_equations_refuse_what_they_do_not_hold_for(ask, why: str) -> None:
    with pytest.raises(InputError, match=why):
        ask()


# -- the program --------------------------------------------------------------------------------------------------

# Two workers, two micro-batches: who does what in which phase.
LISTS = [
    "F0 | SEND_F0 | F1 | SEND_F1 | | | RECV_B1 | B1 | RECV_B0 | B0 | STEP",
    "| RECV_F0 | F0 | RECV_F1 | F1 | B1 | SEND_B1 | B0 | SEND_B0 | | STEP",
]


def test_lists_of_torchgpipe_as_found() -> None:
    names = [[name.lstrip("0123456789") for name in program(2, 2).rank_list(rank)] for rank in (0, 1)]
    assert [" ".join("|" if "BARRIER" in name else name for name in own) for own in names] == LISTS
    numbers = [f"0BARRIER.{number}" if number else "0BARRIER" for number in range(10)]
    assert [name for name in program(2, 2).rank_list(1) if "BARRIER" in name] == numbers


# workers, micro-batches, forward, backward, links → seconds; the same where messages overlap with compute.
LOCKSTEP = [
    (4, 8, 1, 2, (0.5, 0.5, 0.5), 43, 36),
    (4, 12, 1, 2, (0.25, 0.25, 0.25), 52, 46.5),
    (2, 4, 1, 1, (1,), 18, 12),
    (8, 8, 1, 2, (0.1,) * 7, 47.8, 46.4),
    (3, 3, 2, 3, (1, 1), 33, 29),
    (4, 8, 1, 2, (1, 3, 2), 87, 66),
    (4, 8, 1, 2, (1, 2, 4), 103, None),
    (4, 12, 1, 2, (3, 1, 2), 125, None),
    (5, 9, 1, 2, (1, 5, 2, 3), 143, None),
]


@pytest.mark.system("torchgpipe-as-found", "P")
@pytest.mark.parametrize(("workers", "micro", "forward", "backward", "links", "wanted", "overlapped"), LOCKSTEP)
def test_torchgpipe_as_found_worked(workers, micro, forward, backward, links, wanted, overlapped) -> None:
    found = played(program(workers, micro), forward, backward, links)
    assert found.makespan == pytest.approx(wanted, abs=1e-9)
    assert by_equation(workers, micro, forward, backward, links) == pytest.approx(wanted, abs=1e-9)
    if overlapped is not None:
        gpipe = played(program(workers, micro, "gpipe"), forward, backward, links)
        assert gpipe.makespan == pytest.approx(overlapped, abs=1e-9)


seconds = st.integers(1, 9).map(float)


@pytest.mark.system("torchgpipe-as-found", "P")
@examples(500)
@given(st.data(), st.integers(2, 7), st.integers(0, 8), seconds, seconds)
def test_torchgpipe_as_found_takes_what_the_equations_say(data, workers, more, forward, backward) -> None:
    """Whole numbers, so equal means equal."""
    micro = max(1, workers - 2) + more
    links = data.draw(st.lists(st.integers(0, 9), min_size=workers - 1, max_size=workers - 1))
    found = played(program(workers, micro), forward, backward, links)
    assert found.makespan == by_equation(workers, micro, forward, backward, links)


@pytest.mark.system("torchgpipe-as-found", "P")
@pytest.mark.parametrize(("workers", "micro"), [(2, 1), (3, 5), (4, 8), (5, 2), (6, 9)])
def test_torchgpipe_as_found_idles_and_holds_as_much_as_gpipe(workers: int, micro: int) -> None:
    found = played(program(workers, micro))
    assert bubble(found) == pytest.approx((workers - 1) / (micro + workers - 1), abs=1e-12)
    assert {in_flight(found, rank) for rank in range(workers)} == {micro}
    slow = played(program(workers, micro), links=(0.5,) * (workers - 1))
    assert slow.makespan == (micro + workers - 1) * 3 + 2 * (micro + workers - 2) * 0.5


@examples(60)
@given(st.data(), st.integers(2, 7), st.integers(1, 8))
def test_lockstep_is_a_sum_over_ticks_for_any_number_of_micro_batches(data, workers, micro) -> None:
    """Also for fewer than 6.2 allows, where it would count some exchanges less than no times."""
    links = data.draw(st.lists(st.integers(0, 9), min_size=workers - 1, max_size=workers - 1))
    forward, backward = (np.array(data.draw(st.lists(seconds, min_size=workers, max_size=workers))) for _ in range(2))
    barrier = data.draw(st.integers(0, 2))
    ticks = range(micro + workers - 1)
    busy = [[stage for stage in range(workers) if 0 <= tick - stage < micro] for tick in ticks]
    compute = sum(forward[now].max() + backward[now].max() for now in busy)
    # In the exchange before a tick, the links to the stages that have a turn in it are in use.
    exchange = 2 * sum(max(links[stage - 1] for stage in now if stage) for now in busy[1:])
    barriers = 4 * (micro + workers) - 6
    found = played(program(workers, micro), forward, backward, links, barrier)
    assert found.makespan == compute + exchange + barriers * barrier


def test_fewer_micro_batches_than_the_equation_allows() -> None:
    """One micro-batch through six stages uses the links one after the other."""
    found = played(program(6, 1), links=(1, 2, 3, 4, 5))
    assert found.makespan == 6 * 3 + 2 * (1 + 2 + 3 + 4 + 5)
    literal = 2 * ((1 + 2 + 3 + 4) + (1 - 4) * 5 + 4 * 5)  # as 6.2 is written
    assert literal == 30 == found.makespan - 18  # here it is right nevertheless …
    found, literal = played(program(6, 1), links=(5, 1, 1, 1, 5)), 2 * (4 * 5 + (1 - 4) * 5 + 4 * 5)
    assert (literal, found.makespan - 18) == (50, 26)  # … and here it is not


@examples(30)
@given(
    st.integers(1, 2), st.sampled_from(["none", "full"]), st.sampled_from(["gloo", "gloo-staged", "nccl"]),
    st.sampled_from([(0, 1, 2, 3), (0, 1, 2, 0), (1, 0, 1, 0)]),
)  # fmt: skip
def test_nothing_is_computed_while_anything_is_sent(dp, recompute, backend, ranks) -> None:
    """Also where hosts run ahead of their devices, over a skip connection, in every replica by itself, and with several
    stages a rank."""
    choices = plan(
        dp=dp, pp=max(ranks) + 1, micro=3, schedule="lockstep", stages=(1, 2, 3), blocks=4, recompute=recompute,
        bucket=500, placement=placement(dp, (ranks,)),
    )  # fmt: skip
    made = check(lower(choices, chain(4, skips=((0, 2), (0, 3))), 3 * dp, backend))
    found = play(made, seconds_by_kind(made, dict.fromkeys(Kind, 1.0) | {Kind.SEND_F: 2.0, Kind.SEND_B: 3.0}))
    for replica in range(dp):
        sends = np.flatnonzero(np.isin(made.kind, SENDS) & (made.pipeline == replica))
        passes = np.flatnonzero(np.isin(made.kind, COMPUTES) & (made.pipeline == replica))
        meanwhile = (found.start[sends][:, None] < found.end[passes]) & (
            found.start[passes] < found.end[sends][:, None]
        )
        crossing = sum(ranks[a] != ranks[b] for a, b in ((0, 1), (1, 2), (2, 3), (0, 2), (0, 3)))
        assert len(sends) == 2 * 3 * crossing
        assert not meanwhile.any()


# -- what the equations leave out ---------------------------------------------------------------------------------

# Configurations of table 6.1 (ResNet-18 on ImageNet, four devices): samples, micro-batches, seconds an epoch.
TABLE = {
    "A": (24, 12, 1206.34),
    "B": (32, 12, 1030.49),
    "C": (32, 20, 936.27),
    "D": (12, 28, None),
    "E": (16, 30, None),
}
IMAGES = 1_281_000


def epoch(name: str, fixed: float, marginal: float) -> float:
    """Seconds of an epoch of our program, where a tick (forward and backward) takes so many seconds and so many more a
    sample."""
    samples, micro, _ = TABLE[name]
    tick = fixed + marginal * samples
    return played(program(4, micro), tick / 3, 2 * tick / 3).makespan * IMAGES / (samples * micro)


def test_torchgpipe_as_found_needs_the_fixed_cost_of_a_tick() -> None:
    """A and B tell what a tick costs however small it is; then C comes out, which was not used, and so does what the
    text says of the rows that are lost. In proportion to the samples, as equation 6.1 has it, nothing of it does."""
    ticks = {name: TABLE[name][2] * samples / IMAGES * m / (4 + m - 1) for name, (samples, m, s) in TABLE.items() if s}
    marginal = (ticks["B"] - ticks["A"]) / 8
    fixed = ticks["A"] - 24 * marginal
    assert (fixed, marginal) == pytest.approx((10.5e-3, 0.31e-3), rel=0.05)
    found = {name: epoch(name, fixed, marginal) for name in TABLE}
    assert found["A"] == pytest.approx(1206.34)
    assert found["C"] == pytest.approx(936.27, rel=0.02)
    assert (found["B"] / found["A"], found["C"] / found["A"]) == pytest.approx((0.854, 0.776), rel=0.1)
    assert min(found, key=found.__getitem__) == "C"
    assert found["E"] > 1.2 * found["B"]
    plain = {name: epoch(name, 0.0, marginal) for name in TABLE}
    assert (plain["B"] / plain["A"], plain["C"] / plain["A"]) == pytest.approx((1.0, 0.92))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_recomputing_all_but_the_last_micro_batch_costs(workers: int) -> None:
    """One device computes 1 + (m − 1) / 3m times as long, with B = 2F; in lockstep all ticks back but the first are
    longer by a forward pass."""
    for micro in (1, 2, 5):
        choices = plan(
            pp=workers, micro=micro, schedule="lockstep" if workers > 1 else "naive", blocks=workers,
            stages=tuple(range(1, workers)), recompute="except-last",
        )  # fmt: skip
        made = check(lower(choices, chain(workers), micro))
        run = seconds_by_kind(made, dict.fromkeys(Kind, 0.0) | {Kind.F: 1.0, Kind.R: 1.0, Kind.B: 2.0})
        again = micro + workers - 2 if micro > 1 else 0
        assert play(made, run).makespan == 3 * (micro + workers - 1) + again
        assert (made.kind == Kind.R).sum() == workers * (micro - 1)


# torchgpipe's own benchmark: ResNet-101 on P40s, its batches, chunks and balances (of 370 layers; here at the nearest
# of 35 blocks), and how many times faster it was than one device with plain PyTorch.
PUBLISHED = [
    (1, 220, 2, (), 0.853),
    (2, 25_000, 1667, (13,), 1.414),
    (4, 5632, 256, (5, 13, 24), 2.774),
    (8, 5400, 150, (3, 5, 8, 12, 16, 22, 28), 4.294),
]
# Milliseconds a sample of the blocks, forward and backward, as `trainplan profile resnet101:imagenet --device P40`
# estimates them; forward is 37 % of it. And the megabytes a sample that each leaves to the next.
RESNET101 = np.array([6.09, 12.15, *[10.28] * 2, 12.53, *[6.65] * 3, 9.38, *[4.91] * 22, 7.81, 4.04, 4.12, 0.13]) / 22
FORWARD = 0.37
LEAVES = np.array([0.803, *[3.211] * 3, *[1.606] * 4, *[0.803] * 23, *[0.401] * 3])
PCIE = 11.0  # MB a millisecond; assumed


@pytest.mark.system("gpipe", "P")
@pytest.mark.parametrize(("workers", "batch", "micro", "cuts", "published"), PUBLISHED)
def test_gpipe_is_as_fast_as_torchgpipe_says(workers, batch, micro, cuts, published) -> None:
    """Within 10 %; the equations, without recomputation and with equal stages, say up to 78 % more."""
    choices = plan(
        pp=workers, micro=micro, schedule="gpipe" if workers > 1 else "naive", stages=cuts, blocks=len(RESNET101),
        recompute="except-last",
    )  # fmt: skip
    made = lower(choices, chain(len(RESNET101)), batch=micro, backend="nccl")
    samples = batch / micro

    def milliseconds(c: CostClass) -> float:
        whole = RESNET101[c.first : c.last].sum()
        if c.kind in SENDS:
            boundary = c.last if c.kind is Kind.SEND_F else c.first  # sent from here on, or back over here
            return samples * LEAVES[boundary - 1] / PCIE
        return samples * whole * {Kind.F: FORWARD, Kind.R: FORWARD, Kind.B: 1 - FORWARD}.get(c.kind, 0.0)

    found = play(made, np.array([milliseconds(c) for c in made.classes])[made.cost])
    assert batch * RESNET101.sum() / found.makespan == pytest.approx(published, rel=0.1)
    by_equation = 1 / compute_seconds(1.0, workers, micro)
    assert by_equation > 1.17 * published


# -- equation 5.1 -----------------------------------------------------------------------------------------------------


@pytest.mark.system("horovod", "P")
def test_horovod_by_equation_5_1() -> None:
    fast, slow = (10e-6, 10e9), (20e-6, 5e9)
    assert horovod_seconds(1.2, 102e6, [fast, slow, fast, fast]) == pytest.approx(0.31932)
    assert horovod_seconds(1.2, 44.6e6, [fast] * 4) == pytest.approx(0.30675)
    assert horovod_seconds(1.2, 44.6e6, [fast]) == 1.2  # alone there is nothing to exchange
    with pytest.raises(InputError, match="as many links as workers"):
        horovod_seconds(1.2, 44.6e6, [])
