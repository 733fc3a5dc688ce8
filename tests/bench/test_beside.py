"""What a timeline says of sums beside compute, on timelines that the clock made with a known answer."""

from dataclasses import replace

import pytest

from synthetic import chain
from tests.predict.places import cluster
from trainplan.bench.beside import seen
from trainplan.cluster.cluster import Slowdown
from trainplan.plan.plan import plan
from trainplan.predict.collectives import all_reduce
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile


def model() -> Profile:
    """Blocks of one parameter each, whose backward takes a while."""
    made = chain(6)
    return replace(made, blocks=tuple(replace(block, backward_s=(2.0, 2.0)) for block in made.blocks))


@pytest.mark.parametrize("slowed", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("rate", [1000.0, 4000.0])
def test_the_slow_down_of_a_timeline_is_found_again(slowed: float, rate: float) -> None:
    where = cluster(devices=4, rate=rate, slowdown=Slowdown(collective=1.25, slowed_collective=slowed))
    made = plan(dp=4, blocks=6, bucket=1)
    timeline = predict(made, model(), where, 4, keep=True).timeline()
    found = seen(timeline, lambda size: all_reduce(where, (0, 1, 2, 3), size).seconds)
    assert found.slowed == pytest.approx(slowed)
    assert found.beside_s > 0
    assert found.beside_s / slowed + found.after_s == pytest.approx(found.alone_s)
    assert (found.spread, found.slowest) == (0.0, 0.0)


def test_ranks_that_are_apart() -> None:
    """The passes of the last of three ranks take a fifth longer."""
    where = cluster(devices=3, rate=1e9)
    timeline = predict(plan(dp=3, blocks=6), model(), where, 3, keep=True).timeline()
    events = tuple(
        replace(e, end=e.start + 1.2 * (e.end - e.start)) if e.rank == 2 and e.kind in ("F", "B") else e
        for e in timeline.events
    )
    found = seen(replace(timeline, events=events), lambda size: 1.0)
    assert found.slowest == pytest.approx(1.2 / (3.2 / 3) - 1)
    assert found.spread == pytest.approx((0.04 / 3) ** 0.5 / (3.2 / 3))
