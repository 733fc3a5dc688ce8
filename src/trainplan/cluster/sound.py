"""Whether a cluster that was read from a file can be one: what a clock would make nonsense of, or stop at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainplan.amounts import POSSIBLE, untrue
from trainplan.errors import InputError

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster, Curve, Link, Node

Fault = tuple[str, Any, str, str]  # the place, what stands there, what was expected, and something that would do

BACKENDS = ("gloo", "gloo-staged", "nccl")


def checked(cluster: Cluster, where: str, again: str = "") -> Cluster:
    """The cluster, if it can be one; `where` names the file in errors, and `again` what makes another."""
    for place, value, expected, instead in faults(cluster):
        asked = f"{where}{place if place.startswith('[') else f'.{place}'}"
        raise InputError(asked, f"it is {value!r:.60}, and {expected}", ", or ".join(filter(None, (instead, again))))
    return cluster


def faults(cluster: Cluster) -> Iterator[Fault]:
    """All that cannot be true of a cluster, but of its numbers only the first."""
    bad = untrue(cluster)
    if bad is not None:
        yield bad[0].lstrip("."), bad[1], POSSIBLE, "1"
        return
    if not cluster.nodes:
        yield "nodes", [], "a node or more was expected", "a node with a device"
    for number, node in enumerate(cluster.nodes):
        yield from _of_node(node, f"nodes[{number}]", len(cluster.nodes))
    if cluster.backend not in BACKENDS:
        yield "backend", cluster.backend, "there is no such backend", ", ".join(BACKENDS)
    for name in ("contention", "hosts"):
        for number, factor in enumerate(getattr(cluster, name)):
            if factor < 1:
                yield f"{name}[{number}]", factor, "others beside it would make it faster", "1.0 or more"
    for name in ("slowdown", "slowdown_of_two"):
        slow = getattr(cluster, name)
        for field in fields(slow) if slow is not None else ():
            if (factor := getattr(slow, field.name)) < 1:
                yield f"{name}.{field.name}", factor, "it would be faster beside something else", "1.0 or more"
    for number, curve in enumerate(cluster.collectives):
        yield from _of_curve(curve, f"collectives[{number}]")


def _of_node(node: Node, place: str, nodes: int) -> Iterator[Fault]:
    if not node.devices:
        yield f"{place}.devices", [], "a device or more was expected", "a device"
    for number, device in enumerate(node.devices):
        for name in ("memory_bytes", "memory_rate"):
            if not getattr(device, name):
                yield f"{place}.devices[{number}].{name}", 0, "more than 0 was expected", "what its data sheet says"
        for precision, speed in device.flops.items():
            if not speed:
                yield f"{place}.devices[{number}].flops.{precision}", 0, "more than 0 was expected", "leaving it out"
    links: dict[str, Link | None] = {"inside": node.inside, "network": node.network}
    links |= {f"pairs[{number}].link": pair.link for number, pair in enumerate(node.pairs)}
    for name, link in links.items():
        if link is not None and not link.rate:
            yield f"{place}.{name}.rate", 0, "more than 0 was expected", "12.5e9, of 100 Gbit/s"
    if nodes > 1 and node.network is None:
        yield f"{place}.network", None, f"there are {nodes} nodes", "a network for each"
    last = len(node.devices) - 1
    for number, pair in enumerate(node.pairs):
        if pair.a == pair.b or not (0 <= pair.a <= last and 0 <= pair.b <= last):
            between = f"two of its devices were expected, which count from 0 to {last}"
            yield f"{place}.pairs[{number}]", (pair.a, pair.b), between, "leaving it out"


def _of_curve(curve: Curve, place: str) -> Iterator[Fault]:
    sizes = curve.bytes
    if not sizes or list(sizes) != sorted(set(sizes)):
        yield f"{place}.bytes", sizes, "one size or more was expected, ascending", "[1000000, 16000000]"
    elif len(curve.seconds) != len(sizes):
        expected = f"as many as bytes were expected, which are {len(sizes)}"
        yield f"{place}.seconds", curve.seconds, expected, "a time for each size"
    for name in ("ranks", "groups"):
        if getattr(curve, name) < 1:
            yield f"{place}.{name}", getattr(curve, name), "1 or more was expected", "1"
