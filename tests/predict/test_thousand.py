"""What plans share is worked out once, and changes no prediction."""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import thousand
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import cases, examples
from trainplan.plan.plan import plan
from trainplan.predict import cost
from trainplan.predict.predict import predict
from trainplan.program.lower import bodies, lower
from trainplan.program.program import Program, Ragged
from trainplan.program.schedules import _scheduled
from trainplan.uninterrupted import uninterrupted


@pytest.fixture(scope="module")
def some() -> Any:
    return thousand.drawn(32, layers=4)


def test_shared_work_changes_no_prediction(some: Any) -> None:
    """Random plans, one after the other; and each alone, when nothing is known of any other."""
    plans, profile, there = some
    plans = plans[:12]
    together = [predict(choices, profile, there, thousand.BATCH) for choices in plans]
    for choices, found in zip(plans, together, strict=True):
        bodies.forget()
        _scheduled.cache_clear()
        alone = predict(choices, replace(profile), replace(there), thousand.BATCH)
        assert alone == found
        assert alone.peaks == found.peaks


def same(one: Program, other: Program) -> None:
    """Every column, table and number of two programs."""
    for field in fields(Program):
        a, b = getattr(one, field.name), getattr(other, field.name)
        pairs = ((a.start, b.start), (a.items, b.items)) if isinstance(a, Ragged) else ((a, b),)
        for left, right in pairs:
            if isinstance(left, np.ndarray):
                np.testing.assert_array_equal(left, right, strict=True, err_msg=field.name)
            else:
                assert left == right, field.name


@examples(40)
@given(
    cases(), st.lists(st.sampled_from([("micro", 2), ("micro", 5), ("recompute", "full"), ("bucket", 40)]), max_size=3)
)
def test_shared_work_changes_no_program(case: Any, before: Any) -> None:
    """A plan lowered after others of its model, and when nothing is known of any other."""
    for word, value in before:
        other = replace(case.plan, **{word: value})
        lower(other, case.profile, other.dp * other.micro + 3, case.backend, case.steps, case.fold)
    found = case.program()
    bodies.forget()
    _scheduled.cache_clear()
    same(found, lower(case.plan, replace(case.profile), case.batch, case.backend, case.steps, case.fold))


def test_a_stage_is_worked_out_once(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that differ in micro-batches and replicas share the rows of their stages: so many lowerings of a stage."""
    _, profile, there = some
    made = []
    work_out = bodies.templates
    monkeypatch.setattr(bodies, "templates", lambda layout, *way: made.append(way) or work_out(layout, *way))
    bodies.forget()
    for dp, micro in ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16)):
        choices = plan(dp=dp, pp=3, micro=micro, schedule="1f1b", stages=(2, 4), blocks=len(profile.blocks))
        predict(choices, profile, there, thousand.BATCH)
    assert made == [(0, 0), (1, 0), (2, 0)]


def test_stages_that_are_alike_are_worked_out_once(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the model they are, and whoever they are for: only first, middle and last ones differ, and how many
    blocks are recomputed one by one."""
    _, profile, there = some
    made = []
    work_out = bodies.templates
    monkeypatch.setattr(bodies, "templates", lambda layout, *way: made.append(way) or work_out(layout, *way))
    bodies.forget()
    for stages, new in (((1, 2, 3), [(0, 0), (1, 0), (3, 0)]), ((1, 2, 4), [(2, 0), (3, 0)])):
        choices = plan(
            pp=4, micro=4, schedule="1f1b", stages=stages, blocks=len(profile.blocks), recompute="full"
        )  # fmt: skip
        predict(choices, profile, there, thousand.BATCH)
        assert made == new
        made.clear()


def test_what_was_priced_is_not_priced_again(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of work, and another plan with the same passes: their classes are the same objects."""
    _, profile, there = some
    priced = []
    for kind, rule in cost.RULES.items():
        monkeypatch.setitem(cost.RULES, kind, lambda c, s, rule=rule: priced.append(c) or rule(c, s))
    shape = {"dp": 2, "pp": 2, "micro": 8, "stages": (3,), "blocks": len(profile.blocks), "zero": 1}
    for schedule, some_new in (("1f1b", True), ("gpipe", False), ("1f1b-early", False)):
        priced.clear()
        predict(plan(schedule=schedule, **shape), profile, there, thousand.BATCH)
        assert bool(priced) == some_new
        assert len(set(priced)) == len(priced)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called meanwhile, of Python and of C: as many on a busy machine as on an idle one."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_prediction_goes_through_few_functions(some: Any) -> None:
    """Programs of most plans are small, so what a prediction takes is the number of its steps, and not the length of
    their arrays. (It was 5,400 a plan before members of enumerations were kept from numpy, 3,570 before which rules are
    broken was found in one compiled pass, and values were noted a piece at a time; and is 3,360.)
    Beside it stands the same prediction of a program that is ten times as long."""
    plans, profile, there = some
    plans = [choices for choices in plans if choices.micro >= 4][:8]
    for choices in plans:
        predict(choices, profile, there, thousand.BATCH)
    each = [calls_of(partial(predict, choices, profile, there, thousand.BATCH)) for choices in plans]
    assert np.mean(each) < 3_500
    short, long = (
        plan(pp=2, micro=micro, schedule="1f1b", stages=(3,), blocks=len(profile.blocks)) for micro in (6, 60)
    )
    counts = []
    for choices in (short, long):
        predict(choices, profile, there, 60)
        counts.append(calls_of(partial(predict, choices, profile, there, 60)))
    assert counts[1] < 1.2 * counts[0]


def test_predictions_leave_nothing_to_the_collector_of_garbage(some: Any) -> None:
    """Nothing that refers to itself in a circle: so a search need not be interrupted to look for such."""
    plans, profile, there = some
    for choices in plans[:12]:  # numba compiles
        predict(choices, profile, there, thousand.BATCH)
    gc.collect()
    with uninterrupted():
        assert not gc.isenabled()
        profile = replace(profile)
        kept = [predict(choices, profile, there, thousand.BATCH).step_s for choices in plans[:12]]
        assert gc.collect() == 0
    assert gc.isenabled()
    assert len(kept) == 12


def test_the_benchmark_says_where_time_goes(some: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thousand, "drawn", lambda count, layers: some)
    thousand.main(["--plans", "12", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["calls"]["lower"] == found["calls"]["check"] == found["calls"]["peaks"] == 12
    assert found["calls"]["play"] == 24  # once more as if communication were free
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert {"machine", "made", "command"} <= set(found)
    assert found["at_once"]["cores"] >= 1
    assert 0 < found["at_once"]["cpu_s"] < found["at_once"]["cores"] * found["at_once"]["passed_s"] + 1
