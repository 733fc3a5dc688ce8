"""What is recommended is said to fit by whoever predicts it, at the edge of memory too: torch's allocator decides."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search.models import model
from search.spaces import simulated
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.plan.text import text
from trainplan.predict.accuracy import plan_kind
from trainplan.predict.predict import MEMORY_MARGIN, Prediction, predict
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.report.answers import Predicted
from trainplan.search import recommend as search
from trainplan.search.answer import overfull
from trainplan.search.best_first import best_first
from trainplan.search.columns import Space, space
from trainplan.search.recommend import recommend
from trainplan.solve.limits import limited
from trainplan.solve.preload import brought
from trainplan.units import MIB
from trainplan.workload.load import load

BATCH = 8
GPT = "gpt:layers=3,hidden=128,heads=4,seq=64,vocab=499,batch=8"
WHERE = {"made up": "2xH200", "gpt": "2xH100-SXM"}


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return {
        "made up": model(3, 3, "H200", weights=16 * MIB),
        "gpt": estimate(load(GPT), cluster("1xH100-SXM").device(0), samples=[1, 2, 4, 8]),
    }


def whole(profile: Profile, name: str, memory: int | None = None) -> Space:
    """Some plans, few enough to simulate all of them."""
    found = space(profile, limited(cluster(WHERE[name]), memory), BATCH)
    keep = np.zeros(len(found), dtype=bool)
    keep[random.Random(name).sample(range(len(found)), 30)] = True
    return found.only(keep)


@pytest.fixture(scope="module")
def edges(profiles: dict[str, Profile]) -> dict[str, list[int]]:
    """Of each model, sizes of memory in which the tensors of some plan just fit, or nearly all that torch asks for."""
    found = {}
    for name, profile in profiles.items():
        plans = sorted(simulated(whole(profile, name)).plans, key=lambda p: p.step_s)
        sizes: set[int] = set()
        for p in (plans[0], plans[len(plans) // 2]):
            assert p.occupancy is not None
            tensors, all_ = int(p.peak_bytes / (1 - MEMORY_MARGIN)) + 2, p.occupancy.most.visible
            sizes |= {tensors, (tensors + all_) // 2, all_ + MIB}
        found[name] = sorted(sizes)
    return found


def of(p: Prediction) -> tuple[object, ...]:
    return p.fits, p.step_s, p.peak_bytes, p.limit_bytes, p.occupancy


@pytest.mark.parametrize("name", WHERE)
def test_what_is_recommended_is_predicted_to_fit(
    name: str, profiles: dict[str, Profile], edges: dict[str, list[int]]
) -> None:
    profile, here, offered = profiles[name], cluster(WHERE[name]), 0
    for memory in edges[name]:
        there = limited(here, memory)
        answer = recommend(profile, here, BATCH, memory=memory)
        for row in answer.ranked:
            again = predict(row.prediction.plan, profile, there, BATCH)
            assert again.fits, (memory, text(again.plan))
            assert of(again) == of(row.prediction)
            assert again.occupancy is not None
            assert again.occupancy.most.visible <= memory
            offered += 1
        for other in answer.rejected:
            again = predict(other.prediction.plan, profile, there, BATCH)
            assert not again.fits
            assert other.why == overfull(again)
            assert other.over_bytes == again.over_bytes > 0
    assert offered


@pytest.mark.parametrize("name", WHERE)
def test_the_winner_is_the_fastest_of_those_that_are_predicted_to_fit(
    name: str, profiles: dict[str, Profile], edges: dict[str, list[int]]
) -> None:
    """Every plan of the space, simulated; and tensors alone would have chosen others."""
    others = 0
    for memory in edges[name]:
        found = whole(profiles[name], name, memory)
        everything = simulated(found)
        fitting = [p.step_s for p in everything.plans if p.fits]
        by_tensors = [p.step_s for p in everything.plans if p.tensors_fit]
        for top in (1, 4):
            answer = best_first(found, top, work=float("inf"))
            assert [p.step_s for p in answer.fitting[:1]] == sorted(fitting)[:1]
            assert all(p.fits for p in answer.standing.shown())
        for row, p in enumerate(everything.plans):  # bounds of the search are of tensors: below what is reserved
            assert p.occupancy is not None
            assert everything.known.bytes[row] <= p.peak_bytes
            assert p.occupancy.most.reserved >= p.occupancy.most.allocated
        others += sorted(fitting)[:1] != sorted(by_tensors)[:1]
    assert others


def test_it_is_told_in_the_same_words(profiles: dict[str, Profile], edges: dict[str, list[int]]) -> None:
    """A plan whose tensors fit and that torch has no room for: what `predict` says is what `recommend` says."""
    profile = profiles["gpt"]
    for memory in edges["gpt"]:
        there = limited(cluster(WHERE["gpt"]), memory)
        alone = predict(plan(blocks=len(profile.blocks)), profile, there, BATCH)
        short = [p for p in simulated(whole(profile, "gpt", memory)).plans if p.tensors_fit and not p.fits]
        for p in [*short, alone]:
            if not p.tensors_fit or p.fits:
                continue
            assert p.occupancy is not None
            assert p.occupancy.words in overfull(p)
            assert p.over_bytes == p.occupancy.most.visible - memory > 0
            said = str(Predicted(p, profile, there))
            assert "DOES NOT FIT, though tensors would" in said
            assert f"margin   none: {p.occupancy.words}" in said
            answer = recommend(profile, there, BATCH, among=[p.plan])
            assert not answer.ranked or answer.best.plan != p.plan
            return
    pytest.fail("no plan was turned down by the allocator alone")


def test_where_a_batch_has_no_room_the_next_plan_is_taken(
    profiles: dict[str, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no rank of replicas had room for the batch that it loads: they are passed over, and the search goes on."""
    profile, here = profiles["made up"], cluster(WHERE["made up"])
    before = recommend(profile, here, BATCH)
    assert before.best.plan.dp == 2
    left = [row.prediction for row in before.ranked if row.prediction.plan.dp == 1]

    def short(found: Prediction, *where: Any) -> Prediction:
        ready = brought(found, *where)
        return replace(ready, tensors_fit=ready.plan.dp == 1)

    monkeypatch.setattr(search, "brought", short)
    after = recommend(profile, here, BATCH)
    assert {row.prediction.plan.dp for row in after.ranked} == {1}
    assert plan_kind(after.best.plan) == plan_kind(left[0].plan)
    assert after.best.step_s <= left[0].step_s  # the first is tried out further than those behind it
    assert after.considered == before.considered
    assert after.pruned >= 0


def test_where_no_batch_has_room_nothing_is_offered(
    profiles: dict[str, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, here = profiles["made up"], cluster(WHERE["made up"])
    monkeypatch.setattr(search, "brought", lambda found, *where: replace(brought(found, *where), tensors_fit=False))
    blocks = len(profile.blocks)
    answer = recommend(profile, here, BATCH, among=[plan(blocks=blocks), plan(dp=2, blocks=blocks)])
    assert not answer.ranked
    assert answer.rejected
    with pytest.raises(PlanError, match="more memory"):
        answer.best  # noqa: B018
