"""Published step times: what is kept as data meets the goals, and its constants are ones that a device may have."""

import json
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from trainplan.api import bench_published
from trainplan.bench.published.ratios import Timed, ratios, waits
from trainplan.errors import InputError
from trainplan.profile.efficiency import Efficiency

DATA = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "published.json").read_text(encoding="utf-8"))
GRIDS, SHARDED = DATA["vtrain_single_node_subset.csv"], DATA["llm_foundry_mpt_subset.csv"]
GOALS = {
    "no labelled row, scaled from the H200": {"mean": 0.25},
    "no labelled row, from its data sheet": {"mean": 0.25},
    "one labelled row": {"mean": 0.08},
    "20 labelled rows": {"mean": 0.06, "median": 0.035, "regret": 0.04, "worst_regret": 0.15},
    "width 1024 fitted, width 2048 predicted": {"mean": 0.08},
}


@pytest.mark.xfail(strict=True, reason="10.7 %: 6.5 % needs what is believed of eight constants, from this same table")
def test_one_labelled_row_and_all_else_as_it_comes():
    assert GRIDS["one labelled row, all else as it comes"]["mean"] < GOALS["one labelled row"]["mean"]


@pytest.mark.parametrize("fit", GOALS)
def test_single_node_grids(fit):
    for what, goal in GOALS[fit].items():
        assert GRIDS[fit][what] < goal, what
    constants = GRIDS[fit].get("constants", {})
    assert len(constants) <= 12
    Efficiency(**constants)  # which refuses a share above what was ever measured


def test_rows_that_were_fitted_to_are_not_predicted():
    assert GRIDS["20 labelled rows"]["rows"] == 272 - 20
    assert sum(row["labelled"] + row["rows"] for what, row in SHARDED.items() if isinstance(row, dict)) == 113


def test_sharded_rows():
    assert SHARDED["mean"] < 0.09


def test_sharded_rows_by_one_constant_alone():
    assert SHARDED["one_constant"] < 0.09


@pytest.mark.parametrize("group", ["nchw, torch 1.12", "nhwc, torch 1.12"])
def test_networks_on_one_device(group):
    """The order of 28 networks, and their steps with the constant of the others."""
    found = DATA["timm_train_rtx3090_subset.csv"][group]
    assert found["rows"] + len(found["left_out"]) == 28
    assert found["mean"] < 0.15
    assert found["rank"] > 0.85


def test_networks_on_one_device_by_one_constant_for_all_of_them():
    """Channels first and last, and three versions of torch: each row by the constant of the 79 others."""
    plain = [error for group in DATA["timm_train_rtx3090_subset.csv"].values() for error in group["plain"].values()]
    ratio = [log(1 + error) for error in plain]
    off = [abs(exp(own - (sum(ratio) - own) / (len(ratio) - 1)) - 1) for own in ratio]
    assert len(off) == 80
    assert mean(off) == pytest.approx(0.134, abs=1e-3)
    assert mean(off) < 0.15


@pytest.mark.parametrize("way", ["from its data sheet", "scaled"])
def test_sums_of_layers(way):
    """Eleven networks, of 22 to 1,250 layers, with how long a layer waited as the only constant."""
    found = DATA["pipedream_profile_totals.csv"][way]
    assert found["rows"] == 11
    assert found["mean"] < 0.15
    assert found["rank"] > 0.9
    assert 1e-4 < found["wait_s"] < 5e-4


def test_a_constant_is_never_that_of_the_row_it_is_reported_on():
    found = ratios([("a", 1.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 6.0)])
    assert found["errors"]["c"] == pytest.approx(-0.5)  # by a and b, which know nothing of it
    assert found["worst_is"] == "c"


def test_the_wait_of_a_layer_is_never_that_of_the_row_it_is_reported_on():
    rows = [Timed("a", 1, (1.0, 1.5)), Timed("b", 10, (1.0, 6.0), (2.0, 2.0)), Timed("c", 2, (1.0, 10.0))]
    found = waits(rows)
    assert found["errors"]["c"] == pytest.approx(2.0 / 10.0 - 1)  # by a and b, of whom each layer waits half a second
    assert found["wait_s"] == 0.5


@pytest.mark.parametrize(("only", "why"), [("tim,", "no table in it is known"), ("vtrian", "the tables begin with")])
def test_what_is_not_there_is_refused(tmp_path, only, why):
    with pytest.raises(InputError, match=why):
        bench_published(str(tmp_path), only)
    with pytest.raises(InputError, match="no such folder"):
        bench_published(str(tmp_path / "nowhere"))


def test_published_products_and_layers(measured, tmp_path):
    """Those that need no network: the fastest products of three devices, and two networks layer by layer."""
    answer = bench_published(str(measured), "matmul,pipedream_profile_layers", str(tmp_path / "found.json"))
    assert answer.found["matmul_mamf.csv"]["bf16"]["mean"] < 0.06
    layers = answer.found["pipedream_profile_layers_vgg16_alexnet.csv"]
    assert all(row["rank"] > 0.9 for row in layers.values())
    assert all(layers[f"{name}, from its data sheet"]["mean"] < 0.2 for name in ("alexnet", "vgg16"))
    assert "AMD MI300X bf16" in str(answer)
    assert json.loads((tmp_path / "found.json").read_text())["command"].startswith("trainplan bench published")


BOTH = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "cpu-to-gpu.json").read_text(encoding="utf-8"))


@pytest.mark.system("cpu-to-gpu", "P")
def test_cpu_to_gpu_an_estimate_carries_what_a_measurement_does_not():
    """Seconds on a core, times a constant, are far off; the estimate is near; and correcting it does not help."""
    for scores in (BOTH["scores"], BOTH["blind"]):
        assert scores["CPU alone"]["mean"] > 5 * scores["estimate alone"]["mean"]
        assert scores["estimate alone"]["mean"] < 0.15
        assert scores["corrected"]["mean"] > scores["estimate alone"]["mean"]
    assert {row["networks"] for row in BOTH["blind"].values()} == {12}


COLLECTIVES = {
    name: row
    for file in ("vtrain_nccl_allreduce_lut_subset.csv", "nccl_collectives_published.csv")
    for name, row in DATA[file].items()
}


@pytest.mark.parametrize("curve", COLLECTIVES)
def test_collectives(curve):
    """With nothing fitted to them: sums from 64 MiB on. (Of five V100 one is joined through another.)"""
    assert COLLECTIVES[curve]["large"] < (0.2 if curve == "V100-32, all_reduce of 5" else 0.15)
