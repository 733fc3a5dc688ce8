"""A cluster file that cannot be true is refused, by the place of what is wrong in it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainplan import files
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.cluster.sound import checked
from trainplan.cluster.yaml_form import read_cluster
from trainplan.cluster.yaml_write import to_yaml
from trainplan.errors import InputError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
PROBED = DATA / "suite-cores" / "workers-x4.cluster.json"
KEPT = sorted(path for path in DATA.rglob("*cluster*") if path.suffix in (".json", ".yaml"))
TITANS = files.to_json(cluster("2xtitan4"))
Place = tuple[str | int, ...]


def with_changed(data: Any, place: Place, value: Any) -> Any:
    data = json.loads(json.dumps(data))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


def numbers(data: Any, place: Place = ()) -> list[Place]:
    """The places of all numbers."""
    if isinstance(data, dict | list):
        inside = data.items() if isinstance(data, dict) else enumerate(data)
        return [found for key, item in inside for found in numbers(item, (*place, key))]
    return [place] if isinstance(data, int | float) and not isinstance(data, bool) else []


def read(data: Any) -> Cluster:
    return checked(files.from_json(Cluster, data, "cluster c.json"), "cluster c.json", files.made_by("cluster"))


@given(st.sampled_from(numbers(TITANS)), st.sampled_from([-5, math.nan, math.inf, 10**400]))
def test_a_number_that_cannot_be_is_refused_by_its_place(place: Place, value: float) -> None:
    with pytest.raises(InputError) as caught:
        read(with_changed(TITANS, place, value))
    spelled = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    assert caught.value.asked == f"cluster c.json{spelled}"


@pytest.mark.parametrize(
    ("place", "value", "asked"),
    [
        (("nodes",), [], "nodes"),
        (("nodes", 0, "devices"), [], "nodes[0].devices"),
        (("nodes", 0, "devices", 0, "memory_bytes"), 0, "nodes[0].devices[0].memory_bytes"),
        (("nodes", 0, "devices", 0, "memory_rate"), 0, "nodes[0].devices[0].memory_rate"),
        (("nodes", 0, "devices", 0, "flops", "fp32"), 0, "nodes[0].devices[0].flops.fp32"),
        (("nodes", 0, "inside", "rate"), 0, "nodes[0].inside.rate"),
        (("nodes", 0, "network", "rate"), 0, "nodes[0].network.rate"),
        (("nodes", 0, "network"), None, "nodes[0].network"),
        (("nodes", 0, "pairs", 0, "link", "rate"), 0, "nodes[0].pairs[0].link.rate"),
        (("nodes", 0, "pairs", 0, "b"), 4, "nodes[0].pairs[0]"),
        (("nodes", 0, "pairs", 0, "b"), 0, "nodes[0].pairs[0]"),
        (("backend",), "mpi", "backend"),
        (("contention",), [1.0, 0.5], "contention[1]"),
        (("hosts",), [0], "hosts[0]"),
        (("slowdown", "send"), 0.5, "slowdown.send"),
        (("slowdown_of_two",), {"copy": 0.5}, "slowdown_of_two.copy"),
    ],
)
def test_what_contradicts_the_rest_is_refused_by_its_place(place: Place, value: Any, asked: str) -> None:
    with pytest.raises(InputError) as caught:
        read(with_changed(TITANS, place, value))
    assert caught.value.asked == f"cluster c.json.{asked}"
    assert "trainplan cluster probe -o" in caught.value.instead


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes", []), ("bytes", [4, 2]), ("bytes", [4, 4]), ("seconds", [1.0]), ("ranks", 0), ("groups", 0)],
)
def test_curves_that_are_none_are_refused(field: str, value: Any) -> None:
    data = files.to_json(Cluster.load(PROBED))
    with pytest.raises(InputError) as caught:
        read(with_changed(data, ("collectives", 0, field), value))
    assert caught.value.asked == f"cluster c.json.collectives[0].{field}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contention", [1.0, 0.5]),
        ("hosts", [0.5]),
        ("contention", [".nan"]),
        ("collectives", [{"op": "all_reduce", "ranks": 2, "bytes": [4, 2], "seconds": ["1ms", "2ms"]}]),
        ("dispatch", "-1us"),
    ],
)
def test_what_people_write_is_held_to_the_same(key: str, value: Any) -> None:
    data = yaml.safe_load(to_yaml(cluster("2xtitan4")))
    assert read_cluster(data, "mine.yaml").nodes == cluster("2xtitan4").nodes
    with pytest.raises(InputError, match=rf"^mine\.yaml[.:] ?{key}"):
        read_cluster(yaml.safe_load(yaml.safe_dump({**data, key: value}).replace("'.nan'", ".nan")), "mine.yaml")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_kept_clusters_are_taken(path: Path) -> None:
    assert cluster(str(path)).nodes
