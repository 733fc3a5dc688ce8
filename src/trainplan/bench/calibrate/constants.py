"""The constants of a cluster that predictions are made from, as numbers that can be fitted.

Which there are follows from the cluster: one that was probed has curves of messages and sums, another only links. Each
has bounds beyond which no machine is. What is fitted is a logarithm, so that half and double are as far; of numbers
that may be nought (a wait, a spread) a `shift` is added first.

>>> from trainplan.cluster.parse import cluster
>>> there = cluster("2x2xT4+eth10")
>>> [constant.name for constant in constants(there, [2])][:6]
['dispatch', 'inside.latency', 'inside.rate', 'network.latency', 'network.rate', 'host_link']
>>> changed(there, {"network.rate": 1e9}).link(0, 2).rate
1000000000.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node, Slowdown
from trainplan.units import gb_per_s, seconds, significant

FASTEST_MESSAGE = 2e-7  # seconds: what one core takes to hear of another's write
SLOWEST_MESSAGE = 0.5
MOST_SLOWED = 8.0  # times, by what goes on beside it
MOST_SPREAD = 0.5
MOST_DISPATCH = 5e-3
# Curves that are of one kind: how a sum is made, how shares are, and the parts of one that goes through host memory.
FAMILIES = {
    "messages": ("p2p",),
    "sums": ("all_reduce", "all_reduces"),
    "shares": ("all_gather", "reduce_scatter"),
    "rounds": ("round", "stage", "add"),
    "hub": ("hub",),
}
_TABLE = "contention."


@dataclass(frozen=True)
class Constant:
    """One number of a cluster."""

    name: str
    what: str
    value: float
    low: float
    high: float
    shift: float = 0.0
    unit: str = "times"  # seconds, rate or times

    @property
    def ends(self) -> tuple[float, float]:
        """How far its logarithm may move."""
        return self.way(min(self.low, self.value)), self.way(max(self.high, self.value))

    def way(self, value: float) -> float:
        """From what it is now to another value, as a logarithm."""
        return math.log((value + self.shift) / (self.value + self.shift))

    def moved(self, way: float) -> float:
        """The value at the end of it."""
        return (self.value + self.shift) * math.exp(way) - self.shift

    def told(self, value: float) -> str:
        """A value of it in words."""
        shown = {"seconds": seconds, "rate": gb_per_s, "times": significant}[self.unit]
        return shown(value)


def constants(cluster: Cluster, together: Iterable[int]) -> list[Constant]:
    """All that a cluster has; `together` are the numbers of ranks of one node that were seen at work."""
    node = cluster.nodes[0]
    found = [
        Constant(
            "dispatch", "host time for an operation", cluster.dispatch_s, 0.0, MOST_DISPATCH, shift=1e-4, unit="seconds"
        )
    ]
    curves = {family: _curves(cluster, family) for family in FAMILIES}
    if not curves["messages"]:
        found += _of_link("inside", "two devices of a node", node.inside)
    if node.network is not None and len(cluster.nodes) > 1:
        found += _of_link("network", "two nodes", node.network)
    for family, own in curves.items():
        if own:
            found += _of_curves(family, own, node.devices[0])
    device = node.devices[0]
    if device.host_rate:
        found.append(_rate("host_link", "a device and its host", device.host_rate, _probed(device, "host_link")))
    found.append(_rate("memory_rate", "a device's memory", device.memory_rate, _probed(device, "memory_rate")))
    for which, slowdown in (("slowdown", cluster.slowdown), ("slowdown_of_two", cluster.slowdown_of_two)):
        if slowdown is not None:
            for one in fields(Slowdown):
                what = f"{'communication' if one.name.startswith('slowed') else 'compute'} beside the other"
                value = getattr(slowdown, one.name)
                found.append(Constant(f"{which}.{one.name}", what, value, 1.0, MOST_SLOWED))
    table = cluster.contention or (1.0,)
    for count in sorted({count for count in together if count > 1}):
        value = table[min(count, len(table)) - 1]
        found.append(Constant(f"{_TABLE}{count}", f"compute while {count} devices do", value, 1.0, float(count)))
    found.append(Constant("spread", "of devices that should be equal", cluster.spread, 0.0, MOST_SPREAD, shift=1.0))
    return found


def _of_link(name: str, between: str, link: Link) -> list[Constant]:
    latency = Constant(
        f"{name}.latency", f"of a message between {between}", link.latency_s, FASTEST_MESSAGE, SLOWEST_MESSAGE, 1e-6,
        "seconds",
    )  # fmt: skip
    return [latency, _rate(f"{name}.rate", between, link.rate, link.source.startswith("probed"))]


def _rate(name: str, of: str, value: float, probed: bool) -> Constant:
    """Bytes a second. A rate from a data sheet is never exceeded; one that was probed may have been disturbed."""
    return Constant(name, f"of {of}", value, value / 20, value * (3 if probed else 1), unit="rate")


def _probed(device: Device, key: str) -> bool:
    return device.sources.get(key, "").startswith(("measured", "calibrated"))


def _curves(cluster: Cluster, family: str) -> list[Curve]:
    return [curve for curve in cluster.collectives if curve.op in FAMILIES[family]]


def _of_curves(family: str, curves: list[Curve], device: Device) -> list[Constant]:
    """What a curve begins with, and what it rises by: of the first one, the others go with it."""
    first = curves[0]
    begins = min(first.seconds)  # the smallest may have been disturbed
    rises = first.seconds[-1] - begins
    found = [
        Constant(
            f"{family}.latency", f"of {family}, however small", begins, FASTEST_MESSAGE, SLOWEST_MESSAGE,
            unit="seconds",
        )
    ]  # fmt: skip
    if len(first.bytes) > 1 and rises > 0:
        read_once = (first.bytes[-1] - first.bytes[0]) / max(device.memory_rate, device.host_rate)
        what = f"of {family}, for the bytes of the largest"
        found.append(Constant(f"{family}.bytes", what, rises, min(rises, read_once), rises * 20, unit="seconds"))
    return found


# -- a cluster with others ---------------------------------------------------------------------------------------------


def changed(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """A cluster with other values of some of its constants."""
    counts = {int(name.removeprefix(_TABLE)): value for name, value in values.items() if name.startswith(_TABLE)}
    was = {constant.name: constant.value for constant in constants(cluster, counts)}
    times = {name: value / was[name] if was[name] else math.inf for name, value in values.items()}
    parts: dict[str, Any] = {
        "nodes": tuple(_node(node, values, times) for node in cluster.nodes),
        "collectives": tuple(_curve(curve, times) for curve in cluster.collectives),
        "dispatch_s": values.get("dispatch", cluster.dispatch_s),
        "spread": values.get("spread", cluster.spread),
        "contention": _table(cluster, counts) if counts else cluster.contention,
    }
    for which in ("slowdown", "slowdown_of_two"):
        own = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{which}.")}
        if own:
            parts[which] = replace(getattr(cluster, which), **own)
    return replace(cluster, **parts)


def _node(node: Node, values: Mapping[str, float], times: Mapping[str, float]) -> Node:
    """A node of it. Where messages were measured, links go with their curve: sums in rounds are priced by both."""
    later = times.get("messages.latency", 1.0)
    faster = 1 / times.get("messages.bytes", 1.0)

    def inside(link: Link) -> Link:
        link = _link(link, "inside", values, times)
        return replace(
            link, latency_s=link.latency_s * later, message_s=link.message_s * later, rate=link.rate * faster
        )

    devices = node.devices
    for key, field in (("memory_rate", "memory_rate"), ("host_link", "host_rate")):
        if key in times:
            devices = tuple(replace(d, **{field: getattr(d, field) * times[key]}) for d in devices)
    return replace(
        node, devices=devices, inside=inside(node.inside),
        pairs=tuple(replace(pair, link=inside(pair.link)) for pair in node.pairs),
        network=node.network and _link(node.network, "network", values, times),
    )  # fmt: skip


def _link(link: Link, name: str, values: Mapping[str, float], times: Mapping[str, float]) -> Link:
    latency, rate = f"{name}.latency", f"{name}.rate"
    if latency in values:  # of another link in proportion, and of one without any as much
        link = replace(link, latency_s=link.latency_s * times[latency] if link.latency_s else values[latency])
    return replace(link, rate=link.rate * times.get(rate, 1.0))


def _curve(curve: Curve, times: Mapping[str, float]) -> Curve:
    family = next((name for name, ops in FAMILIES.items() if curve.op in ops), "")
    begins, rises = times.get(f"{family}.latency", 1.0), times.get(f"{family}.bytes", 1.0)
    if begins == rises == 1.0:
        return curve
    first = min(curve.seconds)
    return replace(curve, seconds=tuple(first * begins + (value - first) * rises for value in curve.seconds))


def _table(cluster: Cluster, counts: Mapping[int, float]) -> tuple[float, ...]:
    """The table of contention with these entries: those between are moved along with them, and it never falls."""
    most = max(max(counts), *(len(node.devices) for node in cluster.nodes))
    table = np.array(cluster.contention or (1.0,))
    table = table[np.minimum(np.arange(most), len(table) - 1)]
    places = [0, *(count - 1 for count in sorted(counts))]
    factors = [1.0, *(counts[count] / table[count - 1] for count in sorted(counts))]
    moved = table * np.interp(np.arange(most), places, factors)
    return tuple(float(value) for value in np.maximum.accumulate(np.maximum(moved, 1.0)))
