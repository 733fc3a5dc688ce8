"""What to rent: the same as searching every cluster by itself, and less work."""

import json
from dataclasses import replace

import pytest

from search.models import model
from trainplan.api import budget
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.profile.profile import Profile
from trainplan.search.market import Market, market
from trainplan.search.recommend import recommend
from trainplan.search.wishes import Wishes, wishes_of

BATCH = 4
SIZES = ("1x", "2x", "4x", "2x2x")


def slower(profile: Profile, device: str, times: float) -> Profile:
    blocks = [
        replace(b, forward_s=tuple(times * t for t in b.forward_s), backward_s=tuple(times * t for t in b.backward_s))
        for b in profile.blocks
    ]
    return replace(profile, device=device, blocks=tuple(blocks))


@pytest.fixture(scope="module")
def machines() -> list[tuple[Profile, Cluster]]:
    fast = model(1, blocks=3, device="A100-80")
    kinds = {"A100-80": fast, "T4": slower(fast, "T4", 3.0)}
    return [(profile, cluster(f"{size}{name}")) for name, profile in kinds.items() for size in SIZES]


def found(machines: list[tuple[Profile, Cluster]], top: int = 3, **words) -> tuple[Market, Wishes]:
    wishes = wishes_of("money" if words.get("deadline") else "time", epochs=90, **words)
    return market(machines, BATCH, wishes, top, lambda words, share: None), wishes


@pytest.mark.system("budget", "S")
@pytest.mark.parametrize("asked", [{"deadline": 4000.0}, {"budget": 9.0}])
def test_budget_chooses_the_machines_that_searching_each_would(
    machines: list[tuple[Profile, Cluster]], asked: dict
) -> None:
    answer, wishes = found(machines, **asked)
    each = [recommend(profile, there, BATCH, top=1, wishes=wishes) for profile, there in machines]
    values = sorted(wishes.best.value(one.best) for one in each if one.ranked)
    assert len(values) > 1
    offered = [wishes.best.value(offer.prediction) for offer in answer.offers]
    assert offered == sorted(offered)
    assert offered[0] == values[0]
    assert all(wishes.meets(offer.prediction) for offer in answer.offers)
    assert len(answer.refused) == sum(not one.ranked for one in each)
    assert len(answer.offers) + len(answer.passed) + len(answer.refused) == len(machines)


def test_a_longer_deadline_is_never_dearer_and_a_larger_budget_never_slower(
    machines: list[tuple[Profile, Cluster]],
) -> None:
    best = [found(machines, top=1, deadline=limit)[0].offers[0].prediction for limit in (2000.0, 9000.0, 40000.0)]
    prices = [p.price_per_epoch for p in best]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > prices[-1]
    best = [found(machines, top=1, budget=limit)[0].offers[0].prediction for limit in (3.5, 5.2, 30.0)]
    times = [p.epoch_s for p in best]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_idle_machines_are_not_offered(machines: list[tuple[Profile, Cluster]]) -> None:
    """One machine of two devices, and not two of them one of which would stand idle."""
    fast = [(profile, there) for profile, there in machines if there.name in ("2xA100-80", "2x2xA100-80")]
    answer, _ = found(fast, deadline=9000.0)
    assert [offer.cluster.name for offer in answer.offers] == ["2xA100-80"]
    assert answer.passed == ("2x2xA100-80",)


def test_what_nothing_keeps_to_is_refused_with_numbers(machines: list[tuple[Profile, Cluster]]) -> None:
    answer, _ = found(machines, deadline=1.0)
    assert answer.offers == ()
    assert len(answer.refused) == len(machines)
    assert answer.refused[0].cluster.name.endswith("A100-80")  # the nearest
    assert all("takes at least" in row.why for row in answer.refused)


def test_the_command_says_whose_prices(machines: list[tuple[Profile, Cluster]]) -> None:
    profile = machines[0][0]
    answer = budget(profile, deadline="1h", epochs=90, machines="1xA100-80,2xA100-80", batch=BATCH)
    said = str(answer)
    assert "the cheapest, within 1 h 0 min for 90 epochs" in said
    assert "price    A100-80: 2.79 USD an hour of one (Lambda on demand" in said
    assert "(2026)" in said
    data = json.loads(json.dumps(answer.to_json()))
    assert data["offers"][0]["usd"] == min(row["usd"] for row in data["offers"])
    assert data["offers"][0]["seconds"] <= 3600
    assert "nothing that can be rented keeps to it" in str(
        budget(profile, budget=1e-3, machines="2xA100-80", batch=BATCH)
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "Try --deadline 12h, or --budget 500"),
        ({"budget": 5, "top": 0}, "--top 0"),
        ({"budget": 5, "machines": "8xT4"}, "the profile is of A100-80, and says nothing about other devices"),
        (
            {"budget": 5, "machines": "2xA100-80", "set": ["price=0"]},
            "what they cost is not known. Try --set price=2.5",
        ),
        ({"budget": 5, "machines": "2xA1000"}, "A100"),
    ],
)
def test_what_cannot_be_asked(words: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        budget(model(1, blocks=3, device="A100-80"), **words)
    assert said in str(caught.value)
