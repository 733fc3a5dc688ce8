"""What is legal: every refusal has its numbers and something that works."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import cases, examples
from trainplan.errors import PlanError
from trainplan.plan.placement import lines, placement
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.plan.rules import SPREAD, check, check_model, least_micro, micro_batches, split
from trainplan.program.check import check as check_program
from trainplan.program.lower import lower
from trainplan.program.schedules import orders_of

PIPELINE = {"pp": 3, "micro": 4, "schedule": "gpipe", "blocks": 8}
TABLE = {"pp": 2, "micro": 4, "schedule": "1f1b", "blocks": 8, "stages": (1, 2, 3)}
LOOP = {"schedule": "interleaved", "chunks": 2}
SLICES = {"pp": 2, "stages": (1,), "blocks": 2, "schedule": "terapipe", "slices": (4, 2)}
AWAY = {"offload": "activations"}
OPEN_STAGES, OPEN_PLACEMENT = "leaving stages open", "leaving the placement out"

# The plan and where it is asked for; why not; and what would work.
ILLEGAL = [
    ({"schedule": "gpip"}, {}, "terapipe, not gpip", "schedule=gpipe"),
    ({"recompute": "some"}, {}, "recompute is one of none, full, except-last, selective, not some", "recompute="),
    ({"precision": "fp8"}, {}, "precision is one of fp32, tf32, bf16, fp16, not fp8", "precision=fp32"),
    ({"dp": 0, "placement": ((),)}, {}, "dp counts from 1, and is 0", "dp=1"),
    ({"pp": -1, "placement": (((0,),),)}, {}, "pp counts from 1, and is -1", "pp=1"),
    ({"micro": 0}, {}, "micro counts from 1, and is 0", "micro=1"),
    ({"dp": 2, "bucket": 0}, {}, "bucket counts from 1, and is 0", "bucket=1"),
    ({"schedule": "1f1b"}, {}, "needs several stages", "pp=2"),
    ({**PIPELINE, "blocks": 2, "stages": (1, 2)}, {}, "3 stages, but the model has only 2 blocks", "pp=2"),
    ({**PIPELINE, "stages": (2,)}, {}, "3 stages need 2 cuts, 1 are given", OPEN_STAGES),
    ({**PIPELINE, "stages": (4, 2)}, {}, "cuts must rise from 1 to 7", OPEN_STAGES),
    ({**PIPELINE, "stages": (0, 2)}, {}, "cuts must rise from 1 to 7", OPEN_STAGES),
    ({**PIPELINE, "stages": (3, 8)}, {}, "cuts must rise from 1 to 7", OPEN_STAGES),
    ({**PIPELINE, "stages": (3, 8)}, {}, "one block: 8 cannot be", OPEN_STAGES),
    ({**PIPELINE, "stages": (4, 2)}, {}, "one block: 2 cannot be", OPEN_STAGES),
    ({**PIPELINE, "stages": (9, 10)}, {}, "one block: 9 cannot be", OPEN_STAGES),
    ({**PIPELINE, "pairs": 2}, {}, "are chimera's, not gpipe's", "schedule=chimera, or leaving pairs out"),
    (
        {**PIPELINE, "pp": 8, "schedule": "chimera", "pairs": 3},
        {},
        "divide half of pp=8, which is 4",
        "pairs=1 or 2 or 4",
    ),
    ({**PIPELINE, "pp": 2, "schedule": "chimera", "micro": 1}, {}, "with 1 micro-batch some copy", "micro=2"),
    ({"dp": 0, "placement": (((0,),),)}, {}, "dp counts from 1, and is 0", "dp=1"),
    ({"dp": 2, "placement": (((0,),),)}, {}, "has 2 × 1 entries, and this one has 1", OPEN_PLACEMENT),
    ({"dp": 2, "placement": (((0,),), ((0,),))}, {}, "from 0 to 1, and this one uses [0]", OPEN_PLACEMENT),
    ({"dp": 2, "placement": (((0,),), ((2,),))}, {}, "from 0 to 1, and this one uses [0, 2]", OPEN_PLACEMENT),
    # Any table for some orders of work, but the same for all replicas; for others only other names for the ranks.
    ({**TABLE, "placement": placement(1, ((0, 1, 1),))}, {}, "3 stages need 2 cuts, 3", OPEN_STAGES),
    ({**TABLE, "placement": placement(1, ((0, 0, 0, 0),))}, {}, "from 0 to 1, and this one uses [0]", OPEN_PLACEMENT),
    (
        {**TABLE, "dp": 2, "placement": (((0,), (1,), (1,), (0,)), ((2,), (3,), (2,), (3,)))},
        {},
        "the same stages share",
        OPEN_PLACEMENT,
    ),
    (
        {**TABLE, "dp": 2, "placement": (((0,), (1,), (1,), (0,)), ((2,), (1,), (1,), (3,)))},
        {},
        "the same stages share",
        OPEN_PLACEMENT,
    ),
    (
        {**TABLE, **LOOP, "placement": placement(1, ((0, 1, 1, 0),))},
        {},
        "schedule=interleaved wants the stages on ranks 0,1,0,1, or",
        "placement=0,1,0,1, with other names for the ranks; or schedule=1f1b",
    ),
    (
        {**TABLE, "schedule": "chimera", "stages": (1,), "placement": placement(1, ((0, 1), (0, 1)))},
        {},
        "wants the stages on ranks 0,1 and 1,0, or",
        "which takes any table",
    ),
    ({"placement": (((0, 1),),)}, {}, "a stage runs on one rank, and one is placed on 2", OPEN_PLACEMENT),
    ({"away": ((1,),)}, {}, "away says how much is offloaded, and nothing says what", "offload=activations"),
    ({"offload": "weights"}, {}, "offload is one of none, activations, partitioned, not weights", "offload="),
    ({**AWAY, "away": ((1,), (1,))}, {}, "away has 2 stages, and the plan 1", "away=1, or leaving it open"),
    ({**AWAY, "micro": 3, "away": ((1, 2),)}, {}, "2 numbers for a stage, and there are 3 micro-batches", "one number"),
    ({**PIPELINE, **AWAY, "schedule": "zb-h1", "stages": (2, 4)}, {}, "and schedule=zb-h1 has others", "schedule=1f1b"),
    ({**AWAY, "dp": 2, "exchange": "dataparallel"}, {}, "cuts backward passes where gradients are sent", "zero=3"),
    ({**AWAY, "tp": 2}, {}, "the ranks of tp=2 share a stage between them", "tp=1"),
    ({"placement": (((),),)}, {}, "a stage runs on one rank, and one is placed on 0", OPEN_PLACEMENT),
    ({"dp": 4}, {"world": 3}, "it needs 4 × 1 = 4 devices, and there are 3", "dp=3 pp=1"),
    ({**PIPELINE, "dp": 2, "stages": (2, 4)}, {"world": 5}, "2 × 3 = 6 devices, and there are 5", "dp=2 pp=2"),
    ({"dp": 4}, {"batch": 3}, "a batch of 3 samples cannot be split over 4 replicas × 1 micro-batch", "--batch 4"),
    ({"dp": 2, "micro": 4}, {"batch": 6}, "6 samples cannot be split over 2 replicas × 4", "micro=3"),
    ({"dp": 4, "micro": 2}, {"batch": 3}, "a batch of 3 samples cannot be split", "--batch 8"),
    ({**SLICES, "schedule": "gpipe"}, {}, "gpipe takes sequences whole", "schedule=terapipe"),
    ({**SLICES, "slices": ()}, {}, "two slices or more, of at least one token, not ()", "slices=4"),
    ({**SLICES, "slices": (4, 0)}, {}, "of at least one token, not (4, 0)", "slices=4"),
    ({}, {"batch": 0}, "a batch has at least one sample", "--batch 32"),
    ({"dp": 2, "zero": 4}, {}, "zero is 0 (nothing is shared out), 1, 2 or 3, not 4", "zero=3"),
    ({"zero": 1}, {}, "shares out among replicas, and there is one", "dp=2"),
    ({"dp": 6, "zero": 3, "shard": 4}, {}, "6 replicas cannot be put into groups of 4", "shard=2 or 3 or 6"),
    ({"dp": 2, "zero": 3, "shard": 1}, {}, "one replica alone has nothing to share out", "shard=2"),
    ({"dp": 4, "shard": 2}, {}, "and nothing says what", "zero=3 shard=2"),
    ({**PIPELINE, "stages": (2, 4), "dp": 2, "zero": 2, "schedule": "zb-h1"}, {}, "zb-h1 has them only", "zero=1, or"),
    ({**PIPELINE, "stages": (2, 4), "dp": 2, "zero": 1, "schedule": "gems"}, {}, "in two directions", "schedule=1f1b"),
    ({**PIPELINE, "stages": (2, 4), "dp": 2, "zero": 1, "schedule": "lockstep"}, {}, "no place for", "schedule=1f1b"),
]


@pytest.mark.parametrize(("fields", "where", "why", "instead"), ILLEGAL)
def test_illegal_plans(fields: dict, where: dict, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(plan(**fields), **{"batch": 64, **where})
    assert caught.value.asked.startswith(("plan '", "batch "))
    assert why in caught.value.why
    assert instead in caught.value.instead
    assert str(caught.value).endswith(f"Try {caught.value.instead}.")


@pytest.mark.parametrize(
    ("fields", "why", "instead"),
    [
        ({"tokens_per_sample": 8, "whole_sequences": None}, "sum to 6 tokens, and a sequence has 8", "slices=4,4"),
        ({"tokens_per_sample": 1, "whole_sequences": None}, "sum to 6 tokens, and a sequence has 1", "slices=1"),
        ({"tokens_per_sample": 6}, "nothing is known of what it does with the tokens", "1f1b or gpipe"),
        ({"tokens_per_sample": 6, "whole_sequences": "a pool over the tokens"}, "a pool over the tokens", "1f1b"),
    ],
)
def test_slices_must_be_those_of_the_model(fields: dict, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_model(plan(**SLICES), chain(2, **fields))
    assert why in caught.value.why
    assert instead in caught.value.instead


@pytest.mark.parametrize("schedule", WORDS["schedule"])
@pytest.mark.parametrize("spread", [(2, 1, 1), (1, 3, 2)])
def test_what_takes_different_numbers_of_ranks_a_stage_becomes_a_legal_program(schedule: str, spread: tuple) -> None:
    """With as few micro-batches as are allowed, and with more; what does not take them is refused before."""
    chunks = 2 if schedule in ("interleaved", "looped", "zb-v") else 1
    chosen = {"pp": 3, "spread": spread, "schedule": schedule, "stages": (1, 2), "blocks": 3, "chunks": chunks}
    for micro in (max(spread), 7):
        if schedule in SPREAD:
            program = lower(plan(**chosen, micro=micro), chain(3), batch=8)
            assert check_program(program) is program
            assert program.world == sum(spread)
        else:
            with pytest.raises(PlanError):
                lower(plan(**chosen, micro=micro), chain(3), batch=8)


@pytest.mark.parametrize(
    ("schedule", "pairs"), [("gems", 1), ("chimera", 1), ("chimera", 2), ("chimera", 4), ("chimera-doubled", 1)]
)
def test_in_two_directions_every_copy_has_work_from_a_micro_batch_for_each_pipeline_on(schedule: str, pairs) -> None:
    chosen = {"pp": 8, "schedule": schedule, "pairs": pairs, "stages": tuple(range(1, 8)), "blocks": 8}
    least = least_micro(plan(**chosen))
    assert least == 2 * pairs
    for micro in range(least, 20):
        made = plan(**chosen, micro=micro)
        assert check_program(lower(made, chain(8), batch=20))
        seen = {(row[1], row[2]) for order in orders_of(made) for row in order.tolist()}
        assert len(seen) == 2 * pairs * 8
    with pytest.raises(PlanError, match=f"micro={least}"):
        check(plan(**chosen, micro=least - 1), 20)


@examples(100)
@given(cases())
def test_legal_plans_are_legal(case) -> None:
    assert check(case.plan, case.batch, case.plan.world) is case.plan
    assert check(case.plan, case.batch) is case.plan


@examples(100)
@given(st.integers(1, 300), st.integers(1, 40))
def test_splits_are_as_equal_as_can_be(samples: int, parts: int) -> None:
    sizes = split(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@examples(100)
@given(cases())
def test_micro_batches_of_the_first_replica_are_the_largest(case) -> None:
    sizes = micro_batches(case.plan, case.batch)
    assert all(a >= b for other in sizes[1:] for a, b in zip(sizes[0], other, strict=True))
    assert min(map(min, sizes)) >= 1


@examples(50)
@given(st.integers(1, 6), st.integers(1, 6))
def test_the_usual_placement_uses_every_rank_once_replicas_side_by_side(dp: int, pp: int) -> None:
    table = placement(dp, lines("1f1b", pp))
    made = plan(dp=dp, pp=pp, placement=table)
    assert isinstance(made, Plan)
    assert made.world == dp * pp
    for stage in range(pp):
        first = made.replicas_of(stage)[0]
        assert made.replicas_of(stage) == tuple(range(first, first + dp))
