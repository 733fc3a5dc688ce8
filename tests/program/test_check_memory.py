"""`check` finds values that are read too early, too late or in the wrong place."""

from tests.program.legality import PROFILE, rejecting, two_stages
from tests.program.surgery import change, find, move, reread, values_between
from trainplan.plan.plan import plan
from trainplan.program.builder import Builder
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program


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


test_rejects = rejecting(
    (backward_before_forward, "alive", "0B0", "reads what 0F0 makes only later", "ends"),
    (read_after_free, "alive", "0B0", "reads what 0F1 has freed already"),
    (freed_before_made, "alive", "0F0", "frees what 0F1 makes only later"),
    (read_on_another_rank, "alive", "1F0", "reads a value of rank 0, where it does not run"),
    (made_on_another_rank, "alive", "0F0", "makes a value of rank 1, not of its own"),
    (freed_by_another_rank, "alive", "1STEP", "frees a value of rank 0, not of its own"),
    (recomputed_too_late, "alive", "0B0.1", "reads what 0R0.1 makes only later", "ends"),
)
