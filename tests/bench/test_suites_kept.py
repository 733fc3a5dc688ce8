"""What the suite said on many cores, and on slices of a GPU: hits, regret and errors, as the docs have them."""

import json
from pathlib import Path

import pytest

from trainplan import api
from trainplan.bench.results import read

KEPT = Path(__file__).parents[2] / "benchmarks" / "data"
PIPELINES = ("gpipe", "dapple", "chimera", "interleaved")


def of(folder: str, again: bool = False) -> dict[str, dict[str, float]]:
    found = api.bench_accuracy([str(KEPT / folder)], again=again).to_json()
    return {summary["way"]: summary for summary in found["summaries"]}


def test_on_cores_the_pick_is_the_fastest_or_as_good() -> None:
    ways = of("suite-cores")
    assert ways["ours"]["cases"] == ways["ours"]["hits"] == 18
    assert ways["ours"]["mean_regret"] < 0.03
    assert ways["ours"]["mean_regret"] < ways["constant"]["mean_regret"] < ways["thesis"]["mean_regret"]


def test_on_cores_steps_take_as_long_as_predicted() -> None:
    """In the median of every system, within what two halves of the same runs are apart; and few are far off."""
    found = api.bench_accuracy([str(KEPT / "suite-cores")]).to_json()["errors"]
    assert {"single", "ddp", "zero1", *PIPELINES} < {row["group"] for row in found["system"]}
    for row in found["system"]:
        assert row["median"] <= max(0.1, 2 * row["noise"]), row
    runs = [result.row for outcome in read([KEPT / "suite-cores"]) for result in outcome.ran if result.row]
    assert len(runs) == 128
    assert sum(abs(row.error) > 0.25 for row in runs) == 4


def test_on_slices_hosts_that_issue_split_passes_are_not_idle() -> None:
    """The picks of then were zero-bubble orders where issuing takes longer than computing; they are no longer."""
    then, now = of("suite-slices"), of("suite-slices", again=True)
    assert (then["ours"]["hits"], now["ours"]["hits"], now["ours"]["cases"]) == (4, 6, 7)
    assert then["ours"]["mean_regret"] == pytest.approx(0.389, abs=0.001)
    assert now["ours"]["mean_regret"] < 0.05
    assert {outcome.network for outcome in read([KEPT / "suite-slices"])} == {
        "resnet18", "resnet50", "vgg11", "mobilenetv2",
    }  # fmt: skip


def test_on_slices_with_all_cores_the_pick_is_better_than_a_rule() -> None:
    ways = of("suite-slices-16-cores")
    assert (ways["ours"]["hits"], ways["ours"]["cases"]) == (4, 7)
    assert ways["ours"]["mean_regret"] < 0.1 < 0.6 < ways["constant"]["mean_regret"] < ways["thesis"]["mean_regret"]


@pytest.mark.xfail(strict=True, reason="pipelines are predicted too fast where hosts take the time (docs/accuracy.md)")
def test_on_slices_the_pick_is_the_fastest_or_as_good() -> None:
    ways = of("suite-slices-16-cores", again=True)
    assert ways["ours"]["hits"] >= 0.9 * ways["ours"]["cases"]
    assert ways["ours"]["mean_regret"] < 0.03


def test_what_hosts_take_on_slices_is_as_the_page_has_it() -> None:
    """Predicted, and the slowest rank's median of steps that were not recorded, in milliseconds."""
    found = {
        (row["workload"].partition(":")[0], row["kind"]): (row["predicted_s"] * 1e3, max(row["unrecorded_s"]) * 1e3)
        for row in json.loads((KEPT / "slices.json").read_text())["data"]["rows"]
    }
    assert found["resnet18", "single"] == pytest.approx((21.2, 21.6), abs=0.1)
    page = (KEPT.parents[1] / "docs" / "accuracy.md").read_text()
    for kind, (small, large) in {"1f1b": ((20, 29), (54, 65)), "interleaved": ((29, 59), (79, 103))}.items():
        assert found["resnet18", kind] == pytest.approx(small, abs=0.6)
        assert found["vgg11", kind] == pytest.approx(large, abs=0.6)
    told = "1F1B of ResNet-18 20 and 29 ms, of VGG-11 54 and 65; interleaved 29 and 59, 79 and 103"
    assert told in " ".join(page.split())
