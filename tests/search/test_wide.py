"""Very many plans, most of them only bounded: no bound is ever beaten, and the answer is that of simulating all."""

import random
from dataclasses import replace

import numpy as np
import pytest

from search.models import model
from trainplan.cluster.catalogue import device
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.text import text
from trainplan.predict.predict import predict
from trainplan.profile.by_block import by_block
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.report.answers import Recommended
from trainplan.search.best_first import best_first
from trainplan.search.closer import Closer
from trainplan.search.columns import FIELDS, Space, space
from trainplan.search.floor import floors
from trainplan.search.objective import TIME
from trainplan.search.recommend import recommend
from trainplan.solve.limits import limited
from trainplan.solve.resolve import draft
from trainplan.workload.load import load

SLOW_LINK = 3  # the seed of two nodes with 1 GB/s between them, where most of a step is communication
CLUSTERS = ("4xV100-16", "2x4xA100-80", "3x2xT4", "2x2xA100-80")


def gpt(name: str, layers: int = 4, hidden: int = 256) -> Profile:
    model = load(f"gpt:layers={layers},hidden={hidden},heads=8,seq=128,vocab=1024,batch=16")
    return estimate(model, device(name), samples=[1, 2, 4, 8, 16])


def some(seed: int, rows: int = 16) -> Space:
    """Some of the plans for some model on some cluster."""
    rng = random.Random(seed)
    where = cluster(CLUSTERS[seed % len(CLUSTERS)])
    if rng.random() < 0.5:
        where = with_overrides(where, {"link": rng.choice(["1GB/s", "10GB/s"])})
    profile = gpt(where.device(0).name, rng.choice([2, 3, 6]), rng.choice([128, 1024]))
    whole = space(profile, where, rng.choice([7, 16]), rng.choice(["fp32", "fp16"]), predicted=True)
    return replace(whole, rows=whole.rows[sorted(rng.sample(range(len(whole)), rows))])


def everything(found: Space):
    """Of every plan whether it may fit and its bounds, without and with cuts; and what is simulated."""
    known = floors(found)
    cut = Closer(found, known)
    rows = []
    for row in range(len(found)):
        p = draft(found.sketch(row), found.cluster, found.batch, cut.tables(row))
        rows.append((known.fits[row], known.seconds[row], cut(row)[0], p))
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_is_beaten_and_the_answer_is_that_of_simulating_everything(seed):
    whole = some(seed)
    free = everything(whole)
    # They say something: those of plans that are cut of most plans, those of all at once of most in most spaces.
    assert np.median([bound / p.step_s for may, _, bound, p in free if may and p.fits]) > 0.4
    assert np.median([bound / p.step_s for may, bound, _, p in free if may]) > 0.4 or seed == SLOW_LINK
    peaks = sorted(p.peak_bytes for *_, p in free)
    for memory in (None, int(peaks[len(peaks) // 3] / 0.94) + 1):
        found = replace(whole, cluster=limited(whole.cluster, memory))
        rows = free if memory is None else everything(found)
        for may, bound, closer_bound, p in rows:
            assert may or not p.fits, text(p.plan)
            assert not may or bound <= p.step_s * (1 + 1e-9), text(p.plan)
            assert not p.fits or closer_bound <= p.step_s * (1 + 1e-9), text(p.plan)
        answer = best_first(found, work=float("inf"))
        best = min(p.step_s for *_, p in rows if p.fits)
        assert answer.fitting[0].step_s == best
        assert (answer.left, answer.gap) == (0, 0.0)
        assert answer.standing.simulated < len(found)  # most were not simulated


def test_the_space_is_what_the_rules_of_a_plan_allow():
    """Every row is a legal plan, none comes twice, and all that can be run is there."""
    where, profile = cluster("2x4xA100-80"), gpt("A100-80")
    whole = space(profile, where, 16, predicted=True)
    assert len(np.unique(whole.rows, axis=0)) == len(whole) > 1000
    assert set(np.unique(whole.column("tp"))) == {1, 2, 4}  # as a node can be shared evenly
    assert whole.sizes["zero"] == 4
    assert set(whole.sizes) == set(FIELDS)
    for row in random.Random(0).sample(range(len(whole)), 40):
        sketch = whole.sketch(row)
        stages = tuple(range(1, sketch.wanted))
        rules.check(replace(sketch, stages=stages), 16, where.world)
    runnable = space(profile, where, 16)
    assert runnable.sizes["tp"] == runnable.sizes["sequence"] == 1
    assert len(runnable) < len(whole)
    assert set(np.unique(runnable.column("shard"))) == {0, 4}  # all replicas share out, or those of a node


def test_what_is_recommended_among_all_that_can_be_predicted():
    where, profile = cluster("2x4xA100-80"), gpt("A100-80", 3, 1024)
    found = recommend(profile, where, 16, predicted="bf16", top=3)
    assert found.considered > 1000
    assert found.simulated + found.pruned + found.left == found.considered
    assert all(row.prediction.plan.precision == "bf16" for row in found.ranked)
    assert found.gap == 0.0 or found.left
    said = str(Recommended(found))
    assert "space    dp " in said
    assert "with cuts and buckets as usual no plan that fits takes less than" in said
    assert "are predicted, not yet run here" in said
    plain = str(Recommended(recommend(profile, where, 16, top=3)))
    assert "are predicted, not yet run here" not in plain
    assert "(--predicted bf16 does: predicted, not yet run here)" in plain
    data = found.to_json()
    assert data["space"]["tp"] == 3
    assert (found.left, found.gap) == (0, 0.0)
    assert 0 < data["plans"][0]["step_s"] <= data["bound_s"]  # it has the best of the space, and only makes it faster
    assert f"(others were tried out for it: {TIME.words(data['plans'][0]['step_s'])})" in said
    tight = recommend(profile, limited(where, 700 * 2**20), 16, predicted="bf16")
    assert all(row.prediction.fits for row in tight.ranked)
    assert tight.too_big > found.too_big


def test_refused_where_plans_are_to_be_run():
    where, profile = cluster("2x4xA100-80"), gpt("A100-80", 2, 128)
    with pytest.raises(PlanError, match="was probed"):
        recommend(profile, replace(where, source="probed 2026-11-15"), 16, predicted="bf16")
    with pytest.raises(PlanError, match="predicted=bf16"):
        recommend(profile, where, 16, predicted="bf17")
    with pytest.raises(PlanError, match="does not say which operators"):
        recommend(model(), cluster("4xTitanRTX"), 16, predicted="fp32")


def test_what_is_kept_from_plan_to_plan_changes_nothing():
    """Groups, sums and variants are kept with cluster and profile: predicted by itself, a plan is the same."""
    whole = some(1, rows=12)
    kept = [p for *_, p in everything(whole)]
    for p in kept[:8]:
        fresh = replace(whole.profile)  # with nothing worked out
        assert predict(p.plan, fresh, replace(whole.cluster), whole.batch) == p, text(p.plan)


def test_blocks_all_at_once_are_blocks_one_by_one():
    for profile in (gpt("T4", 2, 128), model(3)):
        for samples in (1, 3, 16, 100):
            for quantity in ("forward_s", "saved_bytes"):
                one_by_one = [profile.total(quantity, b, b + 1, samples) for b in range(len(profile.blocks))]
                assert by_block(profile, quantity, samples).tolist() == one_by_one
