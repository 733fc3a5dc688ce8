"""A limit on memory, given in a request: as if every device had that much and no more."""

from __future__ import annotations

from dataclasses import replace

from trainplan.cluster.cluster import Cluster, Device, Node
from trainplan.errors import PlanError
from trainplan.predict.predict import MEMORY_MARGIN


def limited(cluster: Cluster, memory: int | None) -> Cluster:
    """The cluster with devices of at most `memory` bytes.

    >>> from trainplan.cluster.parse import cluster
    >>> limited(cluster("2xT4"), 8 * 2**30).device(1).memory_bytes == 8 * 2**30
    True
    """
    if memory is None:
        return cluster
    if memory < 1:
        why = f"it is all that a device may use, and {memory} B hold nothing"
        raise PlanError(f"memory={memory}", why, "leaving memory out")

    def device(old: Device) -> Device:
        return replace(old, memory_bytes=min(old.memory_bytes, memory))

    def node(old: Node) -> Node:
        return replace(old, devices=tuple(map(device, old.devices)))

    return replace(cluster, nodes=tuple(map(node, cluster.nodes)))


def usable(cluster: Cluster) -> float:
    """Bytes that a program may use on every device: the margin and the device's own libraries taken off."""
    nodes = {id(node): node for node in cluster.nodes}  # of many machines most are one value
    devices = {id(device): device for node in nodes.values() for device in node.devices}
    return min(d.memory_bytes * (1 - MEMORY_MARGIN) - d.context_bytes for d in devices.values())
