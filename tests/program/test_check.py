"""`check` finds every way to break a program that we could think of, names the rule and shows the place."""

from dataclasses import replace

import numpy as np
import pytest

from synthetic import chain
from tests.program.surgery import change, find, move, relist, reread, twice, values_between, without
from trainplan.errors import ProgramError
from trainplan.plan.plan import plan
from trainplan.program.builder import Builder
from trainplan.program.check import check, faults
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program

PROFILE = chain(2)


def two_stages(**fields) -> Program:
    """1F1B on two ranks with two micro-batches."""
    choices = {"pp": 2, "micro": 2, "schedule": "1f1b", "stages": (1,), "blocks": 2, **fields}
    return lower(plan(**choices), PROFILE, batch=4, steps=2)


def replicas(**fields) -> Program:
    """Two replicas of two blocks, a gradient bucket a block."""
    return lower(plan(dp=2, bucket=1000, blocks=2, **fields), PROFILE, batch=2)


# -- listed -------------------------------------------------------------------------------------------------------


def left_out() -> Program:
    program = two_stages()
    return relist(program, 1, lambda row: [op for op in row if op != find(program, "1F1")])


def listed_twice() -> Program:
    program = two_stages()
    return relist(program, 0, lambda row: [*row, find(program, "0F0")])


def on_a_strange_rank() -> Program:
    program = two_stages()
    op = find(program, "1F1")
    return relist(relist(program, 1, lambda row: [o for o in row if o != op]), 0, lambda row: [*row, op])


def member_does_not_come() -> Program:
    program = replicas()
    return relist(program, 1, lambda row: [op for op in row if op != find(program, "0REDUCE_GRAD")])


# -- once ---------------------------------------------------------------------------------------------------------


def forward_doubled() -> Program:
    return twice(two_stages(), "0F1")


def backward_doubled() -> Program:
    return twice(two_stages(), "1B0")


def never_forward() -> Program:
    return without(two_stages(), "0F1")


def never_backward() -> Program:
    return without(two_stages(), "1B1@1")


def micro_batch_skips_a_stage() -> Program:
    names = ("0SEND_F1", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "0RECV_B1")
    messages = [v for a, b in ((0, 1), (4, 5)) for v in values_between(two_stages(), names[a], names[b])]
    program = without(two_stages(), *names)
    # Nor do the messages exist any more: nothing but the count is wrong.
    keep = ~np.isin(np.arange(len(program.value_kind)), messages)
    number = np.cumsum(keep) - 1
    names = ("value_kind", "value_bytes", "value_rank", "value_maker", "value_end")
    reads = replace(program.reads, items=number[program.reads.items])
    return replace(program, reads=reads, **{name: getattr(program, name)[keep] for name in names})


def stages_see_other_micro_batches() -> Program:
    """As many on each stage, but not the same."""
    build = Builder(world=2)
    for rank, micro in ((0, 0), (0, 1), (1, 0), (1, 2)):
        saved = f"{rank} {micro}"
        build.op(rank, f"{rank}F{micro}", makes={saved: (Value.SAVED, 1)})
        build.op(rank, f"{rank}B{micro}", reads=[saved], frees=[saved])
    return build.program()


def weights_part_is_missing() -> Program:
    build = Builder(world=1)
    for text in ("0F0", "0I0", "0W0", "0F1", "0I1"):
        build.op(0, text)
    return build.program()


def input_part_is_missing() -> Program:
    build = Builder(world=1)
    for text in ("0F0", "0B0", "0W0"):
        build.op(0, text)
    return build.program()


# -- matched ------------------------------------------------------------------------------------------------------


def receive_dropped() -> Program:
    return without(two_stages(), "1RECV_F1")


def send_dropped() -> Program:
    return without(two_stages(), "1SEND_B0")


def sizes_differ() -> Program:
    program = two_stages()
    return change(program, "bytes", find(program, "1RECV_F0"), 11)


def to_the_wrong_rank() -> Program:
    program = lower(
        plan(pp=3, micro=1, schedule="gpipe", stages=(1, 2), blocks=3), chain(3), batch=1
    )  # fmt: skip
    return change(program, "peer", find(program, "0SEND_F0"), 2)


def micro_batches_crossed() -> Program:
    program = two_stages()
    first, second = values_between(program, "0SEND_F0", "1RECV_F0"), values_between(program, "0SEND_F1", "1RECV_F1")
    program = reread(program, find(program, "1RECV_F0"), lambda row: second)
    return reread(program, find(program, "1RECV_F1"), lambda row: first)


def steps_crossed() -> Program:
    program = two_stages()
    first, second = values_between(program, "0SEND_F0", "1RECV_F0"), values_between(program, "0SEND_F0@1", "1RECV_F0@1")
    program = reread(program, find(program, "1RECV_F0"), lambda row: second)
    return reread(program, find(program, "1RECV_F0@1"), lambda row: first)


