"""Clusters as YAML files, for anything that a short form cannot say: mixed devices, uneven nodes, own links, prices.

    name: lab
    backend: nccl                       # gloo, gloo-staged or nccl; by default what suits the devices
    nodes:
    - count: 2                          # so many alike
      type: DGX-A100                    # a node of the catalogue; the other keys change it
      network: 2x ib-hdr                # cards and kind, or a rate, or a mapping as for any link
      price_per_hour: 20
    - name: old
      devices: [4x V100-32, {device: T4, memory: 14GiB}]
      inside: pcie3                     # any two devices of the node
      pairs:
      - {between: [0, 1], link: {name: NVLink, rate: 48GB/s, latency: 10us}}
      network: eth40
      host_memory: 192GB
      cores: 24
      disk: 2GB/s
    slowdown: {collective: 1.3}         # and what else a probe measures: contention, hosts, spread, collectives, …
    one_machine: true                   # its nodes are network namespaces of one machine, and share its cores

A number may carry its source: `rate: {value: 48GB/s, source: measured}`. Unknown keys are errors. A device may be one
that was measured: `{file: own.json, memory: 70GiB}`, of a file in the same folder (`measured`).
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trainplan.cluster import catalogue, reading
from trainplan.cluster.cluster import Cluster, Curve, Device, Node, Slowdown
from trainplan.cluster.measured import measured_device, without_memory
from trainplan.cluster.sound import BACKENDS, checked
from trainplan.errors import InputError
from trainplan.units import parse_bytes, parse_rate, parse_seconds

_CLUSTER_KEYS = (
    "name", "backend", "nodes", "slowdown", "contention", "hosts", "dispatch", "collectives", "source", "notes",
    "spread", "slowdown_of_two", "one_machine",
)  # fmt: skip
_NODE_KEYS = (
    "count", "name", "type", "devices", "inside", "pairs", "network", "host_memory", "cores", "disk",
    "price_per_hour", "sources",
)  # fmt: skip
_DEVICE_KEYS = (
    "device", "name", "count", "flops", "memory", "memory_rate", "host_link", "context", "price", "processors",
    "efficiency", "capability", "file",
)  # fmt: skip
# Such as would do, for what is said where something else stands.
_NODES = "[{type: DGX-H100, count: 2}], or [{devices: [4x T4], inside: pcie3}]"
_CURVES = "[{op: all_reduce, ranks: 2, bytes: [1MB, 16MB], seconds: [1ms, 9ms]}]"
_COUNTED = re.compile(r"(?:(\d+)\s*x\s*)?(\S+)$")


def load_yaml(path: str | Path) -> Cluster:
    """The cluster that a YAML file describes."""
    data = reading.read_yaml(path)
    return read_cluster(data, str(path))


def read_cluster(data: Any, where: str) -> Cluster:
    """The cluster that the content of a YAML file describes; `where` names it in errors."""
    data = reading.mapping(data, where, _CLUSTER_KEYS)
    if "nodes" not in data:
        raise InputError(where, "the key 'nodes' is missing", f"nodes: {_NODES}")
    nodes: list[Node] = []
    for number, item in enumerate(reading.items(data["nodes"], f"{where}: nodes", _NODES)):
        nodes += _read_nodes(item, f"{where}: nodes[{number}]", Path(where).parent)
    if len(nodes) > 1:
        for node in nodes:
            if node.network is None:
                why = f"it has no network, and there are {len(nodes)} nodes"
                raise InputError(f"{where}: node {node.name}", why, "network: eth10")
    only_cpu = all(device.name == "cpu" for node in nodes for device in node.devices)
    backend = reading.text(data.get("backend", "gloo" if only_cpu else "nccl"), f"{where}: backend")
    if backend not in BACKENDS:
        raise InputError(f"{where}: backend {backend}", "there is no such backend", ", ".join(BACKENDS))
    found = Cluster(
        name=reading.text(data.get("name", Path(where).stem), f"{where}: name"),
        nodes=tuple(nodes),
        backend=backend,
        collectives=_read_collectives(data.get("collectives"), f"{where}: collectives"),
        slowdown=_read_slowdown(data.get("slowdown", {}), f"{where}: slowdown"),
        contention=_read_numbers(data.get("contention", []), f"{where}: contention"),
        hosts=_read_numbers(data.get("hosts", []), f"{where}: hosts"),
        dispatch_s=reading.sourced(data.get("dispatch", 0), f"{where}: dispatch", parse_seconds)[0],
        source=reading.text(data.get("source", f"file {where}"), f"{where}: source"),
        notes=_read_notes(data.get("notes"), f"{where}: notes"),
        slowdown_of_two=_read_slowdown(data["slowdown_of_two"], f"{where}: slowdown_of_two")
        if "slowdown_of_two" in data
        else None,
        spread=reading.sourced(data.get("spread", 0), f"{where}: spread", reading.share)[0],
        one_machine=reading.flag(data.get("one_machine", False), f"{where}: one_machine"),
    )
    return checked(found, where)


def _read_nodes(data: Any, where: str, folder: Path) -> list[Node]:
    data = reading.mapping(data, where, _NODE_KEYS)
    count, _ = reading.sourced(data.get("count", 1), f"{where}.count", lambda value: reading.whole(value, 1))
    devices = _read_devices(data["devices"], f"{where}.devices", folder) if "devices" in data else ()
    node = _base(data, devices, where)
    values: dict[str, Any] = {}
    sources = dict(node.sources)
    if "inside" in data:
        values["inside"] = catalogue.read_link(data["inside"], f"{where}.inside")
    if "pairs" in data:
        values["pairs"] = catalogue.read_pairs(data["pairs"], f"{where}.pairs")
    if "network" in data:
        network = data["network"]
        values["network"] = network and catalogue.read_network(network, len(node.devices), f"{where}.network")
    for key, field, parse in (
        ("host_memory", "host_memory_bytes", parse_bytes),
        ("cores", "cores", lambda value: reading.whole(value, 1)),
        ("disk", "disk_rate", parse_rate),
        ("price_per_hour", "price_per_hour", reading.number),
    ):
        if key in data:
            values[field], source = reading.sourced(data[key], f"{where}.{key}", parse)
            sources.pop(key, None)
            if source:
                sources[key] = source
    if "sources" in data:
        given = data["sources"]
        if not isinstance(given, dict):
            why = f"a mapping of texts was expected, found {given!r:.60}"
            raise InputError(f"{where}.sources", why, "{cores: data sheet}")
        sources = {str(key): reading.text(value, f"{where}.sources.{key}") for key, value in given.items()}
    if "name" in data:
        values["name"] = reading.text(data["name"], f"{where}.name")
    node = replace(node, sources=sources, **values)
    for pair in node.pairs:
        if pair.b >= len(node.devices):
            last = len(node.devices) - 1
            why = f"device {pair.b} of {last + 1}: they count from 0"
            raise InputError(f"{where}.pairs", why, f"devices 0 to {last}" if last else "leaving pairs out")
    return [node] * count


def _base(data: dict[str, Any], devices: tuple[Device, ...], where: str) -> Node:
    """The node before its own keys change it: one of the catalogue, or a bare one."""
    if "type" in data:
        name = reading.text(data["type"], f"{where}.type")
        of = devices[0].name if _known(devices) else None
        node = reading.placed(f"{where}.type", lambda: catalogue.node_type(name, of, len(devices) or None))
        return replace(node, devices=devices) if devices else node
    if not devices:
        raise InputError(where, "a node needs 'devices' or 'type'", "type: DGX-H100, or devices: [4x T4]")
    if "inside" not in data and len(devices) > 1:
        why = "a node of several devices needs 'inside', the link between them"
        raise InputError(where, why, f"inside: {catalogue.link_between(devices[0])}")
    alone = catalogue.link("loopback")  # a single device never uses it
    return Node("node", devices, alone)


def _known(devices: tuple[Device, ...]) -> bool:
    return bool(devices) and catalogue.has("device", devices[0].name)


def _read_devices(data: Any, where: str, folder: Path) -> tuple[Device, ...]:
    devices: list[Device] = []
    for number, item in enumerate(reading.items(data if isinstance(data, list) else [data], where)):
        devices += _read_device(item, f"{where}[{number}]", folder)
    return tuple(devices)


def _read_device(item: Any, where: str, folder: Path) -> list[Device]:
    if isinstance(item, str):
        match = _COUNTED.match(item.strip())
        if not match or match[1] == "0":
            raise InputError(f"{where}: {item!r}", "it is not a device", "T4, 4x T4, or a mapping with its numbers")
        return [reading.placed(where, lambda: catalogue.device(match[2]))] * int(match[1] or 1)
    item = dict(reading.mapping(item, where, _DEVICE_KEYS))
    count, _ = reading.sourced(item.pop("count", 1), f"{where}.count", lambda value: reading.whole(value, 1))
    known = item.pop("device", None)
    base = None
    if known is not None:
        base = reading.placed(where, lambda: catalogue.device(reading.text(known, f"{where}.device")))
    if "file" in item:
        file = folder / reading.text(item.pop("file"), f"{where}.file")
        like = base
        base = reading.placed(f"{where}.file", lambda: measured_device(file, like))
    name = reading.text(item.pop("name", base.name if base else None), f"{where}.name")
    found = catalogue.read_device(name, item, where, base)
    if found.file and not found.memory_bytes:
        raise without_memory(where, found.file)
    return [found] * count


def _read_slowdown(data: Any, where: str) -> Slowdown:
    data = reading.mapping(data, where, [field.name for field in fields(Slowdown)])
    values = {key: reading.sourced(value, f"{where}.{key}", reading.number)[0] for key, value in data.items()}
    for key, value in values.items():
        if value < 1:
            raise InputError(f"{where}.{key}", f"{value} would make it faster beside something else", "1 or more")
    return Slowdown(**values)


def _read_collectives(data: Any, where: str) -> tuple[Curve, ...]:
    curves = []
    for number, item in enumerate(reading.items(data, where, _CURVES) if data else []):
        place = f"{where}[{number}]"
        item = reading.mapping(item, place, ("op", "ranks", "bytes", "seconds", "groups"))
        missing = {"op", "ranks", "bytes", "seconds"} - set(item)
        if missing:
            raise InputError(place, f"missing: {', '.join(sorted(missing))}", _CURVES[1:-1])
        sizes = [parse_bytes(value) for value in reading.items(item["bytes"], f"{place}.bytes")]
        times = [parse_seconds(value) for value in reading.items(item["seconds"], f"{place}.seconds")]
        if len(sizes) != len(times) or sizes != sorted(set(sizes)):
            raise InputError(place, f"{len(sizes)} sizes and {len(times)} times", "as many times as ascending sizes")
        ranks, _ = reading.sourced(item["ranks"], f"{place}.ranks", lambda value: reading.whole(value, 2))
        groups, _ = reading.sourced(item.get("groups", 1), f"{place}.groups", lambda value: reading.whole(value, 1))
        curves.append(Curve(reading.text(item["op"], f"{place}.op"), ranks, tuple(sizes), tuple(times), groups))
    return tuple(curves)


def _read_notes(data: Any, where: str) -> tuple[str, ...]:
    notes = reading.items(data, where, '["…"], texts in quotes') if data else []
    return tuple(reading.text(note, where) for note in notes)


def _read_numbers(data: Any, where: str) -> tuple[float, ...]:
    if not isinstance(data, list):
        raise InputError(where, f"a list of numbers was expected, found {data!r:.60}", "[1.0, 1.2]")
    return tuple(reading.sourced(value, where, reading.number)[0] for value in data)
