"""`check` finds what is wrong with programs of every order of work: several stages a rank, split backward passes, two
directions, stages on several ranks, orders and placements that are given."""

from functools import cache

from synthetic import chain
from tests.program.legality import rejecting
from tests.program.surgery import change, find, forget, move, relist, reread, swap, twice, values_between, without
from trainplan.plan.placement import placement
from trainplan.plan.plan import plan
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Program

LOOP = {"chunks": 2, "stages": (1, 2, 3)}
ORDERS = {
    "interleaved": LOOP,
    "looped": LOOP,
    "zb-h1": {"stages": (2,)},
    "zb-h2": {"stages": (2,), "micro": 3},
    "zb-v": LOOP,
    "gems": {"stages": (2,)},
    "chimera": {"pp": 4, "stages": (1, 2, 3), "micro": 4},
    "spread": {"schedule": "1f1b", "pp": 3, "spread": (2, 1, 1), "stages": (1, 2)},
    # Stages 0 and 2 on the first rank; a backward pass whole, and one in two parts.
    "given": {"order": ("0F0,0F1,2F0,2B0,2F1,2I1,2W1,0B0,0I1,0W1", "1F0,1F1,1B0,1I1,1W1"), "stages": (1, 2)},
    "table": {"schedule": "1f1b", "stages": (1, 2, 3), "placement": placement(1, ((0, 1, 1, 0),))},
}  # fmt: skip


@cache
def of(order: str) -> Program:
    """The program of an order on four blocks, a gradient bucket a block."""
    choices = {"pp": 2, "micro": 2, "blocks": 4, "bucket": 1000, "schedule": order, **ORDERS[order]}
    return lower(plan(**choices), chain(4), batch=4)


def test_the_programs_that_were_broken_are_legal() -> None:
    for order in ORDERS:
        assert check(of(order)) is of(order)


# -- several stages a rank ------------------------------------------------------------------------------------------


def second_stage_before_its_message() -> Program:
    return move(of("interleaved"), 1, "3F0", before="3RECV_F0")


def second_stage_before_the_first() -> Program:
    """Rank 0 waits for what comes of a micro-batch that it has not sent yet."""
    return move(of("interleaved"), 0, "2RECV_F1", before="0SEND_F1")


def message_for_another_stage_of_the_rank() -> Program:
    program = of("interleaved")
    return change(program, "peer_stage", find(program, "0SEND_F0"), 3)


def second_stage_never_goes_back() -> Program:
    return without(of("looped"), "3B0")


def one_of_two_stages_steps_early() -> Program:
    return move(forget(of("looped"), "2STEP"), 0, "2STEP", before="2B0")


def one_of_two_stages_never_steps() -> Program:
    return without(of("looped"), "2STEP")


# -- backward in two parts ------------------------------------------------------------------------------------------


def weights_before_input() -> Program:
    return move(of("zb-h1"), 1, "1W0", before="1I0")


def weights_never() -> Program:
    return without(of("zb-h1"), "1W1")


def weights_after_the_step() -> Program:
    return move(forget(of("zb-h1"), "1STEP"), 1, "1STEP", before="1W1")


def input_twice() -> Program:
    return twice(of("zb-h2"), "1I2")


def input_with_other_weights() -> Program:
    program = of("zb-h2")
    return change(program, "version", find(program, "0W1"), 1)


def handed_over_and_freed_at_once() -> Program:
    """Stages 1 and 2 of the V are on one rank: what the one makes is the other's input, until it has gone back."""
    program = of("zb-v")
    (value,) = [v for v in values_between(program, "1F0", "2F0") if program.value_kind[v] == Value.BOUNDARY]
    return change(program, "value_end", value, find(program, "2F0"))


def handed_over_to_another_rank() -> Program:
    program = of("zb-v")
    (value,) = values_between(program, "1F0", "2F0")
    return change(program, "value_rank", value, 0)


def handed_over_and_not_taken() -> Program:
    program = of("zb-v")
    values = values_between(program, "1F0", "2F0")
    return reread(program, find(program, "2F0"), lambda row: [v for v in row if v not in values])


def handed_back_and_not_taken() -> Program:
    program = of("table")
    values = values_between(program, "2B0", "1B0")
    return reread(program, find(program, "1B0"), lambda row: [v for v in row if v not in values])


def handed_back_in_two_parts_and_not_taken() -> Program:
    program = of("zb-v")
    values = values_between(program, "2I0", "1I0")
    return reread(program, find(program, "1I0"), lambda row: [v for v in row if v not in values])


# -- two directions -------------------------------------------------------------------------------------------------


def a_copy_does_not_come_to_the_sum() -> Program:
    program = of("gems")
    return relist(program, 1, lambda row: [op for op in row if op != find(program, "1REDUCE_GRAD")])


def copies_sum_in_opposite_orders() -> Program:
    return swap(of("gems"), 1, "0REDUCE_GRAD", "1REDUCE_GRAD")


def a_copy_steps_without_the_sum() -> Program:
    program = of("gems")
    (token,) = [v for v in values_between(program, "0REDUCE_GRAD", "0STEP") if program.value_rank[v] == 0]
    return reread(program, find(program, "0STEP"), lambda row: [v for v in row if v != token])


def a_micro_batch_turns_round() -> Program:
    """It comes down the ranks, and its backward pass is said to be of the pipeline that goes up."""
    program = of("chimera")
    return change(program, "pipeline", find(program, "2B0"), 1)