def received_twice() -> Program:
    program = two_stages()
    message = values_between(program, "0SEND_F0", "1RECV_F0")
    return reread(program, find(program, "1RECV_F1"), lambda row: [*row, *message])


def gradient_received_as_activation() -> Program:
    build = Builder(world=2)
    build.op(0, "0SEND_F0", to=1, makes={"h": (Value.MESSAGE, 4)})
    build.op(1, "1RECV_B0>0", to=0, reads=["h"], frees=["h"], makes={"h on 1": (Value.BOUNDARY, 4)})
    return build.program()


def message_from_nowhere() -> Program:
    build = Builder(world=2)
    build.value(-1, "h", Value.MESSAGE, 4)
    build.op(1, "1RECV_F0", to=0, reads=["h"], frees=["h"], makes={"h on 1": (Value.BOUNDARY, 4)})
    return build.program()


def in_flight_without_a_message() -> Program:
    program = two_stages()
    (value,) = values_between(program, "0F0", "0SEND_F0")
    return change(program, "value_rank", value, -1)


# -- alive --------------------------------------------------------------------------------------------------------


def backward_before_forward() -> Program:
    program = lower(plan(blocks=2), PROFILE, batch=1)
    return move(program, 0, "0B0", before="0F0")


def read_after_free() -> Program:
    program = two_stages()
    (saved,) = [v for v in values_between(program, "0F0", "0B0") if program.value_kind[v] == Value.SAVED]
    return change(program, "value_end", saved, find(program, "0F1"))


def freed_before_made() -> Program:
    program = two_stages()
    (saved,) = [v for v in values_between(program, "0F1", "0B1") if program.value_kind[v] == Value.SAVED]
    program = reread(program, find(program, "0B1"), lambda row: [v for v in row if v != saved])
    return change(program, "value_end", saved, find(program, "0F0"))


def read_on_another_rank() -> Program:
    """A stage that takes what the stage before it made without a message."""
    program = two_stages()
    return reread(program, find(program, "1F0"), lambda row: [*row, *values_between(program, "0F0", "0SEND_F0")])


def made_on_another_rank() -> Program:
    """An activation that appears where the next stage is, without a message."""
    build = Builder(world=2)
    build.op(0, "0F0", makes={"saved": (Value.SAVED, 1), "h": (Value.BOUNDARY, 1)})
    build.op(1, "1F0", reads=["h"], frees=["h"])
    build.op(1, "1B0")
    build.op(0, "0B0", reads=["saved"], frees=["saved"])
    return change(build.program(), "value_rank", 1, 1)


def freed_by_another_rank() -> Program:
    program = two_stages()
    (saved,) = [v for v in values_between(program, "0F0", "0B0") if program.value_kind[v] == Value.SAVED]
    return change(program, "value_end", saved, find(program, "1STEP"))


def recomputed_too_late() -> Program:
    program = lower(plan(blocks=2, recompute="full"), PROFILE, batch=1)
    return move(program, 0, "0B0.1", before="0R0.1")


# -- updated ------------------------------------------------------------------------------------------------------


def steps_before_backward() -> Program:
    # Reads nothing any more, so that only the order is wrong.
    program = two_stages()
    program = reread(program, find(program, "0STEP"), lambda row: [])
    kept = np.flatnonzero(program.value_end == find(program, "0STEP"))
    for value in kept:
        program = change(program, "value_end", value, -1)
    return move(program, 0, "0STEP", before="0B1")


def steps_twice() -> Program:
    return twice(two_stages(), "1STEP")


def never_steps() -> Program:
    return without(two_stages(), "1STEP@1")


def sum_is_not_read() -> Program:
    program = replicas()
    token = [v for v in program.makes.row(find(program, "0REDUCE_GRAD.1")) if program.value_rank[v] == 1]
    steps = [op.id for op in program.ops() if str(op).startswith("0STEP") and op.ranks == (1,)]
    return reread(program, steps[0], lambda row: [v for v in row if v not in token])


def sums_nothing() -> Program:
    program = replicas()
    op = find(program, "0REDUCE_GRAD")
    return reread(program, op, lambda row: [v for v in row if program.value_rank[v] != 0])


def exchange_before_backward() -> Program:
    program = replicas()
    return move(program, 0, "0REDUCE_GRAD", before="0F0")


# -- fresh --------------------------------------------------------------------------------------------------------


def too_stale() -> Program:
    program = two_stages()
    for name in ("0F1@1", "0B1@1"):
        program = change(program, "version", find(program, name), 0)
    return program


def from_the_future() -> Program:
    program = two_stages()
    for name in ("1F0", "1B0"):
        program = change(program, "version", find(program, name), 1)
    return program


