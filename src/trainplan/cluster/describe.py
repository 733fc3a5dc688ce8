"""What the planner believes about a cluster, in words.

>>> from trainplan.cluster.parse import cluster
>>> print(describe(cluster("2xtitan4")))
2xtitan4: 8 devices in 2 nodes, backend nccl
  node      2 × titan4: 4 × TitanRTX, 24 cores, host memory 179 GiB
  TitanRTX  24.0 GiB at 672 GB/s; 16.3 TFLOP/s fp32, 130 TFLOP/s fp16; host link 15.8 GB/s
  inside    PCIe 3.0 x16, 11.0 GB/s each way, 10.0 µs (assumed)
  pairs     0–1 2–3: NVLink, 48.0 GB/s each way, 10.0 µs (assumed)
  network   Ethernet 40 Gb/s, 5.00 GB/s each way shared by the node, 50.0 µs (latency assumed)
  price     not known
  source    catalogue
"""

from __future__ import annotations

from itertools import groupby

from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.cluster.notes import IN_TABLE
from trainplan.units import gb_per_s, gib, percent, seconds, significant, tflops


def describe(cluster: Cluster) -> str:
    """Nodes, devices, links, network, price and sources, one line each."""
    many = "device" if cluster.world == 1 else "devices"
    places = "1 node" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes"
    lines = [f"{cluster.name}: {cluster.world} {many} in {places}, backend {cluster.backend}"]
    rows: list[tuple[str, str]] = []
    for node, alike in groupby(cluster.nodes):
        rows += _node(node, sum(1 for _ in alike), len(cluster.nodes) > 1)
    rows += _measured(cluster)
    rows.append(("price", _price(cluster)))
    rows.append(("source", cluster.source or "not said"))
    rows += [("note", note) for note in cluster.notes if note.startswith(IN_TABLE)]  # the rest is in the lines above
    width = max(len(name) for name, _ in rows)
    return "\n".join(lines + [f"  {name:{width}}  {text}" for name, text in rows])


def _node(node: Node, count: int, networked: bool) -> list[tuple[str, str]]:
    devices = [(device, sum(1 for _ in alike)) for device, alike in groupby(node.devices)]
    words = " + ".join(f"{many} × {device.name}" for device, many in devices)
    if node.cores:
        words += f", {node.cores} cores"
    if node.host_memory_bytes:
        words += f", host memory {gib(node.host_memory_bytes)}"
    if node.disk_rate:
        words += f", disk {gb_per_s(node.disk_rate)}"
    rows = [("node", f"{count} × {node.name}: {words}" if count > 1 else f"{node.name}: {words}")]
    seen: list[Device] = []
    for device, _ in devices:
        if device not in seen:
            seen.append(device)
            rows.append((device.name, _device(device)))
    if len(node.devices) > 1:
        rows.append(("inside", _link(node.inside)))
    kinds: dict[Link, list[str]] = {}
    for pair in node.pairs:
        kinds.setdefault(pair.link, []).append(f"{pair.a}–{pair.b}")
    rows += [("pairs", f"{' '.join(between)}: {_link(link)}") for link, between in kinds.items()]
    if networked and node.network:
        rows.append(("network", _link(node.network, " shared by the node" if node.network.shared else " a device")))
    return rows


def _device(device: Device) -> str:
    speeds = ", ".join(f"{_flops(speed)} {precision}" for precision, speed in device.flops.items())
    words = f"{gib(device.memory_bytes)} at {gb_per_s(device.memory_rate)}; {speeds}"
    if device.host_rate:
        words += f"; host link {gb_per_s(device.host_rate)}"
    return words


def _flops(speed: float) -> str:
    return tflops(speed) if speed >= 1e12 else f"{significant(speed / 1e9)} GFLOP/s"


def _link(link: Link, whose: str = "") -> str:
    words = f"{link.name}, {gb_per_s(link.rate)} each way{whose}, {seconds(link.latency_s)}"
    if link.message_s:
        words += f", {seconds(link.message_s)} of the host a message"
    if link.source.startswith(("rate: assumed", "assumed")):
        return f"{words} (assumed)"
    return f"{words} (latency assumed)" if "latency: assumed" in link.source else words


def _measured(cluster: Cluster) -> list[tuple[str, str]]:
    """What only a probe knows."""
    rows = []
    if cluster.collectives:
        curve = max(
            (c for c in cluster.collectives if c.op == "all_reduce"),
            key=lambda c: c.ranks,
            default=cluster.collectives[0],
        )
        size, time = curve.bytes[-1], curve.seconds[-1]
        rows.append((curve.op, f"{gib(size)} on {curve.ranks} ranks in {seconds(time)}"))
    slow = cluster.slowdown
    kinds = {"a collective goes on": slow.collective, "it sends": slow.send, "it receives": slow.receive}
    kinds["it copies"] = slow.copy
    felt = [f"{factor:.2f} × while {kind}" for kind, factor in kinds.items() if factor > 1]
    if felt:
        rows.append(("compute", "takes " + ", ".join(felt)))
    kinds = {"a collective": slow.slowed_collective, "a message": slow.slowed_message, "a copy": slow.slowed_copy}
    held_up = [f"{kind} takes {factor:.2f} ×" for kind, factor in kinds.items() if factor > 1]
    if held_up:
        rows.append(("beside compute", ", ".join(held_up)))
    if len(cluster.contention) > 1:
        most = len(cluster.contention)
        rows.append(("busy", f"compute takes {cluster.contention[-1]:.2f} × when {most} devices of a node are at work"))
    if len(cluster.hosts) > 1:
        most = len(cluster.hosts)
        rows.append(("hosts", f"issuing work takes {cluster.hosts[-1]:.2f} × when {most} of a node do"))
    if cluster.dispatch_s:
        rows.append(("engine", f"takes {seconds(cluster.dispatch_s)} of a host for an operation, beside the operation"))
    if cluster.spread:
        rows.append(("spread", f"devices that should be equally fast are {percent(cluster.spread)} apart"))
    return rows


def _price(cluster: Cluster) -> str:
    price = cluster.price_per_hour()
    if not price:
        return "not known"
    sources = {
        node.sources.get("price_per_hour", "given") if node.price_per_hour else device.sources.get("price", "given")
        for node in cluster.nodes
        for device in node.devices
    }
    listed = sources != {"given"}
    words = "list price, order of magnitude: " if listed else ""
    return f"{significant(price)} USD an hour ({words}{'; '.join(sorted(sources))})"
