"""The bottleneck partition against worked instances and against every partition there is."""

import itertools
import random

import numpy as np
import pytest

from trainplan.errors import PlanError
from trainplan.solve.partition.bottleneck import Room, bottleneck, least_limit, slowest
from trainplan.solve.partition.ranges import _from_here_on

P1 = [4, 2, 7, 1, 3, 5]
P2 = [1, 1, 1, 1, 8, 2]


def lengths(times, cuts):
    edges = (0, *cuts, len(times))
    return [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.system("gpipe", "S")
@pytest.mark.parametrize(
    ("times", "stages", "worst", "expected"),
    [
        (P1, 2, 13, [3, 3]),
        (P1, 3, 8, [2, 2, 2]),
        (P1, 4, 7, [2, 1, 2, 1]),
        (P2, 2, 10, [4, 2]),
        (P2, 3, 8, [4, 1, 1]),
        (P2, 4, 8, [1, 3, 1, 1]),
        ([1, 2, 3, 4, 5, 6], 3, 9, None),
        ([1] * 11, 4, 3, None),
    ],
)
def test_worked_instances_gpipe(times, stages, worst, expected):
    cuts = bottleneck(times, stages)
    assert slowest(times, cuts) == worst
    if expected:
        assert lengths(times, cuts) == expected


def value(times, traffic, cuts):
    """(traffic, slowest stage): the less of both the better, in this order."""
    return sum(traffic[cut - 1] for cut in cuts), slowest(times, cuts)


def brute_force(times, stages, traffic, allowed, slack):
    """The best value among the partitions within the slack of the least maximum; None where nothing is allowed."""
    blocks = len(times)
    found = []
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        bounds = itertools.pairwise((0, *cuts, blocks))
        if all(allowed[s, i, j] for s, (i, j) in enumerate(bounds)):
            found.append(value(times, traffic, cuts))
    if not found:
        return None
    limit = min(worst for _, worst in found) * (1 + slack)
    return min((traffic, worst) for traffic, worst in found if worst <= limit)


@pytest.mark.system("gpipe", "S")
def test_equals_brute_force_gpipe():
    """500 random instances with integer costs: times, traffic, memory by stage, slack."""
    random.seed(1)
    impossible = 0
    for number in range(500):
        blocks = random.randint(1, 8)
        stages = random.randint(1, min(4, blocks))
        times = [random.randint(0 if number % 5 == 0 else 1, 9) for _ in range(blocks)]
        traffic = [random.randint(1, 5) for _ in range(blocks)]
        held = [random.randint(1, 4) for _ in range(blocks)]
        in_flight = [stages - s for s in range(stages)]
        limit = random.choice([10**6, 10**6, 4, 8, 12])
        allowed = np.array(
            [
                [[in_flight[s] * sum(held[i:j]) <= limit for j in range(blocks + 1)] for i in range(blocks + 1)]
                for s in range(stages)
            ]
        )
        slack = random.choice([0.0, 0.0, 0.25, 1.0])
        expected = brute_force(times, stages, traffic, allowed, slack)
        cuts = bottleneck(times, stages, traffic, allowed, slack)
        case = (times, stages, traffic, limit, slack)
        assert (cuts is None) == (expected is None), case
        impossible += cuts is None
        if cuts is not None:
            bounds = itertools.pairwise((0, *cuts, blocks))
            assert all(i < j and allowed[s, i, j] for s, (i, j) in enumerate(bounds)), case
            assert value(times, traffic, cuts) == expected, case
    assert 20 < impossible < 300  # both answers were put to the test


def test_a_room_says_what_its_mask_does():
    """Bytes that are looked up as they are asked for, and a table of all of them: the same cuts."""
    rng, impossible = np.random.default_rng(3), 0
    for _ in range(200):
        blocks = int(rng.integers(2, 9))
        stages = int(rng.integers(1, blocks + 1))
        times, traffic = rng.integers(1, 9, blocks), rng.integers(1, 5, blocks)
        fixed, each = (rng.integers(0, 9, (blocks + 1, blocks + 1)).astype(float) for _ in range(2))
        step = np.cumsum(rng.integers(0, 4, (blocks + 1, blocks + 1)), axis=1).astype(float)  # grows with every block
        held = rng.integers(1, 4, stages)
        room = Room(fixed, each, step, held, 1.0, float(rng.integers(6, 30)))
        mask = np.stack([np.maximum(fixed + count * each, step) + room.always <= room.limit for count in held])
        slack = float(rng.choice([0.0, 0.25]))
        cuts = bottleneck(times, stages, traffic, room, slack)
        assert cuts == bottleneck(times, stages, traffic, mask, slack)
        impossible += cuts is None
        least = least_limit(stages, room)
        assert (cuts is None) == (room.limit < least)
        # What runs have at least if they go on: fewer are looked at, and the same are found.
        known = room._replace(fixed_on=_from_here_on(fixed), each_on=_from_here_on(each))
        assert bottleneck(times, stages, traffic, known, slack) == cuts
        assert least_limit(stages, known) == least
        assert bottleneck(times, stages, traffic, room._replace(limit=least)) is not None
    assert 20 < impossible < 180


def test_no_mask_means_everything_is_allowed():
    random.seed(2)
    for _ in range(100):
        times = [random.randint(1, 9) for _ in range(random.randint(2, 8))]
        stages = random.randint(1, len(times))
        everything = np.ones((stages, len(times) + 1, len(times) + 1), dtype=bool)
        assert bottleneck(times, stages) == bottleneck(times, stages, allowed=everything)


def test_more_stages_than_blocks_is_refused():
    with pytest.raises(PlanError, match="4 stages: the model has 3 blocks"):
        bottleneck([1.0, 2.0, 3.0], 4)


def test_long_chains_take_no_time():
    """Hundreds of blocks on dozens of ranks: the property that lets a search solve one for every shape."""
    rng = np.random.default_rng(0)
    times = rng.random(400)
    cuts = bottleneck(times, 32)
    assert len(cuts) == 31
    assert times.sum() / 32 <= slowest(times, cuts) <= times.sum() / 32 + times.max()
