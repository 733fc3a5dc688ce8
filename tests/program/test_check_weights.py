"""`check` finds updates that come too early, twice or never, and weights that are too old."""

from dataclasses import replace

from tests.program.legality import PROFILE, rejecting, replicas, two_stages
from tests.program.surgery import change, find, forget, move, reread, twice, without
from trainplan.plan.plan import plan
from trainplan.program.builder import Builder
from trainplan.program.check import faults
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program


def steps_before_backward() -> Program:
    return move(forget(two_stages(), "0STEP"), 0, "0STEP", before="0B1")


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


def shared_out(zero: int) -> Program:
    """Two replicas that share out two units, with two micro-batches; the second step."""
    return lower(plan(dp=2, micro=2, bucket=1000, blocks=2, zero=zero), PROFILE, batch=4, steps=2)


def not_reading(program: Program, reader: str, gather: str) -> Program:
    """An operation of rank 0 forgets to wait for weights."""
    of_gather = program.makes.row(find(program, gather))
    op = next(op.id for op in program.ops() if str(op) == reader and op.ranks == (0,))
    return reread(program, op, lambda row: [v for v in row if v not in of_gather])


def computes_with_old_weights() -> Program:
    return not_reading(shared_out(1), "0F0.1@1", "0GATHER_F0.1@1")


def computes_with_weights_that_are_gone() -> Program:
    return not_reading(shared_out(3), "0B1", "0GATHER_F1.1")


def share_is_not_stepped() -> Program:
    program = shared_out(2)
    token = [v for v in program.makes.row(find(program, "0SCATTER_GRAD1")) if program.value_rank[v] == 0]
    steps = [op.id for op in program.ops() if str(op) == "0STEP" and op.ranks == (0,)]
    return reread(program, steps[0], lambda row: [v for v in row if v not in token])


def test_every_stage_of_sharing_out_is_legal() -> None:
    assert [faults(shared_out(zero)) for zero in (1, 2, 3)] == [[], [], []]


test_rejects = rejecting(
    (computes_with_old_weights, "updated", "0F0@1", "computes with weights of unit 1 that nobody has gathered for it"),
    (computes_with_weights_that_are_gone, "updated", "0B1", "computes with weights of unit 1 that nobody has"),
    (share_is_not_stepped, "updated", "0SCATTER_GRAD1", "nobody on rank 0 reads what 0SCATTER_GRAD1 has summed"),
    (steps_before_backward, "updated", "0B1", "comes after 0STEP"),
    (steps_twice, "updated", "1STEP", "steps 2 times in one step", "alive"),
    (never_steps, "updated", "1B0@1", "never steps"),
    (sum_is_not_read, "updated", "0REDUCE_GRAD.1", "nobody on rank 1 reads what 0REDUCE_GRAD.1 has summed"),
    (sums_nothing, "updated", "0REDUCE_GRAD", "sums nothing of rank 0"),
    (exchange_before_backward, "alive", "0REDUCE_GRAD", "reads what 0B0 makes only later"),
    (too_stale, "fresh", "0F1@1", "reads weights of version 0; 0 update"),
    (from_the_future, "fresh", "1F0", "reads weights of version 1"),
    (backward_with_other_weights, "fresh", "0B0@1", "reads version 0, its forward read 1"),
    (reads_another_version_than_it_says, "fresh", "0F0@1", "claims version 0 and reads what 0STEP made"),
)
