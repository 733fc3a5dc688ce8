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


@pytest.mark.slow
def test_every_exchange_of_two_to_eight_workers() -> None:
    measured = DATA / "exchanges-cores.json"
    held(list(again(measured, measured.with_suffix(""))), rows=116)
