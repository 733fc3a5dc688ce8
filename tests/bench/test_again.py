"""What was measured on real workers, predicted again from what was kept of them: truth that no change may lose."""

from pathlib import Path
from statistics import median

import pytest
from benchmarks.again import again

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
MEDIAN, WORST = 0.10, 0.25  # docs/accuracy.md says which rows are over, and why
KNOWN = {  # by the plan's first words
    "accuracy-2-cores": ("pp=2 schedule=naive micro=4 stages=2",),
    "accuracy-16-cores": (),
    "accuracy-16-cores-gpt": (),
    "exchanges-cores": ("dp=7 exchange=ps-asp bucket=8MiB",),  # two networks under one line, of which one is over
    "exchanges-gpu": (),
    "exchanges-gpu-gpt": ("dp=4 bucket=8MiB",),
}


def held(name: str, rows: int, only: str = "") -> list[float]:
    """The errors of so many rows, of which those that are not known to be over the limit are below it."""
    measured = DATA / f"{name}.json"
    found = list(again(measured, measured.with_suffix(""), only))
    assert len(found) == rows
    assert all(abs(one.error) < WORST for one in found if not one.row.plan.startswith(KNOWN[name]))
    return [abs(one.error) for one in found]


def test_trees_and_rings_of_two_to_eight_workers() -> None:
    """A tree was too long by up to 47 % as long as its few senders were taken for as crowded as a ring's."""
    for exchange in ("tree", "ring"):
        assert median(held("exchanges-cores", 6, f"exchange={exchange}")) < MEDIAN


def test_the_first_orders_of_work() -> None:
    """One device, replicas, naive, GPipe and 1F1B, on two cores and on sixteen."""
    assert median(held("accuracy-2-cores", 20)) < MEDIAN
    assert median(held("accuracy-16-cores", 27) + held("accuracy-16-cores-gpt", 9)) < MEDIAN


def test_slices_of_a_gpu() -> None:
    assert median(held("exchanges-gpu", 21) + held("exchanges-gpu-gpt", 21)) < MEDIAN


@pytest.mark.slow
def test_every_exchange_of_two_to_eight_workers() -> None:
    assert median(held("exchanges-cores", 114)) < MEDIAN
