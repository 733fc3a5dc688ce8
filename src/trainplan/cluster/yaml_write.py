"""A cluster as YAML text: the inverse of `yaml_form`, exact to the last bit.

What equals an entry of the catalogue is written by its name; like neighbours are counted.

>>> from trainplan.cluster.parse import cluster
>>> print(to_yaml(cluster("1xT4")).splitlines()[0])
name: 1xT4
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from trainplan import files
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Cluster, Device, Link, Node, Slowdown
from trainplan.errors import InputError
from trainplan.units import parse_bytes, parse_flops, parse_rate, parse_seconds

_BYTES = (("TiB", 2**40), ("TB", 10**12), ("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_FLOPS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9))


def save_yaml(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster to a YAML file, whole or not at all."""
    files.write_text(path, to_yaml(cluster))


def check_name(path: str | None) -> None:
    """Refuse a name that a cluster could not be read from again."""
    if path and not path.endswith((".yaml", ".yml", ".json")):
        raise InputError(f"--output {path}", "a cluster's file ends in .yaml or .json", f"--output {path}.yaml")


def save_as(cluster: Cluster, path: str) -> None:
    """Write a cluster in the form that its file's name says."""
    if path.endswith(".json"):
        cluster.save(path)
    else:
        save_yaml(cluster, path)


def to_yaml(cluster: Cluster) -> str:
    """A YAML text that `yaml_form.read_cluster` turns into an equal cluster."""
    data: dict[str, Any] = {"name": cluster.name, "backend": cluster.backend}
    data["nodes"] = [_counted(_node(node), many) for node, many in _runs(cluster.nodes)]
    if slowdown := _slowdown(cluster.slowdown):
        data["slowdown"] = slowdown
    if cluster.slowdown_of_two is not None:
        data["slowdown_of_two"] = _slowdown(cluster.slowdown_of_two)
    if cluster.contention:
        data["contention"] = list(cluster.contention)
    if cluster.hosts:
        data["hosts"] = list(cluster.hosts)
    if cluster.spread:
        data["spread"] = cluster.spread
    if cluster.dispatch_s:
        data["dispatch"] = _seconds(cluster.dispatch_s)
    if cluster.one_machine:
        data["one_machine"] = True
    if cluster.collectives:
        data["collectives"] = [files.to_json(curve) for curve in cluster.collectives]
    data["source"] = cluster.source
    if cluster.notes:
        data["notes"] = list(cluster.notes)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def _slowdown(slowdown: Slowdown) -> dict[str, float]:
    return {key: value for key, value in files.to_json(slowdown).items() if value != 1.0}


def _node(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name}
    data["devices"] = [_counted(_device(device), many) for device, many in _runs(node.devices)]
    data["inside"] = _link(node.inside)
    if node.pairs:
        data["pairs"] = [{"between": [pair.a, pair.b], "link": _link(pair.link)} for pair in node.pairs]
    if node.network:
        data["network"] = _network(node.network)
    if node.host_memory_bytes:
        data["host_memory"] = _bytes(node.host_memory_bytes)
    if node.cores:
        data["cores"] = node.cores
    if node.disk_rate:
        data["disk"] = _rate(node.disk_rate)
    if node.price_per_hour:
        data["price_per_hour"] = node.price_per_hour
    if node.sources:
        data["sources"] = dict(node.sources)
    return data


def _device(device: Device) -> dict[str, Any]:
    if catalogue.has("device", device.name) and catalogue.device(device.name) == device:
        return {"device": device.name}

    def said(value: Any, key: str) -> Any:
        return {"value": value, "source": device.sources[key]} if key in device.sources else value

    flops = {name: said(_flops(speed), f"flops.{name}") for name, speed in device.flops.items()}
    data = {"name": device.name, "flops": flops, "memory": said(_bytes(device.memory_bytes), "memory")}
    data["memory_rate"] = said(_rate(device.memory_rate), "memory_rate")
    for key, value in (
        ("host_link", device.host_rate and _rate(device.host_rate)),
        ("context", device.context_bytes and _bytes(device.context_bytes)),
        ("price", device.price_per_hour),
        ("processors", device.processors),
        ("efficiency", dict(device.efficiency)),
        ("capability", ".".join(map(str, device.capability)) if any(device.capability) else ""),
        ("file", device.file),
    ):
        if value or key in device.sources:
            data[key] = said(value, key)
    return data


def _link(link: Link) -> Any:
    for name in catalogue.names("link"):
        if catalogue.link(name) == link:
            return name
    data: dict[str, Any] = {"name": link.name, "rate": _rate(link.rate), "latency": _seconds(link.latency_s)}
    if link.message_s:
        data["message"] = _seconds(link.message_s)
    if link.shared:
        data["shared"] = True
    for key in ("reached", "in_switch"):
        if getattr(link, key):
            data[key] = getattr(link, key)
    if link.source:
        data["source"] = link.source
    return data


def _network(link: Link) -> Any:
    for name in catalogue.names("link"):
        if catalogue.read_network(name, 1, "network") == link:
            return name
    data = _link(link)
    # As a network, a bare name means one shared card; a link with that name for each device must say so.
    return {"link": data, "shared": False} if isinstance(data, str) else data


def _counted(data: dict[str, Any], count: int) -> dict[str, Any]:
    return {"count": count, **data} if count > 1 else data


def _runs(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Neighbours that are equal, counted (`groupby` compares them by ==)."""
    return [(first, 1 + sum(1 for _ in rest)) for _, rest in groupby(values) for first in [next(rest)]]


def _text(value: float, units: tuple[tuple[str, float], ...], parse: Callable[[Any], float]) -> Any:
    """The value with a unit where that is short and reads back as the same number; else the bare number."""
    for unit, factor in units:
        shown = f"{value / factor:.6g}{unit}"
        if value >= factor and "e" not in shown and parse(shown) == value:
            return shown
    return value


def _bytes(value: int) -> Any:
    return _text(value, _BYTES, parse_bytes)


def _rate(value: float) -> Any:
    return _text(value, _RATES, parse_rate)


def _seconds(value: float) -> Any:
    return _text(value, _SECONDS, parse_seconds)


def _flops(value: float) -> Any:
    return _text(value, _FLOPS, parse_flops)
