"""Clusters made of numbers, for tests."""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster, Device, Link, Node


def cluster(
    nodes: int = 1,
    devices: int = 4,
    rate: float = 100.0,
    latency: float = 0.0,
    message: float = 0.0,
    network_rate: float | None = None,
    shared: bool = False,
    memory: int = 10**9,
    backend: str = "gloo",
    **fields,
) -> Cluster:
    """Equal nodes of equal devices; links in bytes a second. `shared`: a node has one network card."""
    device = Device("cpu", memory, {"fp32": 1e9}, 1e9)
    network = Link("network", latency, network_rate or rate, message, shared) if nodes > 1 else None
    node = Node("node", (device,) * devices, Link("inside", latency, rate, message), network)
    return Cluster("test", (node,) * nodes, backend, **fields)