def backward_with_other_weights() -> Program:
    program = replace(two_stages(), staleness=1)
    return change(program, "version", find(program, "0B0@1"), 0)


def reads_another_version_than_it_says() -> Program:
    build = Builder(world=1, steps=2, staleness=1)
    build.value(0, "w0", Value.WEIGHTS, 1)
    for step, weights in ((0, "w0"), (1, "w1")):
        mark = f"@{step}" if step else ""
        build.op(0, f"0F0{mark}", reads=[weights], version=0)
        build.op(0, f"0B0{mark}", reads=[weights], version=0)
        build.op(0, f"0STEP{mark}", makes={f"w{step + 1}": (Value.WEIGHTS, 1)})
    return build.program()


# -- ends ---------------------------------------------------------------------------------------------------------


def waits_before_it_sends() -> Program:
    """Rank 0 waits for the gradient of what it has not sent yet."""
    return move(two_stages(), 0, "0RECV_B0", before="0SEND_F0")


def opposite_orders() -> Program:
    """Two ranks take part in two sums of the same group, each in another order."""
    program = replicas()
    ops = [find(program, name) for name in ("0REDUCE_GRAD", "0REDUCE_GRAD.1")]
    for rank in (0, 1):  # the sums stand together, after what they sum
        rest = [op for op in program.lists.row(rank).tolist() if op not in ops]
        at = rest.index(find(program, "0LOSS"))
        order = ops if rank == 0 else ops[::-1]
        program = relist(program, rank, lambda _, rest=rest, at=at, order=order: rest[:at] + order + rest[at:])
    return program


def both_receive_first() -> Program:
    build = Builder(world=2)
    build.op(0, "0SEND_F0", to=1, makes={"there": (Value.MESSAGE, 1)})
    build.op(1, "1SEND_B0", to=0, makes={"back": (Value.MESSAGE, 1)})
    build.op(0, "0RECV_B0", to=1, reads=["back"], frees=["back"], makes={"g": (Value.BOUNDARY, 1)})
    build.op(1, "1RECV_F0", to=0, reads=["there"], frees=["there"], makes={"h": (Value.BOUNDARY, 1)})
    return relist(relist(build.program(), 0, lambda row: row[::-1]), 1, lambda row: row[::-1])


def three_in_a_circle() -> Program:
    """Each rank waits for its left neighbour before it sends to its right one."""
    build = Builder(world=3)
    for rank in range(3):
        build.op(rank, f"{rank}SEND_F0>{(rank + 1) % 3}", to=(rank + 1) % 3, makes={f"m{rank}": (Value.MESSAGE, 1)})
    for rank in range(3):
        left = (rank - 1) % 3
        made = {f"h{rank}": (Value.BOUNDARY, 1)}
        build.op(rank, f"{rank}RECV_F0>{left}", to=left, reads=[f"m{left}"], frees=[f"m{left}"], makes=made)
    program = build.program()
    for rank in range(3):
        program = relist(program, rank, lambda row: row[::-1])
    return program


