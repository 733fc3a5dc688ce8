"""What is said of a cluster beside its numbers: what a short name stood for, and what of it was changed."""

from __future__ import annotations

from collections.abc import Sequence

from trainplan.cluster.cluster import Cluster, Link, Node
from trainplan.units import gb_per_s, seconds, significant

GIVEN, ASSUMED = "network as given", "network assumed"  # how notes of a network begin
LIST_PRICES = "prices are list prices, good to an order of magnitude"
IN_TABLE = ("changed", ASSUMED, "other processes", "what the engine")  # notes that `describe` has among its lines


def node_note(node: Node) -> str:
    """What the short name stood for, as a sentence."""
    size, device = len(node.devices), node.devices[0]
    words = f"{size} × {device.name} as in a {node.name}"
    if size > 1:
        words += f": {link_words(node.inside)}"
        kinds: dict[Link, list[str]] = {}
        for pair in node.pairs:
            kinds.setdefault(pair.link, []).append(f"{pair.a}–{pair.b}")
        for link, between in kinds.items():
            words += f", {link_words(link)} between {' '.join(between)}"
    return words


def link_words(link: Link) -> str:
    assumed = " (assumed)" if link.source.startswith(("rate: assumed", "assumed")) else ""
    return f"{link.name} {significant(link.rate / 1e9)} GB/s each way{assumed}"


def network_words(node: Node) -> str:
    network = node.network
    if network is None:
        return "none"
    whose = "shared by the node" if network.shared else "a device"
    return f"{network.name}, {gb_per_s(network.rate)} {whose}"


def after_change(before: Cluster, after: Cluster, said: Sequence[str]) -> tuple[str, ...]:
    """The notes of a cluster that was changed: what is no longer so is left out, and what was changed is told.

    >>> from dataclasses import replace
    >>> from trainplan.cluster.parse import cluster
    >>> was = cluster("2x8xA100-80+eth100")
    >>> slow = replace(was.nodes[0], network=replace(was.nodes[0].network, rate=1e9))
    >>> print(*after_change(was, replace(was, nodes=(slow, slow)), ["network=1GB/s"]), sep="\\n")
    8 × A100-80 as in a DGX-A100: NVSwitch 300 GB/s each way
    prices are list prices, good to an order of magnitude
    changed: network=1GB/s
    changed links: network (Ethernet 100 Gb/s) 12.5 → 1.00 GB/s
    """
    notes = list(before.notes)
    for was, now in dict.fromkeys(zip(map(network_words, before.nodes), map(network_words, after.nodes), strict=True)):
        if was != now:
            notes = [note for note in notes if not note.startswith((GIVEN, ASSUMED))]
            notes = [note.replace(f"; network {was}", "") for note in notes]
    links = _links(before, after)
    for _, old, new in links:
        if old and new and link_words(old) != link_words(new):
            notes = [note.replace(link_words(old), f"{old.name} (changed)") for note in notes]
    if any(word.startswith(("price=", "node_price=")) for word in said):
        notes = [note for note in notes if note != LIST_PRICES]
    notes.append(f"changed: {' '.join(said)}")
    told = [f"{where} {_change(old, new)}" for where, old, new in links]
    return (*notes, f"changed links: {'; '.join(told)}") if told else tuple(notes)


def _links(before: Cluster, after: Cluster) -> list[tuple[str, Link | None, Link]]:
    """(where, before, after) of every link that has become another, of equal nodes once."""
    found: list[tuple[str, Link | None, Link | None]] = []
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if len(old.devices) > 1:
            found.append(("inside", old.inside, new.inside))
        found += [("pairs", a.link, b.link) for a, b in zip(old.pairs, new.pairs, strict=True)]
        if len(before.nodes) > 1:
            found.append(("network", old.network, new.network))
    return [(where, was, now) for where, was, now in dict.fromkeys(found) if now is not None and was != now]


def _change(old: Link | None, new: Link) -> str:
    """A link that has become another, in words."""
    if old is None:
        return f"({new.name}) {gb_per_s(new.rate)}, none before"
    parts = []
    if old.rate != new.rate:
        parts.append(f"{significant(old.rate / 1e9)} → {gb_per_s(new.rate)}")
    if old.latency_s != new.latency_s:
        parts.append(f"{seconds(old.latency_s)} → {seconds(new.latency_s)}")
    if old.message_s != new.message_s:
        parts.append(f"{seconds(old.message_s)} → {seconds(new.message_s)} of the host a message")
    name = old.name if old.name == new.name else f"{old.name} → {new.name}"
    return f"({name}) {', '.join(parts or ['of the same rate'])}"
