"""When the gradients of stages that live on several ranks are summed: as soon as all ranks agree on the order."""

import numpy as np
import pytest

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.program import Program


def program(schedule: str, depth: int, micro: int, pairs: int = 1) -> Program:
    """A block a stage."""
    cuts = tuple(range(1, depth))
    choices = plan(pp=depth, micro=micro, schedule=schedule, pairs=pairs, stages=cuts, blocks=depth, bucket=2**30)
    return check(lower(choices, chain(depth), micro))


def passes_after_the_sum(made: Program, rank: int) -> dict[int, int]:
    """For every stage of a rank, how many backward passes the rank has still to do when it starts the stage's sum."""
    row = made.lists.row(rank)
    kinds, stages = made.kind[row], made.stage[row]
    sums = np.flatnonzero(kinds == Kind.REDUCE_GRAD).tolist()
    return {int(stages[at]): int((kinds[at:] == Kind.B).sum()) for at in sums}


@pytest.mark.parametrize(("depth", "units", "pairs"), [(2, 1, 1), (4, 1, 1), (4, 3, 1), (8, 2, 1), (8, 1, 2)])
def test_chimera_sums_its_later_stages_while_the_earlier_ones_go_on(depth, units, pairs) -> None:
    """As in the authors' code: copies of stages of the second half are summed before the last passes of a rank."""
    made = program("chimera", depth, units * depth, pairs)
    for rank in range(depth):
        left = passes_after_the_sum(made, rank)
        assert len(left) == 2 * pairs
        assert left[min(left)] == 0  # the first stage of a rank completes last
        assert left[max(left)] >= 1
        if pairs == 1:
            last = abs(rank - depth // 2) + (rank >= depth // 2)  # a: how many passes of the other direction follow
            assert left == {min(rank, depth - 1 - rank): 0, max(rank, depth - 1 - rank): last}


def test_chimera_hides_these_sums() -> None:
    """D = 4, N = 4, F = 1, B = 2: a sum of 2 seconds costs 2, not 4, since that of the later stage is over by then."""
    made = program("chimera", 4, 4)
    table = dict.fromkeys(Kind, 0.0) | {Kind.F: 1.0, Kind.B: 2.0, Kind.REDUCE_GRAD: 2.0}
    assert play(made, seconds_by_kind(made, table)).makespan == 16 + 2


@pytest.mark.parametrize(("schedule", "depth", "micro"), [("gems", 4, 4), ("gems", 4, 3), ("chimera", 4, 5)])
def test_where_ranks_complete_stages_in_opposite_orders_they_wait_for_the_end(schedule, depth, micro) -> None:
    """Else one rank would come to a group's first sum while the other is at its second, and both would wait."""
    made = program(schedule, depth, micro)
    for rank in range(depth):
        assert set(passes_after_the_sum(made, rank).values()) == {0}
