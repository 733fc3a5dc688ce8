"""Published step times: what is kept as data meets the goals, and its constants are ones that a device may have."""

import json
from pathlib import Path

import pytest

from trainplan.profile.efficiency import Efficiency

DATA = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "published.json").read_text(encoding="utf-8"))
GRIDS, SHARDED = DATA["vtrain_single_node_subset.csv"], DATA["llm_foundry_mpt_subset.csv"]
GOALS = {
    "no labelled row": {"mean": 0.25},
    "one labelled row": {"mean": 0.08},
    "20 labelled rows": {"mean": 0.06, "median": 0.035, "regret": 0.04, "worst_regret": 0.15},
    "width 1024 fitted, width 2048 predicted": {"mean": 0.08},
}


@pytest.mark.parametrize("fit", GOALS)
def test_single_node_grids(fit):
    for what, goal in GOALS[fit].items():
        assert GRIDS[fit][what] < goal, what
    constants = GRIDS[fit].get("constants", {})
    assert len(constants) <= 12
    Efficiency(**constants)  # which refuses a share above what was ever measured


def test_rows_that_were_fitted_to_are_not_predicted():
    assert GRIDS["20 labelled rows"]["rows"] == 272 - 20
    assert sum(row["labelled"] + row["rows"] for what, row in SHARDED.items() if what != "mean") == 113


def test_sharded_rows():
    assert SHARDED["mean"] < 0.09
