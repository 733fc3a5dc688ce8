"""Clusters by a short form.

    4xTitanRTX            four devices in one node
    2x8xH100-SXM          two nodes of eight
    16xH100-SXM           as many full reference nodes as that takes
    2x8xA100-80+eth100    with another network than the reference one; also +8xib-ndr, +25GB/s
    8xcpu                 eight workers on cores of one machine
    titan4, 4xtitan4      node types by name
    local, 4xlocal        this machine, probed (local:cpu and local:cuda say which of its devices)
    lab.yaml, lab.json    a file
    4xown.json            four devices as a device file describes them (`trainplan device measure -o own.json`)

A short name stands for the vendor's reference node and fabric; the cluster's notes say which, in words.

>>> found = cluster("2x8xH100-SXM")
>>> found.world, found.link(0, 1).rate, found.link(0, 8).rate
(16, 450000000000.0, 50000000000.0)
>>> print(*found.notes, sep="\\n")
8 × H100-SXM as in a DGX-H100: NVSwitch 450 GB/s each way; network 8 × InfiniBand NDR 400 Gb/s, 50.0 GB/s a device
prices are list prices, good to an order of magnitude
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainplan import files
from trainplan.cluster import catalogue, reading
from trainplan.cluster.cluster import Cluster, Node
from trainplan.cluster.measured import KIND, device_named, measured_device, without_memory
from trainplan.cluster.notes import ASSUMED, GIVEN, LIST_PRICES, network_words, node_note
from trainplan.errors import InputError, nearest

DEFAULT_NETWORK = "eth10"  # between nodes that have no reference fabric
MOST_DEVICES = 2**20  # more than the largest machine there is: beyond it a number was mistyped
_SHORT = re.compile(r"(?:(-?\d+)\s*x\s*)?(?:(-?\d+)\s*x\s*)?(.*)$")
_LOCAL = re.compile(r"(?:(\d+)x)?local(?::(\w+))?$")

Progress = Callable[[str, float], None]


def cluster(
    text: str, *, progress: Progress | None = None, refresh: bool = False, probe: Callable[..., Cluster] | None = None
) -> Cluster:
    """The cluster that a short form, the path of a file, or `local` means.

    `progress`, `refresh` and `probe` matter to `local` alone: the probe's progress, whether to measure again though the
    machine was probed before, and who measures (`engine/probe.py` knows more than the probe of this room).
    """
    text = str(text).strip()
    if text.lower().endswith((".yaml", ".yml")):
        from trainplan.cluster.yaml_form import load_yaml

        return load_yaml(text)
    if _is_cluster(text):
        return Cluster.load(text)
    if match := _LOCAL.match(text.lower()):
        from trainplan.cluster.probe.probe import probe as plain

        workers = int(match[1]) if match[1] else None
        return (probe or plain)(workers, local_device(text) or "cpu", refresh=refresh, progress=progress)
    return _short(text)


def _is_cluster(text: str) -> bool:
    """Whether a text means a cluster in our own form: it names a .json file, which is not that of a device."""
    counted = re.match(r"-?\d+\s*[x×]", text) and not Path(text).exists()
    return text.lower().endswith(".json") and not counted and files.kind(text) != KIND


def _short(text: str) -> Cluster:
    body, plus, network = text.replace("×", "x").partition("+")
    match = _SHORT.match(body.strip())
    first, second, name = match.groups() if match else (None, None, "")
    counts = [int(count) for count in (first, second) if count is not None]
    name = name.strip()
    for count in counts:
        if count < 1:
            raise InputError(text, f"a cluster of {count} nodes or devices has nothing to run on", f"1x{name or 'T4'}")
    if math.prod(counts) > MOST_DEVICES:
        raise InputError(text, f"{math.prod(counts):,} devices are more than {MOST_DEVICES:,}", "a smaller number")
    if plus and not network.strip():
        raise InputError(text, "no network follows the +", f"{body}+{DEFAULT_NETWORK}")
    source, spelled = "catalogue", name
    if name.lower().endswith(".json"):
        nodes, node = _by_file(text, counts, name)
        source, spelled = f"device file {Path(name).name}; otherwise: catalogue", Path(name).name
    elif catalogue.has("node", name):
        spelled = catalogue.canonical("node", name)
        nodes, node = _by_node(text, counts, spelled)
    else:
        if not catalogue.has("device", name):
            raise _unknown(text, name)
        spelled = catalogue.canonical("device", name)
        nodes, node = _by_device(text, counts, spelled)

    notes = [node_note(node)]
    if plus:
        node = replace(node, network=catalogue.read_network(network, len(node.devices), text))
        notes.append(f"{GIVEN}: {network_words(node)}")
    elif nodes == 1:
        node = replace(node, network=None)
    elif node.network is None:
        node = replace(node, network=catalogue.read_network(DEFAULT_NETWORK, len(node.devices), text))
        notes.append(f"{ASSUMED}, as {node.name} has no reference one: {network_words(node)}")
    else:
        notes[0] += f"; network {network_words(node)}"
    device = node.devices[0]
    if device.price_per_hour:
        notes.append(LIST_PRICES)
    return Cluster(
        name=text.replace(name, spelled, 1).replace("×", "x").replace(" ", ""),
        nodes=(node,) * nodes,
        backend="gloo" if device.name == "cpu" else "nccl",
        source=source,
        notes=tuple(notes),
    )


def _by_node(text: str, counts: list[int], name: str) -> tuple[int, Node]:
    """So many nodes of a type: `4xtitan4`."""
    if len(counts) > 1:
        raise InputError(text, f"{name} is a node, which has a fixed number of devices", f"{counts[0]}x{name}")
    return (counts or [1])[0], catalogue.node_type(name)


def _by_device(text: str, counts: list[int], name: str) -> tuple[int, Node]:
    """So many devices in reference nodes: `8xT4`, `2x8xT4`."""
    node, room = catalogue.reference_node(name)
    if len(counts) == 2:
        nodes, count = counts
        if room and count > room:
            total = nodes * count
            instead = f"{total // room}x{room}x{name}" if total % room == 0 else f"{nodes}x{room}x{name}"
            raise InputError(text, f"a {node} has room for {room} {name}, not {count}", instead)
        return nodes, catalogue.node_type(node, name, count)
    total = (counts or [1])[0]
    if not room or total <= room:
        return 1, catalogue.node_type(node, name, total)
    if total % room:
        per_node = max(size for size in range(1, room + 1) if total % size == 0)
        instead = f"{total // per_node}x{per_node}x{name}" if per_node > 1 else f"{total // room}x{room}x{name}"
        raise InputError(text, f"a {node} has room for {room} {name}, and {total} do not fill nodes of {room}", instead)
    return total // room, catalogue.node_type(node, name, room)


def _by_file(text: str, counts: list[int], path: str) -> tuple[int, Node]:
    """So many devices of a device file, in the reference nodes of the device that was measured: `8xown.json`."""
    device = reading.placed(text, lambda: measured_device(path))
    if not device.memory_bytes:
        raise without_memory(text, path)
    nodes, node = _by_device(text, counts, device_named(path))
    return nodes, replace(node, devices=(device,) * len(node.devices))


def _unknown(text: str, name: str) -> InputError:
    known = catalogue.names("device") + catalogue.names("node") + ("local",)
    if not name:
        return InputError(text or "''", "no device is named", "4xTitanRTX, 2x8xH100-SXM, local, or a .yaml file")
    variants = [device for device in catalogue.names("device") if device.lower().startswith(name.lower())]
    instead = ", ".join(variants) or nearest(name, known)
    if Path(name).suffix:
        instead += "; a file's name ends in .yaml or .json"
    return InputError(text, f"there is no device or node type {name!r} in the catalogue", instead)


def local_device(text: str) -> str | None:
    """cpu or cuda, where the text means this machine: that is known without probing it. None: it means another.

    >>> local_device("2xlocal:cpu"), local_device("8xA100-80")
    ('cpu', None)
    """
    match = _LOCAL.match(text.strip().lower())
    if match is None:
        return None
    if match[1] == "0":
        raise InputError("0xlocal", "a cluster needs at least one worker", "local or 2xlocal")
    if match[2] not in (None, "cpu", "cuda"):
        raise InputError(f"local:{match[2]}", "this machine is probed as cpu or cuda", "local:cpu or local:cuda")
    from trainplan.cluster.probe.machine import accelerators

    return match[2] or ("cuda" if accelerators() else "cpu")
