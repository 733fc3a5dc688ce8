"""What was measured on workers of different speed: the pick gives the slow ones less to do, and that pays."""

from pathlib import Path

import pytest

from trainplan import api
from trainplan.bench.results import read

KEPT = Path(__file__).parents[2] / "benchmarks" / "data" / "uneven-2-cores"


def test_the_pick_runs_faster_than_any_plan_that_treats_workers_alike() -> None:
    outcomes = read([KEPT])
    assert {outcome.network for outcome in outcomes} == {"resnet18", "examples/net.py"}
    for outcome in outcomes:
        ran = {result.system: result for result in outcome.ran}
        assert "ratio=2,1" in ran["recommended"].plan
        others = [result.measured_s for system, result in ran.items() if system != "recommended"]
        assert len(others) == 4
        assert ran["recommended"].measured_s < 0.9 * min(others)


def test_no_constant_rule_keeps_up() -> None:
    found = {summary["way"]: summary for summary in api.bench_accuracy([str(KEPT)]).to_json()["summaries"]}
    assert found["ours"]["hits"] == found["ours"]["cases"] == 2
    assert found["ours"]["mean_regret"] < 0.03
    assert found["constant"]["mean_regret"] == pytest.approx(0.27, abs=0.01)
