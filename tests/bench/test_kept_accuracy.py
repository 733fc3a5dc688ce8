"""What was predicted and measured on each machine, as docs/accuracy.md has it: errors within the goal, or told."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
SLOW = "exchanges-slow", "exchanges-slow-and-late"
ORDERS = "naive", "gpipe", "1f1b"
GPT = "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=1024"
FIRST = [(("accuracy-2-cores",), (2,)), (("accuracy-16-cores", "accuracy-16-cores-gpt"), (2, 4))]
OFF_BY_A_FIFTH = {
    FIRST[0][0]: [(GPT, "pp=2 schedule=naive micro=4 stages=2")],
    FIRST[1][0]: [("resnet18:cifar10", "dp=4 bucket=1MiB")],
}
TOGETHER = [  # what the page gives one median for
    ("accuracy-2-cores",), ("accuracy-16-cores", "accuracy-16-cores-gpt"), ("orders-cores",), ("orders-gpu",),
    ("exchanges-cores",),
    ("exchanges-gpu", "exchanges-gpu-gpt"), *((name,) for name in SLOW), *((f"{name}-servers",) for name in SLOW),
]  # fmt: skip
TOLD = {  # rows over 25 %, each explained there
    "accuracy-2-cores": 1,
    "exchanges-cores": 1, "exchanges-gpu-gpt": 1, "exchanges-slow-and-late": 1, "exchanges-slow-and-late-servers": 1,
}  # fmt: skip


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())["data"]["rows"]
    return found


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_the_median_error_is_within_the_goal(names: tuple[str, ...]) -> None:
    found = [row for name in names for row in rows(name)]
    noise = median(row["noise_floor"] for row in found)
    assert median(abs(row["error"]) for row in found) <= max(0.10, 2 * noise)


@pytest.mark.parametrize("name", [name for names in TOGETHER for name in names])
def test_what_is_far_off_is_told(name: str) -> None:
    assert sum(abs(row["error"]) > 0.25 for row in rows(name)) == TOLD.get(name, 0)


def first_orders(names: tuple[str, ...], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """All rows of one device, replicas, naive, GPipe and 1F1B on so many ranks, of four workloads."""
    found = [row for name in names for row in rows(name)]
    asked = ["single", *(word for n in ranks for word in (f"dp={n}", *(f"pp={n} schedule={o}" for o in ORDERS)))]
    for workload in {row["workload"] for row in found}:
        plans = [row["plan"] for row in found if row["workload"] == workload]
        assert all(any(plan.startswith(word) for plan in plans) for word in asked), workload
    assert len({row["workload"] for row in found}) == 4
    return found


@pytest.mark.xfail(strict=True, reason="one row a machine is, and told: docs/accuracy.md")
@pytest.mark.parametrize(("names", "ranks"), FIRST, ids=["two cores", "sixteen cores"])
def test_of_the_first_orders_of_work_none_is_off_by_a_fifth(names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    assert max(abs(row["error"]) for row in first_orders(names, ranks)) < 0.2


@pytest.mark.parametrize(("names", "ranks"), FIRST, ids=["two cores", "sixteen cores"])
def test_what_is_off_by_a_fifth_is_told(names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    off = [(row["workload"], row["plan"]) for row in first_orders(names, ranks) if abs(row["error"]) > 0.2]
    assert off == OFF_BY_A_FIFTH[names]


def test_servers_on_a_slow_link_have_a_row_each() -> None:
    for name in (f"{name}-servers" for name in SLOW):
        exchanges = {word for row in rows(name) for word in row["plan"].split() if word.startswith("exchange=")}
        assert exchanges == {f"exchange={rule}" for rule in ("ps-bsp", "ps-asp", "ssp", "dssp")}
