"""What was measured on real workers, predicted again from what was kept of them: truth that no change may lose."""

from pathlib import Path
from statistics import median

import pytest
from benchmarks.again import Again, again

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
MEDIAN, WORST = 0.10, 0.32  # docs/accuracy.md says which rows are over 25 %, and why


def held(found: list[Again], rows: int, worst: float = WORST) -> None:
    errors = [abs(one.error) for one in found]
    assert len(errors) == rows
    assert median(errors) < MEDIAN
    assert max(errors) < worst


def test_trees_and_rings_of_two_to_eight_workers() -> None:
    """A tree was too long by up to 47 % as long as its few senders were taken for as crowded as a ring's."""
    measured = DATA / "exchanges-cores.json"
    for exchange in ("tree", "ring"):
        held(list(again(measured, measured.with_suffix(""), f"exchange={exchange}")), rows=7, worst=0.25)


def test_slices_of_a_gpu() -> None:
    """All but one to whom all send at once, and two groups that gather at once (docs/accuracy.md)."""
    measured = DATA / "exchanges-gpu.json"
    found = list(again(measured, measured.with_suffix("")))
    known = [one for one in found if one.row.plan.startswith(("dp=4 exchange=dataparallel", "dp=4 zero=3 shard=2"))]
    assert len(known) == 2
    held([one for one in found if one not in known], rows=16, worst=0.20)


@pytest.mark.slow
def test_every_exchange_of_two_to_eight_workers() -> None:
    measured = DATA / "exchanges-cores.json"
    held(list(again(measured, measured.with_suffix(""))), rows=116)
