"""Cuts that are left open are the best there are, by the clock that judges the plan."""

import itertools
import random
from dataclasses import replace

import pytest

from synthetic import chain
from trainplan.cluster.parse import cluster
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.solve import resolve as resolving
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import solve
from trainplan.workload.load import load

SIZES = (1, 2, 4, 8, 16)
BATCH = 16


@pytest.fixture(scope="module")
def four():
    return cluster("4xTitanRTX")


def host_bound(seed: int, blocks: int = 9) -> Profile:
    """Blocks that a device computes at one pace, and a host issues at another: which is slower differs by block."""
    rng = random.Random(seed)
    even = chain(blocks=blocks, boundary=10**5, weights=10**6, samples=SIZES, flat=False, device="TitanRTX")
    rows = []
    for block in even.blocks:
        run, issue = rng.uniform(0.2, 2.0) * 1e-4, rng.uniform(0.2, 4.0) * 1e-4
        rows.append(
            replace(
                block,
                forward_s=tuple(run * n for n in SIZES),
                backward_s=tuple(2 * run * n for n in SIZES),
                forward_issue_s=(issue,) * len(SIZES),
                backward_issue_s=(1.5 * issue,) * len(SIZES),
            )
        )
    return replace(even, blocks=tuple(rows))


def of_all_cuts(found, profile, there) -> float:
    """The fastest step of the plan with any cuts."""
    ways = itertools.combinations(range(1, len(profile.blocks)), found.plan.pp - 1)
    return min(predict(replace(found.plan, stages=cuts), profile, there, BATCH).step_s for cuts in ways)


@pytest.mark.parametrize("line", ["pp=2 micro=8", "pp=2 dp=2 micro=4", "pp=3 micro=4", "pp=3 micro=8 schedule=gpipe"])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_cuts_are_faster_by_the_clock(seed, line, four):
    profile = host_bound(seed)
    found = solve(parse(line), profile, four, BATCH)
    assert found.step_s <= of_all_cuts(found, profile, four) * 1.01


@pytest.mark.parametrize("line", ["pp=2 micro=8", "pp=3 micro=4"])
@pytest.mark.parametrize("seed", range(5))
def test_moving_one_cut_at_a_time_ends_where_no_move_helps(seed, line, four, monkeypatch):
    """As with models of so many blocks that not all cuts can be looked at."""
    monkeypatch.setattr(resolving, "FEW_CUTS", 0)
    profile = host_bound(seed)
    found = solve(parse(line), profile, four, BATCH)
    edges = (0, *found.plan.stages, found.plan.blocks)
    for place, by in itertools.product(range(1, len(edges) - 1), (-1, 1)):
        moved = [*edges[:place], edges[place] + by, *edges[place + 1 :]]
        if moved == sorted(set(moved)):
            there = replace(found.plan, stages=tuple(moved[1:-1]))
            assert found.step_s <= predict(there, profile, four, BATCH).step_s * 1.002


def test_host_and_device_of_a_cpu_are_one():
    """What the host spends comes on top there; elsewhere the slower of the two counts."""
    ranges = Tables(host_bound(0)).at(1)
    assert (ranges.issue > ranges.seconds).any()
    assert ranges.pace(host_computes=True).tolist() == (ranges.seconds + ranges.issue).tolist()
    both = zip(ranges.seconds, ranges.issue, strict=True)
    assert ranges.pace(host_computes=False).tolist() == [max(pair) for pair in both]


def test_cuts_of_a_pipeline_are_simulated_only_so_often(four, monkeypatch):
    """Forty blocks in four stages have 9139 cuts."""
    count = 0

    def counted(*args, **options):
        nonlocal count
        count += 1
        return predict(*args, **options)

    monkeypatch.setattr(resolving, "predict", counted)
    solve(parse("pp=4 micro=4 schedule=1f1b"), host_bound(1, blocks=40), four, BATCH)
    assert count <= 1 + len(resolving.SLACKS) + resolving.MOST_SIMULATED


def test_resnet18_in_two_stages(four):
    """A small micro-batch is bound by its host, which the device's seconds alone do not show."""
    profile = estimate(load("resnet18:cifar10", batch=64), four.device(0), samples=[1, 8, 32])
    found = solve(parse("pp=2 dp=2 micro=4 schedule=1f1b"), profile, four, 64)
    times = {
        cut: predict(replace(found.plan, stages=(cut,)), profile, four, 64).step_s
        for cut in range(1, len(profile.blocks))
    }
    assert found.step_s <= min(times.values()) * 1.001
    assert times[6] > 1.1 * times[5]  # six of the ten blocks halve the device's work, and not the host's
    assert found.plan.stages == (5,)
