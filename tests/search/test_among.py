"""The search among plans that are given: the best of these, as simulating all of them says, and no other."""

import itertools

import pytest

from search.models import model
from trainplan.bench.published.rows import Row, recommended, regrets
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.search.columns import of
from trainplan.search.recommend import recommend
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import draft

BLOCKS, BATCH = 8, 16
PROFILE = model(5, BLOCKS, "TitanRTX", False)
FOUR = cluster("4xTitanRTX")
GIVEN = [
    plan(dp=dp, pp=pp, micro=micro, schedule=schedule, zero=zero, recompute=recompute, blocks=BLOCKS)
    for dp, pp, micro, schedule, zero, recompute in [
        (4, 1, 1, "naive", 0, "none"), (4, 1, 4, "naive", 3, "none"), (2, 2, 2, "1f1b", 0, "none"),
        (2, 2, 8, "gpipe", 1, "full"), (1, 4, 4, "1f1b", 0, "none"), (1, 4, 16, "gpipe", 0, "none"),
    ]
]  # fmt: skip


def seconds(one: Plan) -> float:
    return draft(one, FOUR, BATCH, Tables(PROFILE)).step_s


@pytest.mark.parametrize("few", list(itertools.combinations(range(len(GIVEN)), 3))[::5])
def test_the_best_of_those_that_are_given(few: tuple[int, ...]) -> None:
    own = [GIVEN[number] for number in few]
    found = recommend(PROFILE, FOUR, BATCH, among=own)
    assert found.considered == len(own)
    told = {(p.dp, p.pp, p.micro, p.schedule, p.zero) for p in own}
    assert {(p.dp, p.pp, p.micro, p.schedule, p.zero) for p in (row.prediction.plan for row in found.ranked)} <= told
    assert found.best.step_s <= min(map(seconds, own)) * (1 + 1e-9)
    assert found.single.plan.world == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (plan(dp=4, exchange="ring", blocks=BLOCKS), "does not choose from"),
        (plan(dp=4, precision="bf16", blocks=BLOCKS), "other training"),
    ],
)
def test_what_the_search_does_not_choose_is_refused(other: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        of([*GIVEN, other], PROFILE, FOUR, BATCH, "fp32")


def test_regret_is_that_of_the_plan_that_is_recommended() -> None:
    """Two questions: in one the plan that is recommended was the fastest, in the other it took half as long again."""
    first = recommend(PROFILE, FOUR, BATCH, among=GIVEN).best.plan
    slow = next(one for one in GIVEN if (one.dp, one.pp, one.micro) != (first.dp, first.pp, first.micro))

    def row(group: int, took: float, one: Plan) -> Row:
        return Row((group,), took, one, PROFILE, FOUR, BATCH, 1, 1, 1)

    chosen = next(one for one in GIVEN if (one.dp, one.pp, one.micro) == (first.dp, first.pp, first.micro))
    right, wrong = [row(1, 2.0, chosen), row(1, 3.0, slow)], [row(2, 3.0, chosen), row(2, 2.0, slow)]
    assert recommended(right, {}).plan is chosen
    assert regrets([*right, *wrong], {}) == {"regret": 0.25, "worst_regret": 0.5}
