"""Any placement table: the lists of stages that share a rank become one, which runs to its end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.errors import PlanError
from trainplan.plan.placement import ANY_TABLE, placement
from trainplan.plan.plan import plan
from trainplan.plan.text import parse, text
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.schedules import SCHEDULES, Size, orders_of
from trainplan.program.schedules.given import read_csv, write_csv
from trainplan.program.schedules.merged import merged
from trainplan.solve.shape import shape


@st.composite
def tables(draw) -> tuple[int, ...]:
    """The rank of every stage: any, as long as each has one."""
    ranks = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, ranks - 1), max_size=5))
    return tuple(draw(st.permutations([*range(ranks), *more])))


@examples(150)
@given(tables(), st.sampled_from(ANY_TABLE), st.integers(1, 7))
def test_merged_lists_are_legal_for_any_table(table: tuple[int, ...], schedule: str, micro: int) -> None:
    alone = SCHEDULES[schedule](Size(len(table), micro))
    orders = merged(alone, table)
    assert [order.tolist() for order in orders] == [order.tolist() for order in merged(alone, table)]
    for rank, order in enumerate(orders):
        stages = [stage for stage, home in enumerate(table) if home == rank]
        assert sorted(set(order[:, 2].tolist())) == stages
        for stage in stages:  # each stage does what it would do alone
            assert np.array_equal(order[order[:, 2] == stage], alone[stage])
    # Reading holds every rule of an order against it: nothing is lost, and nobody waits in a circle.
    again = read_csv(write_csv(orders), "merged.csv")
    assert [order.tolist() for order in again] == [order.tolist() for order in orders]


@examples(40)
@given(tables().filter(lambda table: len(set(table)) > 1), st.sampled_from(ANY_TABLE), st.integers(1, 2), st.data())
def test_plans_with_any_table_are_legal_programs(table, schedule: str, dp: int, data) -> None:
    stages = len(table)
    made = plan(
        dp=dp, pp=len(set(table)), micro=data.draw(st.integers(1, 4)), schedule=schedule, bucket=1000,
        stages=tuple(range(1, stages)), blocks=stages, placement=placement(dp, (table,)),
        recompute="none" if schedule.startswith("zb") else data.draw(st.sampled_from(["none", "full"])),
    )  # fmt: skip
    profile = chain(stages, skips=((0, stages - 1),) if stages > 2 else (), tied=((0, stages - 1),), clip_norm=1.0)
    check(lower(made, profile, dp * made.micro, steps=2))
    # The line says the table, where it is not as usual.
    said = parse(text(made))
    assert said.placement == (None if table == tuple(range(stages)) else table)
    assert shape(said, stages, made.world, dp * made.micro).placement == made.placement


def test_backward_goes_first_and_w_last() -> None:
    made = plan(pp=2, micro=3, schedule="zb-h1", stages=(1, 2, 3), blocks=4, placement=placement(1, ((0, 1, 1, 0),)))
    first, second = write_csv(orders_of(made)).split()
    assert first == "0F0,0F1,0F2,3F0,3I0,3F1,3I1,0I0,3F2,3I2,0W0,0I1,3W0,0W1,0I2,3W1,0W2,3W2"
    assert second == "1F0,2F0,1F1,2F1,2I0,1F2,1I0,2F2,2I1,1I1,2I2,1W0,1I2,2W0,1W1,2W1,1W2,2W2"


@pytest.mark.parametrize(
    ("line", "why", "instead"),
    [
        ("placement=0,2", "count from 0 without gaps, and these are [0, 2]", "placement=0,1,1,0"),
        ("placement=0,0", "a pipeline needs two ranks or more, and the table has 1 rank", "placement=0,1,1,0"),
        ("placement=0,x", "the rank of every stage was expected", "placement=0,1,1,0"),
        ("placement=", "a pipeline needs two ranks or more", "placement=0,1,1,0"),
        ("placement=0,1,1 pp=3", "pp=3, and the table has 2 ranks", "pp=2, or leaving it out"),
        ("placement=0,1,1 schedule=interleaved", "wants the stages on ranks 0,1", "takes any table"),
        (
            "placement=0,1,1,0 schedule=interleaved",
            "wants the stages on ranks 0,1,0,1",
            "placement=0,1,0,1, with other",
        ),
        ("placement=0,1,0,1 schedule=zb-v", "wants the stages on ranks 0,1,1,0", "takes any table"),
        ("placement=0,1,0 schedule=chimera", "wants the stages on ranks", "takes any table"),
        ("placement=0,1 dp=2,1", "would need several ranks a stage", "leaving it out"),
        ("placement=0,1,1,0,1,1,0,0,1", "9 stages, but the model has only 8 blocks", "a placement of at most 8 stages"),
        ("placement=0,1,2,3,4", "it needs 1 × 5 = 5 devices, and there are 4", "a placement for 4 ranks"),
    ],
)
def test_tables_that_are_refused(line: str, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        shape(parse(line), blocks=8, world=4, batch=8)
    assert why in caught.value.why
    assert instead in caught.value.instead


@pytest.mark.parametrize(
    ("line", "table"),
    [
        ("placement=1,0 schedule=1f1b", (((1,), (0,)),)),
        ("placement=1,0,1,0 schedule=interleaved", (((1,), (0,), (1,), (0,)),)),
        ("placement=1,0,0,1 schedule=zb-v", (((1,), (0,), (0,), (1,)),)),
        ("placement=1,0 schedule=gems micro=2", (((1,), (0,)), ((0,), (1,)))),
        ("placement=0,1,0 dp=2", (((0,), (2,), (0,)), ((1,), (3,), (1,)))),
    ],
)
def test_tables_that_are_taken(line: str, table) -> None:
    made = shape(parse(line), blocks=8, world=4, batch=8)
    assert made.placement == table
