"""`check` finds parcels that are given up too early, never come back, or come back too late."""

from synthetic import chain
from tests.program.legality import rejecting
from tests.program.surgery import change, find, move, reread, values_between, without
from trainplan.plan.plan import plan
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program

PROFILE = chain(6)


def away(**choices) -> Program:
    return lower(plan(blocks=6, offload="activations", away=((3,),), **choices), PROFILE, batch=2)


def test_programs_in_which_parcels_go_away_are_legal() -> None:
    for recompute in ("none", "full", "except-last"):
        check(away(micro=2, recompute=recompute))


def never_comes_back() -> Program:
    program = away()
    left = values_between(program, "0FETCH0.1", "0B0.4")
    program = reread(program, find(program, "0B0.4"), lambda row: [v for v in row if v not in left])
    return without(program, "0FETCH0.1")


def comes_back_too_late() -> Program:
    return move(away(), 0, "0FETCH0.1", before="0B0.5")


def given_up_too_early() -> Program:
    """Before its copy is over: nobody has waited."""
    program = away()
    (parcel,) = [v for v in values_between(program, "0F0.1", "0OFFLOAD0.1") if program.value_kind[v] == Value.SAVED]
    return change(program, "value_end", parcel, find(program, "0F0.2"))


def not_the_one_that_went() -> Program:
    program = away()
    fetch, other = find(program, "0FETCH0.1"), values_between(program, "0OFFLOAD0", "0FETCH0")
    return reread(program, fetch, lambda row: [*(v for v in row if program.value_kind[v] != Value.HOST), *other])


def nobody_waits_for_it() -> Program:
    program = away()
    brought = values_between(program, "0FETCH0.1", "0B0.4")
    return reread(program, find(program, "0B0.4"), lambda row: [v for v in row if v not in brought])


test_rejects = rejecting(
    (never_comes_back, "back", "0OFFLOAD0.1", "comes back 0 times"),
    (comes_back_too_late, "alive", "0B0.4", "reads what 0FETCH0.1 makes only later", "ends"),
    (given_up_too_early, "back", "0F0.2", "gives up what 0OFFLOAD0.1 copies, and does not wait for it"),
    (not_the_one_that_went, "back", "0FETCH0.1", "does not read what 0OFFLOAD0.1 has copied out"),
    (nobody_waits_for_it, "back", "0FETCH0.1", "no backward pass reads"),
)