BROKEN = [
    # program, the rules that it breaks, an operation that is marked, and what is said of it
    (left_out, "listed", "1F1 missing", "stands 0 times"),
    (listed_twice, "listed", "0F0", "stands 2 times"),
    (on_a_strange_rank, "listed", "1F1", "stands in the list of rank 0, not its own"),
    (member_does_not_come, "listed", "0REDUCE_GRAD missing", r"for ranks \[0, 1\] and stands in the lists of \[0\]"),
    (forward_doubled, "once", "0F1", "forward runs a second time"),
    (backward_doubled, "once", "1B0", "backward runs a second time"),
    (never_forward, "once", "0B1", "goes backward but never forward"),
    (never_backward, "once", "1F1@1", "goes forward but never backward"),
    (micro_batch_skips_a_stage, "once", "1F0", "stage 1 sees 3 micro-batches where its pipeline has 4"),
    (stages_see_other_micro_batches, "once", "0F0", "stage 0 sees 2 micro-batches where its pipeline has 3"),
    (weights_part_is_missing, "once", "0I1", "not the weights'"),
    (input_part_is_missing, "once", "0W0", "not the input's"),
    (receive_dropped, "matched", "0SEND_F1", "received 0 times, not once"),
    (send_dropped, "matched", "0RECV_B0", "receives what nobody sends"),
    (sizes_differ, "matched", "1RECV_F0", "expects 11 bytes, 0SEND_F0 sends 10"),
    (to_the_wrong_rank, "matched", "1RECV_F0", "on rank 1 receives what 0SEND_F0 on rank 0 sends to rank 2"),
    (micro_batches_crossed, "matched", "1RECV_F1", "receives what 0SEND_F0"),
    (steps_crossed, "matched", "1RECV_F0", "receives what 0SEND_F0@1"),
    (received_twice, "matched", "1RECV_F1", "receives 2 messages, not one"),
    (gradient_received_as_activation, "matched", "1RECV_B0>0", "receives what 0SEND_F0"),
    (message_from_nowhere, "matched", "1RECV_F0", "receives what nobody sends"),
    (in_flight_without_a_message, "matched", "0F0", "what 0F0 makes is on no rank, but no message"),
    (backward_before_forward, "alive", "0B0", "reads what 0F0 makes only later"),
    (read_after_free, "alive", "0B0", "reads what 0F1 has freed already"),
    (freed_before_made, "alive", "0F0", "frees what 0F1 makes only later"),
    (read_on_another_rank, "alive", "1F0", "reads a value of rank 0, where it does not run"),
    (made_on_another_rank, "alive", "0F0", "makes a value of rank 1, not of its own"),
    (freed_by_another_rank, "alive", "1STEP", "frees a value of rank 0, not of its own"),
    (recomputed_too_late, "alive", "0B0.1", "reads what 0R0.1 makes only later"),
    (steps_before_backward, "updated", "0B1", "comes after 0STEP"),
    (steps_twice, "updated", "1STEP", "steps 2 times in one step"),
    (never_steps, "updated", "1B0@1", "never steps"),
    (sum_is_not_read, "updated", "0REDUCE_GRAD.1", "nobody on rank 1 reads what 0REDUCE_GRAD.1 has summed"),
    (sums_nothing, "updated", "0REDUCE_GRAD", "sums nothing of rank 0"),
    (exchange_before_backward, "alive", "0REDUCE_GRAD", "reads what 0B0 makes only later"),
    (too_stale, "fresh", "0F1@1", "reads weights of version 0; 0 update"),
    (from_the_future, "fresh", "1F0", "reads weights of version 1"),
    (backward_with_other_weights, "fresh", "0B0@1", "reads version 0, its forward read 1"),
    (reads_another_version_than_it_says, "fresh", "0F0@1", "claims version 0 and reads what 0STEP made"),
    (waits_before_it_sends, "ends", "0RECV_B0", "rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1, which waits at"),
    (opposite_orders, "ends", "0REDUCE_GRAD", "rank 0 waits for ever at 0REDUCE_GRAD"),
    (both_receive_first, "ends", "0RECV_B0", "rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1"),
    (three_in_a_circle, "ends", "0RECV_F0>2", "rank 0 waits at 0RECV_F0>2 for 2SEND_F0>0 of rank 2"),
]
# What the break itself entails beyond the rule that it is about.
ALSO = {
    "backward_doubled": {"alive"},  # the second finds nothing left to read
    "steps_twice": {"alive"},
    "steps_crossed": {"ends"},
    "backward_before_forward": {"ends"},
    "recomputed_too_late": {"ends"},
}


@pytest.mark.parametrize(("broken", "rule", "marked", "why"), BROKEN, ids=[row[0].__name__ for row in BROKEN])
def test_rejects(broken, rule, marked, why) -> None:
    program = broken()
    rules = {fault.rule for fault in faults(program)}
    assert rules == {rule} | ALSO.get(broken.__name__, set())
    with pytest.raises(ProgramError, match=why) as caught:
        check(program)
    said, grid = str(caught.value).split("\n  rank ", 1)
    assert f"\n  {rule}: " in said
    assert f"»{marked}«" in grid


def test_the_programs_that_were_broken_are_legal() -> None:
    for program in (two_stages(), replicas(), two_stages(schedule="gpipe"), replicas(recompute="full")):
        assert check(program) is program


def test_all_faults_are_listed_and_many_are_counted() -> None:
    program = two_stages()
    for op in range(len(program)):
        if program.name(op).startswith("1RECV"):
            program = change(program, "bytes", op, 11)
    with pytest.raises(ProgramError, match=r"4 fault\(s\)") as caught:
        check(program)
    assert str(caught.value).count("expects 11 bytes") == 4
    many = replace(program, version=program.version + 5)
    with pytest.raises(ProgramError, match="… and") as caught:
        check(many)
    assert len(str(caught.value).splitlines()) < 20  # and so the message stays one that can be read


def test_grid_shows_the_part_of_a_long_list_where_the_fault_is() -> None:
    program = lower(plan(pp=2, micro=60, schedule="gpipe", stages=(1,), blocks=2), PROFILE, batch=60)
    program = change(program, "version", find(program, "1B30"), 1)
    with pytest.raises(ProgramError) as caught:
        check(program)
    (line,) = [line for line in str(caught.value).splitlines() if "rank 1:" in line]
    assert "… " in line
    assert line.endswith(" …")
    assert "1B31 1SEND_B31 »1B30« 1SEND_B30" in line
