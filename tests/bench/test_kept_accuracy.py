"""What was predicted and measured on each machine, as the pages in docs/ have it: errors within the goal, or told."""

import json
import re
import runpy
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from trainplan.cluster.parse import cluster

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
DOCS = DATA.parents[1] / "docs"
SLOW = "exchanges-slow", "exchanges-slow-and-late"
FOUR = "exchanges-slow-four"  # two ranks on each side of a slow link
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
    (FOUR,),
]  # fmt: skip
MOBILENET = "exchanges-gpu-mobilenet"  # on slices, where hosts take the time
TOLD = {  # rows over 25 %, each explained there
    "accuracy-2-cores": [(GPT, "pp=2 schedule=naive micro=4 stages=2")],
    "exchanges-cores": [("mobilenetv2:cifar10", "dp=7 exchange=ps-asp bucket=8MiB servers=1")],
    "exchanges-gpu-gpt": [("gpt:layers=6,hidden=512,heads=8,seq=256,vocab=8192", "dp=4 bucket=8MiB")],
    "exchanges-slow-and-late": [(GPT, "dp=2 exchange=tree bucket=1MiB")],
    "exchanges-slow-and-late-servers": [("vgg11:cifar10", "exchange=ssp servers=1 bound=2")],
}
TOLD[FOUR] = [
    ("mobilenetv2:cifar10", "dp=2 exchange=ps-bsp bucket=1MiB servers=2"),
    ("mobilenetv2:cifar10", "dp=3 exchange=ps-asp bucket=8MiB servers=1"),
    ("vgg11:cifar10", "dp=3 exchange=ps-asp bucket=36MiB servers=1"),
]
WITHIN = [  # of MobileNet on slices: all others are over 25 %
    ("mobilenetv2:imagenet", "dp=4 exchange=all-to-all bucket=8MiB"),
    ("mobilenetv2:imagenet", "dp=3 exchange=dssp bucket=4MiB servers=1 bound=1,3"),
]


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())["data"]["rows"]
    return found


def prose(name: str) -> str:
    """What the page says of a table: what is between it and the next table or heading, as one line."""
    (page,) = (text for text in (page.read_text() for page in DOCS.glob("*.md")) if f"<!-- accuracy {name} -->" in text)
    after = page.split(f"<!-- accuracy {name} -->")[1].split("<!-- /accuracy -->")[1]
    return " ".join(re.split(r"<!-- |^#", after, maxsplit=1, flags=re.MULTILINE)[0].split())


def named(row: tuple[str, str]) -> str:
    """A row as the page has it: without the shape of a model and where it is cut, which are beside the table."""
    workload, plan = row
    return f"{workload.partition(':layers')[0]}, `{re.sub(r' stages=[0-9,]+', '', plan)}`"


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, id=" and ".join(names)) for names in TOGETHER),
        pytest.param(
            (MOBILENET,), id=MOBILENET,
            marks=pytest.mark.xfail(strict=True, reason="MobileNet on slices: what hosts do beside messages"),
        ),
    ],
)  # fmt: skip
def test_the_median_error_is_within_the_goal(names: tuple[str, ...]) -> None:
    found = [row for name in names for row in rows(name)]
    noise = median(row["noise_floor"] for row in found)
    assert median(abs(row["error"]) for row in found) <= max(0.10, 2 * noise)


def test_every_file_is_in_a_median_of_the_page() -> None:
    """What is left out of the bar is not left out of the medians."""
    scope: dict[str, Any] = runpy.run_path(str(DOCS / "tables.py"))
    assert sorted(scope["ACCURACY"]) == sorted([*(name for names in TOGETHER for name in names), MOBILENET])


@pytest.mark.parametrize("name", [name for names in TOGETHER for name in names])
def test_what_is_far_off_is_told(name: str) -> None:
    """By name, with its error, in the words beside the table."""
    off = {(row["workload"], row["plan"]): row["error"] for row in rows(name) if abs(row["error"]) > 0.25}
    assert list(off) == TOLD.get(name, [])
    for row, error in off.items():
        assert f"{named(row)} ({100 * error:+.0f} %".replace("(-", "(−") in prose(name)


def test_what_is_far_off_of_mobilenet_on_slices_is_told() -> None:
    """There are more that are than that are not, so these are named."""
    found = rows(MOBILENET)
    near = [(row["workload"], row["plan"]) for row in found if abs(row["error"]) <= 0.25]
    assert near == WITHIN
    said = f"Of {near[0][0]} {len(found) - len(near)} of {len(found)} rows are over 25 %, all but "
    assert said + " and ".join(f"`{plan}`" for _, plan in near) in prose(MOBILENET)


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


def test_a_probe_of_four_ranks_finds_the_two_sides_of_the_link() -> None:
    """So sums of VGG-11 that cross it, of hybrid sharding and in nodes first, take about as long as they took; when the
    probe took the four for one machine, they were to take a tenth of it."""
    found = cluster(str(DATA / FOUR / "cluster.yaml"))
    assert [len(node.devices) for node in found.nodes] == [2, 2]
    assert found.one_machine
    assert found.link(0, 2).rate == pytest.approx(0.95 * 125e6, rel=0.03)  # 1 Gbit/s, less headers
    sums = [row for row in rows(FOUR) if row["workload"] == "vgg11:cifar10" and row["plan"].startswith("dp=4")]
    assert len(sums) == 2
    for row in sums:
        predicted, measured = row["by_kind"]["REDUCE_GRAD"]
        assert predicted == pytest.approx(measured, rel=0.35)