def the_directions_crossed() -> Program:
    """Each of two messages between the middle ranks is taken for the other, which goes the other way."""
    program = of("chimera")
    down, up = values_between(program, "1SEND_F0", "2RECV_F0"), values_between(program, "1SEND_F2^1", "2RECV_F2^1")
    program = reread(program, find(program, "2RECV_F0"), lambda row: up)
    return reread(program, find(program, "2RECV_F2^1"), lambda row: down)


def summed_before_both_have_gone_back() -> Program:
    return move(of("chimera"), 3, "3REDUCE_GRAD", before="3B1")


# -- a stage on several ranks ---------------------------------------------------------------------------------------


def on_the_other_rank_of_its_stage() -> Program:
    program = of("spread")
    op = find(program, "0F1^1")
    return relist(relist(program, 1, lambda row: [o for o in row if o != op]), 0, lambda row: [*row, op])


def gradient_to_the_other_rank_of_the_stage() -> Program:
    program = of("spread")
    return change(program, "peer", find(program, "1SEND_B1^1"), 0)


def sums_the_gradients_of_one_rank() -> Program:
    program = of("spread")
    return reread(program, find(program, "0REDUCE_GRAD"), lambda row: [v for v in row if program.value_rank[v] != 1])


# -- orders and tables that are given -------------------------------------------------------------------------------


def whole_pass_taken_for_a_part() -> Program:
    program = of("given")
    return change(program, "kind", find(program, "2B0"), Kind.W)


def part_after_a_whole_pass() -> Program:
    """The weights' part of one micro-batch stands where the gradient of another is still to come."""
    return move(of("given"), 1, "1RECV_B1", before="1SEND_F1")


def a_size_of_its_own() -> Program:
    program = of("given")
    return change(program, "bytes", find(program, "2RECV_F1"), 7)


def second_stage_of_the_table_first() -> Program:
    return move(of("table"), 1, "2F0", before="1F0")


def a_message_that_nobody_takes() -> Program:
    return without(of("table"), "3RECV_F1")


test_rejects = rejecting(
    (second_stage_before_its_message, "alive", "3F0", "3F0 reads what 3RECV_F0 makes only later", "ends"),
    (second_stage_before_the_first, "ends", "2RECV_F1", "rank 0 waits at 2RECV_F1 for 1SEND_F1 of rank 1, which waits"),
    (message_for_another_stage_of_the_rank, "matched", "1RECV_F0", "1RECV_F0 on rank 1 receives what 0SEND_F0>3"),
    (second_stage_never_goes_back, "once", "3F0", "micro-batch of 3F0 goes forward but never backward"),
    (one_of_two_stages_steps_early, "updated", "2B0", "2B0 comes after 2STEP"),
    (one_of_two_stages_never_steps, "updated", "2B1", "the gradients of 2B1 are not used: its stage never steps"),
    (weights_before_input, "alive", "1W0", "1W0 reads what 1I0 makes only later", "ends"),
    (weights_never, "once", "1I1", "has the input part of backward but not the weights'"),
    (weights_after_the_step, "updated", "1W1", "1W1 comes after 1STEP"),
    (input_twice, "once", "1I2", "backward, input runs a second time"),
    (input_with_other_weights, "fresh", "0W1", "0W1 reads weights of version 1"),
    (handed_over_and_freed_at_once, "alive", "2W0", "2W0 reads what 2F0 has freed already"),
    (handed_over_to_another_rank, "alive", "1F0", "1F0 makes a value of rank 0, not of its own"),
    (handed_over_and_not_taken, "matched", "1F0", "what 1F0 makes for another stage is neither sent nor read by one"),
    (handed_back_and_not_taken, "matched", "1B0", "1B0 does not read the gradient that 2B0 leaves for it"),
    (handed_back_in_two_parts_and_not_taken, "matched", "1W0", "1W0 does not read the gradient that 2I0 leaves for it"),
    (a_copy_does_not_come_to_the_sum, "listed", "1REDUCE_GRAD missing", r"ranks \[0, 1\] and stands in the lists of"),
    (copies_sum_in_opposite_orders, "ends", "0REDUCE_GRAD", "rank 0 waits for ever at 0REDUCE_GRAD"),
    (a_copy_steps_without_the_sum, "updated", "0REDUCE_GRAD", "nobody on rank 0 reads what 0REDUCE_GRAD has summed"),
    (a_micro_batch_turns_round, "once", "2F0", "micro-batch of 2F0 goes forward but never backward"),
    (the_directions_crossed, "matched", "2RECV_F0", "2RECV_F0 on rank 2 receives what 1SEND_F2"),
    (summed_before_both_have_gone_back, "alive", "3REDUCE_GRAD", "3REDUCE_GRAD reads what 3B1 makes only later"),
    (on_the_other_rank_of_its_stage, "listed", "0F1^1", "stands in the list of rank 0, not its own"),
    (gradient_to_the_other_rank_of_the_stage, "matched", "0RECV_B1^1", "sends to rank 0"),
    (sums_the_gradients_of_one_rank, "updated", "0REDUCE_GRAD", "0REDUCE_GRAD sums nothing of rank 1"),
    (whole_pass_taken_for_a_part, "once", "2W0", "has the weights' part of backward but not the input's"),
    (part_after_a_whole_pass, "ends", "1RECV_B1", "rank 1 waits at 1RECV_B1 for 2SEND_B1 of rank 0, which waits"),
    (a_size_of_its_own, "matched", "2RECV_F1", "2RECV_F1 expects 7 bytes, 1SEND_F1 sends 10"),
    (second_stage_of_the_table_first, "alive", "2F0", "2F0 reads what 1F0 makes only later", "ends"),
    (a_message_that_nobody_takes, "matched", "2SEND_F1", "received 0 times, not once"),
)
