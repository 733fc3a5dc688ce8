"""What the suite said on many cores, and on slices of a GPU: hits, regret and errors, as the docs have them."""

import json
import shutil
from pathlib import Path
from statistics import median

import pytest

from trainplan import api, files
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


def test_where_it_matters_what_is_chosen_the_pick_is_the_fastest_or_as_good() -> None:
    """Over a slow link, with uneven workers, and with room for 60 % of a replica: whoever always takes the same loses
    more than a tenth, and the thesis's equations nearly half."""
    ways = of("suite-hard-2-cores")
    assert ways["ours"]["cases"] == ways["ours"]["hits"] == 9
    assert ways["ours"]["mean_regret"] < 0.03
    assert 0.1 < ways["constant"]["mean_regret"] < ways["thesis"]["mean_regret"]
    outcomes = read([KEPT / "suite-hard-2-cores"])
    assert len({str(outcome.conditions) for outcome in outcomes}) == 3
    assert {outcome.network for outcome in outcomes} == {"vgg11", "mobilenetv2", "gpt-tiny"}


def test_where_it_matters_what_is_chosen_steps_take_as_long_as_predicted() -> None:
    found = api.bench_accuracy([str(KEPT / "suite-hard-2-cores")]).to_json()["errors"]
    for row in found["system"]:
        assert abs(row["worst"]) < 0.25, row
        if row["group"] != "single":
            assert row["median"] <= max(0.1, 2 * row["noise"]), row


@pytest.mark.xfail(strict=True, reason="10.4 %, noise floor 4.7 (docs/bench.md)")
def test_where_it_matters_what_is_chosen_one_device_takes_as_long_as_predicted() -> None:
    found = api.bench_accuracy([str(KEPT / "suite-hard-2-cores")]).to_json()["errors"]
    (row,) = (row for row in found["system"] if row["group"] == "single")
    assert row["median"] <= max(0.1, 2 * row["noise"])


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


def test_on_slices_again_all_are_nearer_but_not_near_enough() -> None:
    """As docs/bench.md has it: one device is right, all others are predicted too fast."""
    ways, anew = of("suite-slices-again"), of("suite-slices-again", again=True)
    assert [(w["ours"]["hits"], w["ours"]["cases"]) for w in (ways, anew)] == [(2, 6), (3, 6)]
    assert anew["ours"]["mean_regret"] < ways["ours"]["mean_regret"] < 0.12 < 0.5 < ways["constant"]["mean_regret"]
    found = api.bench_accuracy([str(KEPT / "suite-slices-again")]).to_json()["errors"]["system"]
    medians = {row["group"]: row["median"] for row in found}
    assert medians["single"] < 0.015
    assert max(medians[name] for name in ("ddp", "zero1", "dapple")) < 0.12
    assert max(medians[name] for name in PIPELINES) < 0.26


@pytest.mark.parametrize(("dispatch_s", "hits", "regret"), [(0.0, 3, 0.107), (1.5e-4, 5, 0.029), (3e-4, 5, 0.011)])
def test_what_an_instruction_takes_of_the_host_decides_on_slices(
    tmp_path: Path, dispatch_s: float, hits: int, regret: float
) -> None:
    """The constant that was not probed then, from what it was to what is far beyond."""
    folder = shutil.copytree(KEPT / "suite-slices-again", tmp_path / "suite")
    (file,) = folder.glob("*.cluster.json")
    there = json.loads(file.read_text())
    there["data"]["dispatch_s"] = dispatch_s
    file.write_text(json.dumps(there))
    ours = next(w for w in api.bench_accuracy([str(folder)], again=True).to_json()["summaries"] if w["way"] == "ours")
    assert (ours["hits"], ours["cases"]) == (hits, 6)
    assert ours["mean_regret"] == pytest.approx(regret, abs=0.001)


@pytest.mark.xfail(strict=True, reason="what the engine takes of a host was not probed then (docs/exchanges.md)")
@pytest.mark.parametrize("folder", ["suite-slices-16-cores", "suite-slices-again"])
def test_on_slices_the_pick_is_the_fastest_or_as_good(folder: str) -> None:
    ways = of(folder, again=True)
    assert ways["ours"]["hits"] >= 0.9 * ways["ours"]["cases"]
    assert ways["ours"]["mean_regret"] < 0.03


def test_threads_beside_a_host_do_not_slow_it_down_by_much() -> None:
    """Not by more than a fifth, where pipelines were off by half."""
    rows = files.read(KEPT / "hosts-gpu.json", "hosts")["rows"]
    alone = median(row["issue_s"] for row in rows if row["beside"] == "nothing")
    ratios = [row["issue_s"] / alone for row in rows if row["beside"] != "nothing"]
    assert len(ratios) == 10
    assert 1.0 < min(ratios) < max(ratios) < 1.215


def test_what_hosts_take_on_slices_is_as_the_page_has_it() -> None:
    """Predicted, and the slowest rank's median of steps that were not recorded, in milliseconds."""
    found = {
        (row["workload"].partition(":")[0], row["kind"]): (row["predicted_s"] * 1e3, max(row["unrecorded_s"]) * 1e3)
        for row in json.loads((KEPT / "slices.json").read_text())["data"]["rows"]
    }
    assert found["resnet18", "single"] == pytest.approx((21.2, 21.6), abs=0.1)
    page = (KEPT.parents[1] / "docs" / "exchanges.md").read_text()
    for kind, (small, large) in {"1f1b": ((20, 29), (54, 65)), "interleaved": ((29, 59), (79, 103))}.items():
        assert found["resnet18", kind] == pytest.approx(small, abs=0.6)
        assert found["vgg11", kind] == pytest.approx(large, abs=0.6)
    told = "1F1B of ResNet-18 20 and 29 ms, of VGG-11 54 and 65; interleaved 29 and 59, 79 and 103"
    assert told in " ".join(page.split())
