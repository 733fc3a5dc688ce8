"""What to rent: the same as searching every cluster by itself, and less work."""

import json
from dataclasses import replace

import pytest

from search.models import model
from trainplan.api import budget
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, PlanError
from trainplan.profile.profile import Profile
from trainplan.search.market import Market, market
from trainplan.search.recommend import recommend
from trainplan.search.wishes import Wishes, wishes_of
from trainplan.situation import situation

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


def test_what_is_only_predicted_is_searched_where_it_is_asked_for(machines: list[tuple[Profile, Cluster]]) -> None:
    """In another precision it is cheaper; nobody knows who is not told, and who cannot compute in it is refused."""
    small = "gpt:layers=1,hidden=1024,heads=4,seq=256,vocab=512"
    words = {"deadline": "9999h", "machines": "1xA100-80,1xV100-16", "batch": 8}
    plain, asked = (budget(small, **words, predicted=precision) for precision in ("", "bf16"))
    assert "not searched: another precision than fp32, tp, sequence and recompute=selective" in str(plain)
    assert {offer.prediction.plan.precision for offer in plain.market.offers} == {"fp32"}
    assert "not searched" not in str(asked)
    assert "tp, sequence, precision and recompute=selective are predicted, not yet run here" in str(asked)
    assert [(row.cluster.name, row.why) for row in asked.market.refused] == [
        ("1xV100-16", "V100-16 does not compute in bf16")
    ]
    best = asked.market.offers[0].prediction
    assert best.plan.precision == "bf16"
    by_name = {offer.cluster.name: offer.prediction.price_per_epoch for offer in plain.market.offers}
    assert best.price_per_epoch < by_name["1xA100-80"]
    assert asked.to_json()["predicted"] == "bf16"
    with pytest.raises(PlanError, match="predicted=bf16"):
        market(machines, BATCH, wishes_of("money", 1e9), 1, lambda words, share: None, "bf17")


def test_recommend_says_how_to_ask_for_another_precision(machines: list[tuple[Profile, Cluster]]) -> None:
    one = cluster("2xA100-80")
    made_up = machines[0][0]  # of which nothing is known but its seconds: so nothing can be predicted
    assert not any("--predicted" in what for what in recommend(made_up, one, BATCH, top=1).left_out)
    where = situation("gpt:layers=2,hidden=256,heads=4,seq=64,vocab=512", one, 8, None, (), None, {})
    for predicted, said in (("", True), ("bf16", False)):
        answer = recommend(where.profile, one, 8, top=1, predicted=predicted)
        assert any("--predicted bf16 does" in what for what in answer.left_out) == said
    probed = replace(one, source="probed 2026-11-19")
    assert not any("--predicted" in what for what in recommend(where.profile, probed, 8, top=1).left_out)


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
