"""Requests become plans with nothing left open."""

from dataclasses import replace

import pytest

from synthetic import chain
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, Request
from trainplan.plan.text import parse, text
from trainplan.predict.predict import predict
from trainplan.solve.exchange import bucket_sizes
from trainplan.solve.limits import limited
from trainplan.solve.partition.bottleneck import slowest
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import resolve, solve
from trainplan.units import MIB

SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def profile():
    return chain(
        blocks=12, forward=1e-3, backward=2e-3, saved=4 * MIB, boundary=10**5, weights=8 * MIB, samples=SIZES,
        flat=False, device="TitanRTX",
    )  # fmt: skip


@pytest.fixture(scope="module")
def four():
    return cluster("4xTitanRTX")


def shape(plan: Plan) -> tuple:
    return plan.dp, plan.pp, plan.schedule, plan.recompute


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("single", (1, 1, "naive", "none")),
        ("ddp", (4, 1, "naive", "none")),
        ("ddp dp=2", (2, 1, "naive", "none")),
        ("naive", (1, 4, "naive", "none")),
        ("gpipe", (1, 4, "gpipe", "except-last")),
        ("gpipe pp=2", (1, 2, "gpipe", "except-last")),
        ("dapple", (1, 4, "1f1b", "none")),
        ("dapple dp=2", (2, 2, "1f1b", "none")),
        ("pp=3", (1, 3, "1f1b", "none")),
        ("dp=2 pp=2", (2, 2, "1f1b", "none")),
        ("stages=3,6", (1, 3, "1f1b", "none")),
        ("micro=4", (1, 1, "naive", "none")),
        ("recompute=full", (1, 1, "naive", "full")),
        ("accumulate", (1, 1, "naive", "none")),
    ],
)
def test_what_is_open_gets_the_sensible_value(line, expected, profile, four):
    plan = resolve(parse(line), profile, four, 64)
    assert shape(plan) == expected
    assert plan.world == expected[0] * expected[1]
    assert predict(plan, profile, four, 64).step_s > 0


@pytest.mark.parametrize("line", ["single", "ddp", "naive", "gpipe", "dapple dp=2", "accumulate", "pp=3 micro=1"])
def test_the_text_of_a_plan_is_the_same_plan_again(line, profile, four):
    plan = resolve(parse(line), profile, four, 64)
    again = resolve(parse(text(plan)), profile, four, 64)
    assert replace(again, key=plan.key) == plan


def test_answers_are_deterministic(profile, four):
    assert len({text(resolve(parse("pp=4 dp=1"), profile, four, 64, Tables(profile))) for _ in range(3)}) == 1


def test_accumulation_has_more_than_one_micro_batch(profile, four):
    assert resolve(parse("accumulate"), profile, four, 64).micro >= 2


def test_stages_are_balanced(profile, four):
    plan = resolve(parse("pp=4 micro=8 schedule=1f1b"), profile, four, 64)
    assert plan.stages == (3, 6, 9)


def test_uneven_blocks_are_cut_by_time(four):
    """One heavy block at the end: the exact partition leaves it alone."""
    even = chain(blocks=6, forward=1e-3, backward=2e-3, samples=SIZES, flat=False, device="TitanRTX")
    heavy = replace(even.blocks[5], forward_s=tuple(5e-3 * n for n in SIZES), backward_s=tuple(1e-2 * n for n in SIZES))
    uneven = replace(even, blocks=(*even.blocks[:5], heavy))
    assert resolve(parse("pp=2 micro=8"), uneven, four, 64).stages == (5,)


def test_micro_batches_are_searched_for(four):
    """Blocks that take the same time however small the micro-batch: few micro-batches win; where time is
    proportional, many."""
    constant = chain(blocks=8, forward=1e-3, backward=2e-3, samples=SIZES, device="TitanRTX")
    linear = chain(blocks=8, forward=1e-3, backward=2e-3, samples=SIZES, flat=False, device="TitanRTX")
    few = solve(parse("pp=4"), constant, four, 64).plan.micro
    many = solve(parse("pp=4"), linear, four, 64).plan.micro
    assert few == 1
    assert many >= 16


def test_micro_is_the_best_of_those_tried(profile, four):
    found = solve(parse("pp=4 schedule=1f1b"), profile, four, 64)
    for micro in (1, 2, 4, 8, 16, 32, 64):
        assert found.step_s <= solve(parse(f"pp=4 schedule=1f1b micro={micro}"), profile, four, 64).step_s * 1.001


def test_bucket_is_the_best_of_those_tried(profile, four):
    found = solve(parse("ddp"), profile, four, 64)
    sizes = bucket_sizes(found.plan, profile)
    assert sizes == [1 * MIB, 4 * MIB, 8 * MIB, 25 * MIB, 64 * MIB, 96 * MIB]
    times = {size: predict(replace(found.plan, bucket=size), profile, four, 64).step_s for size in sizes}
    assert found.step_s <= min(times.values()) * 1.001
    assert max(times.values()) > min(times.values()) * 1.01  # it matters here: all at once cannot overlap


def test_buckets_beyond_the_model_are_not_tried(four):
    small = chain(blocks=4, weights=1000, samples=SIZES, device="TitanRTX")
    assert bucket_sizes(resolve(parse("ddp"), small, four, 64), small) == [1 * MIB]


