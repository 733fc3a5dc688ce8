"""Many plans on several cores are predicted as one by one, and refused as one by one."""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, PlanError, RunError
from trainplan.plan.plan import Plan, plan
from trainplan.predict import many
from trainplan.predict.many import FEWEST, dealt, predictions
from trainplan.predict.predict import predict
from trainplan.situation import profile_for

COUNT, BATCH = 2 * FEWEST, 64


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    """Every process that a test starts has ended when it is over. (Other tests keep theirs.)"""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


@pytest.fixture(scope="module")
def some() -> Any:
    """Plans for a small GPT, its profile, and a cluster."""
    there = cluster("2x8xA100-80")
    profile = profile_for("gpt:layers=2,hidden=256,heads=4,seq=64,vocab=512", there, BATCH)
    words = itertools.product(("gpipe", "1f1b"), (2, 4), (1, 2), (0, 1), ("none", "full"))
    shape = {"dp": 2, "pp": 2, "stages": (2,), "blocks": len(profile.blocks)}
    plans = [
        plan(schedule=schedule, micro=micro, tp=tp, zero=zero, recompute=recompute, **shape)
        for schedule, micro, tp, zero, recompute in words
    ]
    assert len(plans) == COUNT
    return plans, profile, there


def without_parent(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that this process predicts from now on: what others do does not show here."""
    here: list[Plan] = []
    monkeypatch.setattr(many, "predict", lambda plan, **rest: here.append(plan) or predict(plan, **rest))
    return here


def test_on_two_cores_as_one_by_one(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, profile, there = some
    here = without_parent(monkeypatch)
    together = predictions(plans, profile, there, BATCH, cores=2)
    assert not here
    for choices, found in zip(plans, together, strict=True):
        alone = predict(choices, profile, there, BATCH)
        assert found == alone
        assert found.plan is choices
        assert found.peaks == alone.peaks
    assert together[0].occupancy == predict(plans[0], profile, there, BATCH).occupancy
    assert here == plans[:1]  # played when it was asked for


def test_how_full_devices_are_is_worked_out_there(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, profile, there = some
    here = without_parent(monkeypatch)
    together = predictions(plans, profile, there, BATCH, cores=2, occupied=True)
    fitting = [found.fits for found in together]
    assert not here
    assert any(fitting)
    chosen = fitting.index(True)
    assert together[chosen].occupancy == predict(plans[chosen], profile, there, BATCH).occupancy


def test_one_core_and_few_plans_stay_here(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, profile, there = some
    here = without_parent(monkeypatch)
    assert predictions([], profile, there, BATCH) == []
    few = predictions(plans[: FEWEST + 1], profile, there, BATCH, cores=2, occupied=True)
    assert here == plans[: FEWEST + 1]
    assert few[0] == predict(plans[0], profile, there, BATCH)


@pytest.mark.parametrize("places", [(3, 20), (20, 3)])
def test_the_first_that_is_refused_is(some: Any, places: tuple[int, int]) -> None:
    """Wherever it was dealt, and with the words that it has alone."""
    plans, profile, there = some
    asked = list(plans)
    for place, dp in zip(places, (32, 64), strict=True):
        asked[place] = plan(dp=dp, blocks=len(profile.blocks))
    with pytest.raises(PlanError) as alone:
        predict(asked[min(places)], profile, there, BATCH)
    with pytest.raises(PlanError) as together:
        predictions(asked, profile, there, BATCH, cores=2)
    assert str(together.value) == str(alone.value)


def test_what_raises_there_raises_here(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, profile, there = some

    def broken(choices: Plan, **rest: Any) -> Any:
        return 1 / 0 if choices is plans[-1] else predict(choices, **rest)

    monkeypatch.setattr(many, "predict", broken)
    with pytest.raises(ZeroDivisionError):
        predictions(plans, profile, there, BATCH, cores=2)


def test_a_process_that_ends_is_told(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, profile, there = some
    monkeypatch.setattr(many, "predict", lambda plan, **rest: os._exit(1))
    with pytest.raises(RunError, match=f"{COUNT} predictions on 2 cores: a process ended without an answer"):
        predictions(plans, profile, there, BATCH, cores=2)


def test_no_core_is_refused(some: Any) -> None:
    plans, profile, there = some
    with pytest.raises(InputError, match=r"cores=0: at least one core has to work\. Try cores=1"):
        predictions(plans, profile, there, BATCH, cores=0)


@examples(25)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.booleans()), max_size=60),
    st.integers(1, 20),
)
def test_every_plan_is_dealt_once(choices: list[tuple[int, int, bool]], crew: int) -> None:
    """In hands that keep all busy; and profiles of ranks change as rarely as they can from plan to plan."""
    plans = [replace(plan(blocks=4), tp=tp, micro=micro, sequence="on" if on else "off") for tp, micro, on in choices]
    hands = dealt(plans, crew)
    order = [number for hand in hands for number in hand]
    assert sorted(order) == list(range(len(plans)))
    assert not plans or max(map(len, hands)) <= -(-len(plans) // crew)
    profiles = [(plans[number].tp, plans[number].sequence) for number in order]
    assert sum(a != b for a, b in itertools.pairwise(profiles)) == max(0, len(set(profiles)) - 1)
