"""What is asked beside that a plan fits: the best by it, within it, or an error that says by how much it is missed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search.models import model
from trainplan import files
from trainplan.api import recommend as command
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, PlanError
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.predict.predict import Prediction
from trainplan.report.answers import Recommended
from trainplan.search.answer import Recommendation
from trainplan.search.columns import space
from trainplan.search.frameworks import FRAMEWORKS
from trainplan.search.recommend import recommend
from trainplan.search.wishes import wishes_of
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import draft

BATCH = 4
PROFILE = model(1, blocks=3, device="A100-80")


@pytest.fixture(scope="module")
def four() -> Cluster:
    return cluster("2x2xA100-80")


@pytest.fixture(scope="module")
def everything(four: Cluster) -> list[Prediction]:
    """All plans there are, simulated one by one."""
    whole, tables = space(PROFILE, four, BATCH), Tables(PROFILE)
    return [draft(whole.sketch(row), four, BATCH, tables) for row in range(len(whole))]


def asked(four: Cluster, **words) -> Recommendation:
    return recommend(PROFILE, four, BATCH, top=2, wishes=wishes_of(**words))


@pytest.mark.parametrize("objective", ["money", "memory"])
def test_the_best_is_that_of_simulating_everything(objective: str, four: Cluster, everything: list[Prediction]) -> None:
    found = asked(four, objective=objective)
    best = min(found.wishes.best.value(p) for p in everything if p.fits)
    assert found.wishes.best.value(found.best) <= best * (1 + 1e-3)
    assert found.better == 0
    assert found.bound <= best * (1 + 1e-9)
    said = str(Recommended(found))
    assert f"objective {objective}" in said
    assert f"none is {found.wishes.best.than} than the first" in said


def test_machines_are_rented_whole(four: Cluster) -> None:
    """So two devices of one machine cost as much an hour as one, and four twice as much for half the time."""
    found = asked(four, objective="money")
    assert found.best.plan.world == 2
    assert "dearer: " in found.ranked[1].why
    assert "it fits on one device: " in found.note


@pytest.mark.system("budget", "S")
def test_the_fastest_within_a_budget_and_the_cheapest_within_a_deadline(
    four: Cluster, everything: list[Prediction]
) -> None:
    fitting = [p for p in everything if p.fits]
    prices, times = sorted({p.price_per_epoch for p in fitting}), sorted({p.epoch_s for p in fitting})
    budget, deadline = 90 * prices[len(prices) // 3], 90 * times[len(times) // 3]
    fast = asked(four, budget=budget, epochs=90)
    assert 90 * fast.best.price_per_epoch <= budget
    best = min(p.epoch_s for p in fitting if 90 * p.price_per_epoch <= budget)
    assert fast.best.epoch_s <= best * (1 + 1e-3)
    cheap = asked(four, objective="money", deadline=deadline, epochs=90)
    assert 90 * cheap.best.epoch_s <= deadline
    least = min(p.price_per_epoch for p in fitting if 90 * p.epoch_s <= deadline)
    assert cheap.best.price_per_epoch <= least * (1 + 1e-3)


def test_what_cannot_be_kept_says_what_comes_nearest(four: Cluster) -> None:
    found = asked(four, deadline="1ms", budget=1e-6)
    assert found.ranked == found.rejected == ()
    assert len(found.missed) == 2
    assert "takes" in found.missed[0].by
    assert "USD, and there are 0.00000100" in found.missed[1].by
    assert "nothing keeps to what was asked. The nearest: " in str(Recommended(found))
    with pytest.raises(PlanError, match=r"within 1.00 ms for an epoch.*the nearest plan.*takes .*trainplan budget"):
        _ = found.best


def test_no_more_devices_than_asked(four: Cluster) -> None:
    assert {row.prediction.plan.world for row in asked(four, devices=3).ranked} <= {1, 2, 3}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_only_what_a_framework_runs(name: str, four: Cluster) -> None:
    whole = space(PROFILE, four, BATCH)
    runs = FRAMEWORKS[name].runs(whole)
    assert 0 < runs.sum() < len(whole)
    own = whole.only(runs)
    assert not (own.column("spread") > 0).any()
    several = own.column("pp") > 1
    if name in ("fsdp", "lightning"):
        assert not several.any()
    if name == "deepspeed":  # its pipelines go with ZeRO 1 at most
        assert set(own.column("zero")[several]) == {0, 1}
        assert set(own.column("zero")[~several]) == {0, 1, 2, 3}
    found = asked(four, runs_in=name)
    assert found.considered == runs.sum()
    assert f"what {name} runs (" in str(Recommended(found))
    rows = {tuple(row) for row in own.rows[:, [0, 3]].tolist()}
    assert {(row.prediction.plan.dp, row.prediction.plan.pp) for row in found.ranked} <= rows


# -- time to an accuracy -----------------------------------------------------------------------------------------------


def written(path: Path, asynchronous: float) -> str:
    """A study in which asynchronous workers take so many times as many epochs."""
    rows = [
        {"task": "digits", "rule": rule, "workers": workers, "epochs": epochs}
        for rule, workers, epochs in (("in step", 1, 4.0), ("ps-asp", 3, 4.0 * asynchronous), ("ssp", 2, None))
    ]
    data = {"made": "2026-11-16", "command": "trainplan study staleness", "targets": {"digits": 0.95}, "rows": rows}
    files.write(path, "staleness", data)
    return str(path)


@pytest.mark.system("time-to-accuracy", "P")
@pytest.mark.system("time-to-accuracy", "S")
def test_time_to_accuracy_is_epochs_times_seconds_of_a_study_that_is_named(tmp_path: Path) -> None:
    """Who waits for nobody is first where that takes fewer epochs, and not in the table where it takes many more."""
    there = cluster("4xA100-80")
    few, many = (written(tmp_path / f"{times}.json", times) for times in (0.5, 50.0))
    found = asked(there, objective="accuracy", study=few)
    assert [row.prediction.plan.exchange == "ps-asp" for row in found.ranked] == [True, False]
    for row, epochs in zip(found.ranked, (2.0, 4.0), strict=True):
        assert found.wishes.best.value(row.prediction) == pytest.approx(epochs * row.prediction.epoch_s)
        assert f" = {epochs:.2f} epochs of " in row.why
    assert found.best.plan.dp == 3
    said = str(Recommended(found))
    assert f"95% on digits ({few}: trainplan study staleness, 2026-11-16)" in said
    for words in ({"study": many}, {"study": few, "synchronous": True}):
        kept = asked(there, objective="accuracy", **words)
        assert all(row.prediction.plan.exchange not in ASYNCHRONOUS for row in kept.ranked)


# -- what cannot be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"objective": "monye"}, "--objective monye: the objectives are time, money, memory, accuracy. Try money."),
        ({"objective": "accuracy"}, "known only by training. Try --study FILE, which trainplan study staleness"),
        ({"study": "x.json"}, "--study x.json: a study says when an accuracy is reached. Try --objective accuracy"),
        ({"deadline": "0h"}, "--deadline 0: it is more than nothing"),
        ({"deadline": "soon"}, "'soon': it is not a number with a unit"),
        ({"budget": -1}, "--budget -1: it is more than nothing"),
        ({"devices": 0}, "--devices 0"),
        ({"runs_in": "fspd"}, "--for fspd: the frameworks are fsdp, deepspeed"),
    ],
)
def test_what_means_nothing_is_refused(words: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        wishes_of(**words)
    assert said in str(caught.value)


def test_studies_that_do_not_say_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "study.json", 2.0)
    with pytest.raises(InputError, match=r"it is of digits. Try --study .*study.json:digits"):
        wishes_of("accuracy", study=f"{path}:dgits")
    data = files.read(path, "staleness")
    files.write(path, "staleness", {**data, "rows": data["rows"][1:]})
    with pytest.raises(InputError, match="one worker did not reach 95% in it"):
        wishes_of("accuracy", study=path)


def test_what_a_cluster_cannot_be_asked(four: Cluster) -> None:
    with pytest.raises(PlanError, match=r"2x2xA100-80 has 4 devices. Try --devices 4"):
        asked(four, devices=5)
    free = replace(four, nodes=tuple(
        replace(node, price_per_hour=0.0, devices=tuple(replace(d, price_per_hour=0.0) for d in node.devices))
        for node in four.nodes
    ))  # fmt: skip
    for words in ({"objective": "money"}, {"budget": 3.0}):
        with pytest.raises(
            PlanError, match=r"an hour of the machines of 2x2xA100-80 costs is not known. Try --set price"
        ):
            asked(free, **words)


def test_other_methods_search_for_nothing() -> None:
    with pytest.raises(InputError, match=r"only our model searches for what is asked. Try --method model"):
        command(PROFILE, "2xA100-80", method="thesis", budget=3.0)


def test_plans_that_cannot_keep_to_it_are_not_simulated(four: Cluster) -> None:
    """Their bounds say so: and none that may is left out."""
    from trainplan.search.floor import floors

    whole = space(PROFILE, four, BATCH)
    known, wishes = floors(whole), wishes_of(deadline=1600 * 0.03)
    least = known.seconds * 1600
    assert (wishes.possible(whole, known) == (least <= 48)).all()
    assert 0 < wishes.possible(whole, known).sum() < np.isfinite(least).sum()