def test_cuts_with_less_traffic_win_over_a_slow_link(four):
    """Two equal halves share a huge tensor; a little less balance avoids it."""
    from trainplan.profile.profile import Crossing

    even = chain(blocks=16, forward=1e-3, backward=2e-3, samples=SIZES, flat=False, device="TitanRTX", boundary=0)
    wide = tuple(Crossing(f"h{i}", i, (i + 1,), 2e8 if i == 7 else 100.0) for i in range(15))
    uneven = replace(even, crossings=wide)
    assert resolve(parse("pp=2 micro=8 schedule=1f1b stages=8"), uneven, four, 64).stages == (8,)
    chosen = resolve(parse("pp=2 micro=8 schedule=1f1b overlap=off"), uneven, four, 64).stages
    assert chosen != (8,)
    assert slowest(Tables(uneven).at(8).seconds, chosen) <= 1.25 * slowest(Tables(uneven).at(8).seconds, (8,))


def test_memory_moves_the_cuts(four):
    """1F1B holds four micro-batches on the first stage and one on the last: a tight limit makes the first smaller."""
    profile = chain(
        blocks=12, forward=1e-3, backward=2e-3, saved=100 * MIB, boundary=10, weights=1000, samples=SIZES, flat=False,
        device="TitanRTX",
    )  # fmt: skip
    free = solve(parse("pp=4 micro=8 schedule=1f1b"), profile, four, 64)
    assert free.plan.stages == (3, 6, 9)
    limit = int((free.peak_bytes - 50 * MIB) / 0.94)
    tight = solve(Request(pp=4, micro=8, schedule="1f1b", memory=limit), profile, four, 64)
    assert tight.fits
    assert tight.plan.stages[0] < 3
    assert tight.step_s > free.step_s


def test_what_cannot_fit_is_resolved_all_the_same_and_says_so(four):
    profile = chain(blocks=4, saved=MIB, weights=64 * MIB, samples=SIZES, flat=False, device="TitanRTX")
    found = solve(parse("pp=2 memory=16MiB"), profile, four, 64)
    assert not found.fits
    assert found.peak_bytes > found.limit_bytes
    assert found.plan.pp == 2


def test_limit_is_that_of_the_device_or_less(four):
    assert limited(four, None) is four
    assert limited(four, 10**15).device(0) == four.device(0)
    assert limited(four, MIB).device(3).memory_bytes == MIB


@pytest.mark.parametrize(
    ("line", "batch", "message"),
    [
        ("pp=4", 0, "batch 0: a batch has at least one sample. Try --batch 32."),
        ("pp=13", 64, "13 stages, but the model has only 12 blocks. Try pp=12."),
        ("dp=8", 64, "it needs 8 × 1 = 8 devices, and there are 4. Try dp=4 pp=1."),
        ("dp=2 pp=3", 64, "it needs 2 × 3 = 6 devices, and there are 4. Try dp=2 pp=2."),
        ("pp=6", 64, "it needs 1 × 6 = 6 devices, and there are 4. Try pp=4."),
        ("dp=4", 3, "a batch of 3 samples cannot be split over 4 replicas. Try dp=3."),
        ("dp=2 micro=8", 12, "cannot be split over 2 replicas × 8 micro-batches. Try micro=6."),
        ("accumulate", 1, "cannot be split over 1 replica × 2 micro-batches. Try --batch 2."),
        ("pp=3 stages=4", 64, "3 stages need 2 cuts, 1 are given. Try leaving stages open."),
        ("pp=2 stages=12", 64, "cuts must rise from 1 to 11"),
        # In the words of the request, without choices that nobody made.
        ("stages=2,4,12", 64, "plan 'stages=2,4,12': cuts must rise from 1 to 11, so that each stage has at least one"),
        ("dp=2,1 pp=3", 64, "plan 'dp=2,1 pp=3': 2 numbers of ranks for 3 stages. Try pp=2."),
        ("chimera pp=4 micro=1", 64, "plan 'chimera pp=4 micro=1': with 1 micro-batch some copy of a stage"),
        # Slices that nobody would take.
        ("pp=2 schedule=gpipe slices=4", 64, "gpipe takes sequences whole"),
        ("pp=2 slices=4", 64, "1f1b takes sequences whole: nothing carries keys and values from slice to slice. Try"),
        ("slices=4", 64, "naive takes sequences whole"),
        ("gpipe slices=4 partition=torchgpipe", 64, "gpipe takes sequences whole"),
    ],
)
def test_what_is_refused_says_why_and_what_works(line, batch, message, profile, four):
    with pytest.raises(PlanError) as error:
        resolve(parse(line), profile, four, batch)
    assert message in str(error.value)
    assert line.split()[0] in str(error.value) or batch == 0


def test_bare_keys_use_no_more_than_there_is(four):
    """Two blocks on four devices: a pipeline of two stages; a batch of three: three replicas."""
    two = chain(blocks=2, samples=SIZES, device="TitanRTX")
    assert resolve(parse("dapple"), two, four, 8).pp == 2
    assert resolve(parse("ddp"), two, four, 3).dp == 3
