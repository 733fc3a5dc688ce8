"""What if: a cluster with some of its numbers changed.

>>> from trainplan.cluster.parse import cluster
>>> slower = with_overrides(cluster("4xTitanRTX"), {"link": "8GB/s", "memory": "16GiB"})
>>> slower.link(0, 1).rate, slower.device(0).memory_bytes == 16 * 2**30, slower.notes[-2]
(8000000000.0, True, 'changed: link=8GB/s memory=16GiB')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainplan.amounts import POSSIBLE, untrue
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node
from trainplan.cluster.notes import after_change
from trainplan.cluster.sound import BACKENDS
from trainplan.errors import InputError, closest
from trainplan.units import parse_bytes, parse_rate, parse_seconds

Value = str | float
Change = Callable[[Cluster, str, Value], Cluster]


def with_overrides(cluster: Cluster, overrides: Mapping[str, Value]) -> Cluster:
    """The cluster with some numbers changed; `overrides` maps keys of `KEYS` to values.

    Measured curves of collectives stay, stretched by as much as the changed links stretch a message of that size: so
    a faster link never makes anything slower.
    """
    for key in overrides:
        if key not in KEYS:
            why = f"a cluster has no {key!r} to change; the keys are {', '.join(KEYS)}"
            raise InputError(f"{key}={overrides[key]}", why, closest(key, KEYS))
    result = cluster
    for key, value in overrides.items():
        _, change = KEYS[key]
        try:
            result = change(result, key, value)
        except InputError as error:
            raise InputError(f"{key}={value}", error.why or error.asked, error.instead) from None
        if bad := untrue(result):
            raise InputError(f"{key}={value}", f"that would be {bad[1]:.3g}, and {POSSIBLE}", "a smaller number")
    if not overrides:
        return cluster
    said = [f"{key}={value}" for key, value in overrides.items()]
    stretched = tuple(_stretch(curve, cluster, result) for curve in cluster.collectives)
    return replace(result, collectives=stretched, notes=after_change(cluster, result, said))


# -- links ---------------------------------------------------------------------------------------------------------


def _links(cluster: Cluster, change: Callable[[Link], Link], inside: bool = True, network: bool = True) -> Cluster:
    def node(old: Node) -> Node:
        new = old
        if inside:
            pairs = tuple(replace(pair, link=change(pair.link)) for pair in old.pairs)
            new = replace(new, inside=change(old.inside), pairs=pairs)
        if network and old.network:
            new = replace(new, network=change(old.network))
        return new

    return replace(cluster, nodes=tuple(map(node, cluster.nodes)))


def _rate(inside: bool, network: bool) -> Change:
    def change(cluster: Cluster, key: str, value: Value) -> Cluster:
        rate = _speed(value)
        return _links(cluster, lambda link: replace(link, rate=rate, source=_given(link, "rate")), inside, network)

    return change


def _latency(inside: bool, network: bool) -> Change:
    def change(cluster: Cluster, key: str, value: Value) -> Cluster:
        latency = _seconds(value)
        return _links(
            cluster, lambda link: replace(link, latency_s=latency, source=_given(link, "latency")), inside, network
        )

    return change


def _message(cluster: Cluster, key: str, value: Value) -> Cluster:
    seconds = _seconds(value)
    return _links(cluster, lambda link: replace(link, message_s=seconds))


def _network(cluster: Cluster, key: str, value: Value) -> Cluster:
    def node(old: Node) -> Node:
        return replace(old, network=catalogue.read_network(str(value), len(old.devices), "network"))

    return replace(cluster, nodes=tuple(map(node, cluster.nodes)))


def _given(link: Link, what: str) -> str:
    return f"{what} given; otherwise: {link.source}" if link.source else f"{what} given"


def _stretch(curve: Curve, before: Cluster, after: Cluster) -> Curve:
    if curve.op in ("stage", "add"):  # that use no link
        return curve
    seconds = tuple(
        seconds * _slowest(after, size) / _slowest(before, size)
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True)
    )
    return replace(curve, seconds=seconds)


def _slowest(cluster: Cluster, size: int) -> float:
    """Seconds that a message of this size takes on the slowest link that the cluster uses."""
    links = [link for node in cluster.nodes for link in (node.inside, *(pair.link for pair in node.pairs))]
    if len(cluster.nodes) > 1:
        links += [node.network for node in cluster.nodes if node.network]
    return max(link.latency_s + size / link.rate for link in links)


# -- devices, nodes and the rest -----------------------------------------------------------------------------------


def _devices(field: str, parse: Callable[[Any], Any], source: str) -> Change:
    def change(cluster: Cluster, key: str, value: Value) -> Cluster:
        parsed = parse(value)

        def device(old: Device) -> Device:
            values: dict[str, Any] = {field: parsed, "sources": old.sources | {source: "given"}}
            return replace(old, **values)

        def node(old: Node) -> Node:
            new = replace(old, devices=tuple(map(device, old.devices)))
            # A price for devices would not be heard while the node has one of its own.
            return replace(new, price_per_hour=0.0) if field == "price_per_hour" else new

        return replace(cluster, nodes=tuple(map(node, cluster.nodes)))

    return change


def _nodes(field: str, parse: Callable[[Any], Any], source: str) -> Change:
    def change(cluster: Cluster, key: str, value: Value) -> Cluster:
        parsed = parse(value)

        def node(old: Node) -> Node:
            values: dict[str, Any] = {field: parsed, "sources": old.sources | {source: "given"}}
            return replace(old, **values)

        return replace(cluster, nodes=tuple(map(node, cluster.nodes)))

    return change


def _slowdown(cluster: Cluster, key: str, value: Value) -> Cluster:
    factor = _number(value)
    if factor < 1:
        raise InputError(str(value), "it would make compute faster beside communication", "slowdown=1 or more")
    of_compute = dict.fromkeys(("send", "receive", "collective", "copy"), factor)
    few = cluster.slowdown_of_two and replace(cluster.slowdown_of_two, **of_compute)
    return replace(cluster, slowdown=replace(cluster.slowdown, **of_compute), slowdown_of_two=few)


def _backend(cluster: Cluster, key: str, value: Value) -> Cluster:
    if value not in BACKENDS:
        raise InputError(str(value), "there is no such backend", ", ".join(BACKENDS))
    return replace(cluster, backend=str(value))


def _dispatch(cluster: Cluster, key: str, value: Value) -> Cluster:
    return replace(cluster, dispatch_s=_seconds(value))


def _size(value: Value) -> int:
    return parse_bytes(_with_unit(value, "GiB"), positive=True)


def _room(value: Value) -> int:
    return parse_bytes(_with_unit(value, "MiB"))


def _speed(value: Value) -> float:
    return parse_rate(_with_unit(value, "GB/s"), positive=True)


def _seconds(value: Value) -> float:
    return parse_seconds(_with_unit(value, "us"))


def _with_unit(value: Value, unit: str) -> Value:
    """A value that is typed says what it counts: whoever types link=25 means no bytes per second."""
    text = value.strip() if isinstance(value, str) else ""
    if text.replace(".", "", 1).isdigit() and float(text) > 0:
        raise InputError(text, "it has no unit", f"{text}{unit}")
    return value


def _number(value: Value) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(str(value), "it is not a number", "1.5") from None
    if not 0 <= number < float("inf"):
        raise InputError(str(value), "it must be zero or more, and finite", "1.5")
    return number


def _whole(value: Value) -> int:
    number = _number(value)
    if number != int(number) or number < 1:
        raise InputError(str(value), "a whole number of 1 or more was expected", "8")
    return int(number)


KEYS: dict[str, tuple[str, Change]] = {
    "link": ("rate of every link, in nodes and between them", _rate(True, True)),
    "inside": ("rate of the links in nodes", _rate(True, False)),
    "network": ("the network: a kind (eth100, 8xib-ndr) or a rate", _network),
    "latency": ("latency of every link", _latency(True, True)),
    "inside_latency": ("latency of the links in nodes", _latency(True, False)),
    "network_latency": ("latency of the network", _latency(False, True)),
    "message": ("host time of one message", _message),
    "memory": ("memory of a device", _devices("memory_bytes", _size, "memory")),
    "memory_rate": ("memory bandwidth of a device", _devices("memory_rate", _speed, "memory_rate")),
    "host_link": ("rate between a device and its host, one direction", _devices("host_rate", _speed, "host_link")),
    "context": ("memory taken before the first tensor", _devices("context_bytes", _room, "context")),
    "price": ("price of one device for an hour", _devices("price_per_hour", _number, "price")),
    "node_price": ("price of a whole node for an hour", _nodes("price_per_hour", _number, "price_per_hour")),
    "host_memory": ("memory of a host", _nodes("host_memory_bytes", _size, "host_memory")),
    "cores": ("cores of a host", _nodes("cores", _whole, "cores")),
    "disk": ("rate of a node's disk", _nodes("disk_rate", _speed, "disk")),
    "slowdown": ("how much slower compute is beside communication", _slowdown),
    "dispatch": ("host time of the engine for one operation", _dispatch),
    "backend": ("gloo, gloo-staged or nccl", _backend),
}
# Those that change how long a pass takes on a device, which is what a profile says.
OF_PASSES = ("memory_rate",)
