"""Programs to break, and what is asked of a broken one."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from synthetic import chain
from trainplan.errors import ProgramError
from trainplan.plan.plan import plan
from trainplan.program.check import check, faults
from trainplan.program.check.passes import listed
from trainplan.program.check.specification import RULES
from trainplan.program.check.suspects import suspects
from trainplan.program.check.view import view_of
from trainplan.program.lower import lower
from trainplan.program.program import Program
from trainplan.program.wiring import wire

PROFILE = chain(2)


def two_stages(**fields) -> Program:
    """1F1B on two ranks with two micro-batches."""
    choices = {"pp": 2, "micro": 2, "schedule": "1f1b", "stages": (1,), "blocks": 2, **fields}
    return lower(plan(**choices), PROFILE, batch=4, steps=2)


def lockstep(**fields) -> Program:
    """The same in ticks, one step: a barrier after each."""
    choices = {"pp": 2, "micro": 2, "schedule": "lockstep", "stages": (1,), "blocks": 2, **fields}
    return lower(plan(**choices), PROFILE, batch=4)


def replicas(**fields) -> Program:
    """Two replicas of two blocks, a gradient bucket a block."""
    return lower(plan(dp=2, bucket=1000, blocks=2, **fields), PROFILE, batch=2)


def rejected(program: Program, rule: str, marked: str, why: str, also: Collection[str] = ()) -> None:
    """A program breaks one rule (and `also` others, which that entails), is said to, and the place is marked."""
    assert {fault.rule for fault in faults(program)} == {rule, *also}
    view = view_of(program, wire(program))
    if not list(listed(view)):  # the other rules need sound lists
        for judge, suspected in zip(RULES, suspects(view), strict=True):
            assert suspected or not list(judge(view)), judge
    with pytest.raises(ProgramError, match=why) as caught:
        check(program)
    said, grid = str(caught.value).split("\n  rank ", 1)
    assert f"\n  {rule}: " in said
    assert f"»{marked}«" in grid


Row = tuple[Callable[[], Program] | str, ...]


def rejecting(*rows: Row) -> Callable[..., None]:
    """A test of broken programs.

    A row: what makes the program, the rule that it breaks, an operation that is marked, what is said of it, and other
    rules that the break itself entails.
    """

    @pytest.mark.parametrize("row", rows, ids=lambda row: row[0].__name__)
    def test(row: Row) -> None:
        make, rule, marked, why, *also = row
        rejected(make(), rule, marked, why, also)  # type: ignore[operator]

    return test
