"""The thesis's methods to recommend beside ours: what each says of the same question."""

from dataclasses import replace
from pathlib import Path

import pytest

import trainplan
from search.models import model
from tests.bench.test_scores import outcome, result
from trainplan.bench.nearest import nearest
from trainplan.errors import InputError, PlanError
from trainplan.predict.by_equations import by_equations, one_device
from trainplan.solve.resolve import resolve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def profile():
    return model(samples_per_epoch=6400)


@pytest.fixture(scope="module")
def there():
    from trainplan.cluster.parse import cluster

    return cluster("2xTitanRTX")


def asked(profile, there, method, **words):
    return trainplan.recommend(profile, there, profile.batch, method=method, **words)


@pytest.mark.system("recommender", "S")
@pytest.mark.parametrize("key", ["recommender"])
def test_methods_explain_themselves(key, profile, there):
    for method in ("thesis", "hardware"):
        found = asked(profile, there, method)
        assert found.method == method
        assert found.how in str(found)
        assert [p.step_s for p in found.proposals] == sorted(p.step_s for p in found.proposals)
        assert found.to_json()["plans"][0]["plan"] == found.proposals[0].plan


def test_the_thesis_says_what_its_equations_say(profile, there):
    from trainplan.plan.text import parse

    found = {p.why: p for p in asked(profile, there, "thesis").proposals}
    assert set(found) == {"one device, timed", "5.1", "6.1 + 6.2"}
    assert found["one device, timed"].step_s == one_device(profile, profile.batch)
    for proposal in found.values():
        plan = resolve(parse(proposal.plan), profile, there, profile.batch)
        assert proposal.step_s == pytest.approx(by_equations(plan, profile, there, profile.batch))
    others = asked(profile, there, "thesis", candidates="ddp,zero1")
    assert [p.why for p in others.proposals] == ["5.1"]
    assert ("zero1", "the thesis has no equation for it") in others.dropped


def test_hardware_scales_one_device(profile, there):
    alone = one_device(profile, profile.batch)
    found = {p.why: p.step_s for p in asked(profile, there, "hardware").proposals}
    assert found["as measured"] == alone
    assert found["1 / 2 of one device"] == alone / 2
    assert found["one stage works at a time"] == alone
    with pytest.raises(PlanError, match="there it does not fit"):
        asked(profile, there, "hardware", memory=2**20)


def test_what_was_estimated_is_not_said_to_be_measured(profile, there):
    estimated = replace(profile, kind="estimated")
    for method, before, now in (
        ("thesis", "one device, timed", "one device, estimated"),
        ("hardware", "as measured", "as estimated"),
    ):
        assert before in str(asked(profile, there, method))
        found = str(asked(estimated, there, method))
        assert now in found
        assert before not in found


def test_candidates_are_not_run_on_devices_that_are_not_here(profile):
    """It went through all of them, and ended with a list of what was wrong with each."""
    from trainplan.cluster.parse import cluster

    absent = replace(profile, device="A100-80")
    with pytest.raises(InputError, match="on A100-80, and this machine has none"):
        asked(absent, cluster("4xA100-80"), "data", candidates="interleaved")


def test_benchmark_carries_speed_ups_over(profile, there, tmp_path):
    near = outcome(
        result("single", 4.0, 4.0, "single"), result("ddp", 2.5, 2.5), workload=profile.workload
    )  # fmt: skip
    single = near.results[0]
    near = replace(near, results=(replace(single, row=replace(single.row, ranks=1)), near.results[1]))
    far = outcome(result("ddp", 1.0, 1.0), workload="vgg11:mnist")
    for name, one in (("near", near), ("far", far)):
        one.save(tmp_path / f"{name}.json")
    found = asked(profile, there, "benchmark", results=[str(tmp_path)])
    by_plan = {p.plan.split()[0]: p for p in found.proposals}
    alone = one_device(profile, profile.batch)
    assert by_plan["single"].step_s == pytest.approx(alone)
    assert by_plan["dp=2"].step_s == pytest.approx(alone * 2.5 / 4)
    assert "the same workload on as many workers" in found.how
    assert any(why == "nothing of its kind ran in that case" for _, why in found.dropped)
    # On four workers twice the speed-up is expected of replicas, and none of one device.
    told = nearest([near], profile, 4)
    assert told.speedup(near.results[1], 4) == pytest.approx(2 * 4 / 2.5)
    assert told.speedup(near.results[0], 4) == pytest.approx(1)
    with pytest.raises(InputError, match="one device among"):
        nearest([far], profile, 2)


def test_the_nearest_case_is_the_most_alike():
    from trainplan.bench.results import read

    kept = [o for o in read([ROOT / "benchmarks" / "data"]) if o.workload.startswith("vgg11")]
    known = model(samples_per_epoch=6400)
    found = nearest(kept, replace(known, workload="vgg11:cifar10"), 4)
    assert (found.outcome.workers, found.distance) == (4, 0)


def test_data_runs_every_candidate(quick_start, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = trainplan.recommend(
        "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32,batch=4",
        "2xcpu",
        method="data",
        candidates="single,hsdp",
        steps=5,
    )
    assert [p.plan for p in found.proposals] == ["single"]
    assert found.proposals[0].step_s > 0
    assert found.proposals[0].why.startswith("median of")
    assert found.dropped[0][0] == "hsdp dp=2"


def test_words_that_do_not_go_together(profile, there):
    with pytest.raises(InputError, match="benchmark, data"):
        asked(profile, there, "bench")
    with pytest.raises(InputError, match="without --results"):
        asked(profile, there, "benchmark")
    with pytest.raises(InputError, match="reads no results"):
        asked(profile, there, "thesis", results=["x"])
    with pytest.raises(InputError, match="our model only"):
        asked(profile, there, "thesis", predicted="bf16")
    with pytest.raises(InputError, match="searches all plans"):
        asked(profile, there, "model", candidates="ddp")
