"""Known devices, links and node types: data files beside this module, every number with its source.

>>> device("H100-SXM").flops["bf16"], link("ib-ndr").rate, node_type("DGX-1").pairs[0].link.name
(989400000000000.0, 50000000000.0, 'NVLink 2')
>>> device("H100")
Traceback (most recent call last):
trainplan.errors.InputError: H100: there is no such device in the catalogue. Try H100-SXM, H100-PCIe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from typing import Any, Literal

from trainplan.cluster import reading
from trainplan.cluster.cluster import Device, Link, Node, Pair
from trainplan.errors import InputError, nearest
from trainplan.units import gb_per_s, parse_bytes, parse_flops, parse_rate, parse_seconds

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
Kind = Literal["device", "link", "node"]
MEASURED = "measured"  # sources of what no data sheet says begin so
_EXAMPLE = {"memory": "memory: 24GiB", "memory_rate": "memory_rate: 600GB/s", "flops": "flops: {fp32: 15TFLOP/s}"}
_CARDS = re.compile(r"(?:(\d+)\s*x\s*)?(\S+)$")
DEFAULT_NETWORK_LATENCY = "eth100"  # a network that is given as a mere rate has the latency of this one


# -- by name -------------------------------------------------------------------------------------------------------


def names(kind: Kind) -> tuple[str, ...]:
    """The names that the catalogue knows, in its order.

    >>> names("device")[:3]
    ('P40', 'GTX1080Ti', 'V100-16')
    """
    return tuple(_entries(kind))


def device(name: str) -> Device:
    """A device of the catalogue; capitals do not matter."""
    name, entry = _entry("device", name)
    known = {key: value for key, value in entry.items() if key not in ("node", "driver")}
    return read_device(name, known, f"catalogue device {name}")


def peak(of: Device, precision: str) -> float | None:
    """FLOP/s of a device's data sheet; None where it is not known: the best that was measured of a device is no peak.

    A device that was probed has the sheet of its name; a slice of it has its share of the processors.

    >>> peak(device("cpu"), "fp32"), peak(device("A100-80"), "tf32")
    (None, 156000000000000.0)
    """
    word = f"flops.{precision}"
    if not of.sources.get(word, "").startswith(MEASURED):
        rate = of.flops.get(precision)
        return rate * of.processors / of.slice_of if rate and of.slice_of else rate
    sheet = device(of.name) if has("device", of.name) else None
    if sheet is None or sheet.sources.get(word, MEASURED).startswith(MEASURED):
        return None
    share = of.processors / sheet.processors if of.processors and sheet.processors else 1.0
    return sheet.flops[precision] * min(1.0, share)


def reported(by_driver: str) -> str:
    """The catalogue's name of a device that a driver names, or the driver's own where the catalogue has none.

    >>> reported("NVIDIA A100-SXM4-80GB"), reported("Other GPU")
    ('A100-80', 'Other GPU')
    """
    names = {entry["driver"]: name for name, entry in _entries("device").items() if "driver" in entry}
    return names.get(by_driver, by_driver)


def link(name: str) -> Link:
    """A link of the catalogue; one direction, of one lane."""
    name, entry = _entry("link", name)
    return read_link(entry, f"catalogue link {name}")


def node_type(name: str, of: str | None = None, count: int | None = None) -> Node:
    """A node of the catalogue, with its network; `of` names another device, `count` asks for fewer or more of them.

    >>> node = node_type("titan4", count=3)
    >>> len(node.devices), [(pair.a, pair.b) for pair in node.pairs], node.network.shared
    (3, [(0, 1)], True)
    """
    name, entry = _entry("node", name)
    where = f"catalogue node {name}"
    of = of or entry.get("device")
    if of is None:
        raise InputError(name, "it takes any device, and none was named", "a short form such as 4xT4")
    wanted = device(of)
    full = reading.whole(entry.get("devices", count or 1), 1)
    count = count or full
    if "devices" in entry and count > full:
        raise InputError(f"{count} devices in a {name}", f"it has room for {full}", f"{full}, or several nodes")
    sources = {"node": entry["source"]}
    values: dict[str, Any] = {}
    for key, field, parse in (
        ("host_memory", "host_memory_bytes", parse_bytes),
        ("cores", "cores", lambda data: reading.whole(data, 1)),
    ):
        if key in entry:
            values[field], sources[key] = reading.sourced(entry[key], f"{where}.{key}", parse)
    if entry["inside"] == "host":
        inside = replace(link(link_between(wanted)), source=wanted.sources["host_link"])
    else:
        inside = read_link(entry["inside"], f"{where}.inside")
    network = read_network(entry["network"], count, f"{where}.network") if "network" in entry else None
    pairs = tuple(pair for pair in read_pairs(entry.get("pairs"), f"{where}.pairs") if max(pair.a, pair.b) < count)
    if of == "cpu":
        values |= {"cores": count, "host_memory_bytes": count * wanted.memory_bytes}
    return Node(name, (wanted,) * count, inside, network, pairs, sources=sources, **values)


def reference_node(name: str) -> tuple[str, int | None]:
    """The node type that a device's short form stands for, and how many devices it holds; None: any number.

    >>> reference_node("H100-SXM"), reference_node("cpu")
    (('DGX-H100', 8), ('cpu-box', None))
    """
    _, entry = _entry("device", name)
    node = entry["node"]
    return node, _entries("node")[node].get("devices")


def canonical(kind: Kind, name: str) -> str:
    """The catalogue's spelling of a name.

    >>> canonical("device", "titanrtx")
    'TitanRTX'
    """
    return _entry(kind, name)[0]


def has(kind: Kind, name: str) -> bool:
    """Whether the catalogue knows a name, capitals aside."""
    return name.lower() in (known.lower() for known in _entries(kind))


@cache
def _entries(kind: Kind) -> dict[str, dict[str, Any]]:
    file = {"device": "devices.yaml", "link": "links.yaml", "node": "nodes.yaml"}[kind]
    text = (resources.files("trainplan.cluster") / "catalogue" / file).read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = reading.parse_yaml(text, f"catalogue {file}")
    return entries


def _entry(kind: Kind, name: str) -> tuple[str, dict[str, Any]]:
    entries = _entries(kind)
    by_lower = {known.lower(): known for known in entries}
    if name.lower() not in by_lower:
        what = {"device": "device", "link": "link", "node": "node type"}[kind]
        variants = [known for known in entries if known.lower().startswith(name.lower())] if name else []
        instead = ", ".join(variants) or nearest(name, entries)
        raise InputError(name or "''", f"there is no such {what} in the catalogue", instead)
    found = by_lower[name.lower()]
    return found, entries[found]


def link_between(of: Device) -> str:
    """The link that may be between such devices of a node, where nobody says which is: PCIe of the device's own
    generation, whose rate is nearest above its host link.

    >>> link_between(device("cpu")), link_between(device("V100-16")), link_between(device("H100-SXM"))
    ('loopback', 'pcie3', 'pcie5')
    """
    if of.name == "cpu":
        return "loopback"
    rates = {link(name).rate: name for name in names("link") if name.startswith("pcie")}
    return rates[min((rate for rate in rates if rate >= of.host_rate), default=max(rates))]


# -- from data: the catalogue's files and the user's are read by the same functions ---------------------------------

_DEVICE_KEYS = (
    "flops", "memory", "memory_rate", "host_link", "context", "price", "processors", "efficiency", "capability",
)  # fmt: skip


def read_device(name: str, data: Any, where: str, base: Device | None = None) -> Device:
    """A device from a mapping; what is not said is as in `base`."""
    data = reading.mapping(data, where, _DEVICE_KEYS)
    sources = dict(base.sources) if base else {}

    def number(key: str, parse: Callable[[Any], Any], otherwise: Any) -> Any:
        if key not in data:
            return otherwise
        value, source = reading.sourced(data[key], f"{where}.{key}", parse)
        sources[key] = source or ("given" if base else "")  # the base's source is not that of another number
        return value

    flops = dict(base.flops) if base else {}
    for precision, entry in reading.mapping(data.get("flops", {}), f"{where}.flops", PRECISIONS).items():
        flops[precision], source = reading.sourced(entry, f"{where}.flops.{precision}", parse_flops)
        sources[f"flops.{precision}"] = source or ("given" if base else "")
    missing = [key for key in ("memory", "memory_rate") if base is None and key not in data]
    if missing or not flops:
        needed = missing + ([] if flops else ["flops"])
        why = f"{name} is not in the catalogue, and these are missing: {', '.join(needed)}"
        known = nearest(name, names("device"), 1)
        raise InputError(where, why, f"{', '.join(_EXAMPLE[key] for key in needed)}; or device: {known}")
    return Device(
        name=name,
        memory_bytes=number("memory", partial(parse_bytes, positive=True), base.memory_bytes if base else 0),
        flops=flops,
        memory_rate=number("memory_rate", partial(parse_rate, positive=True), base.memory_rate if base else 0.0),
        host_rate=number("host_link", parse_rate, base.host_rate if base else 0.0),
        context_bytes=number("context", parse_bytes, base.context_bytes if base else 0),
        price_per_hour=number("price", reading.number, base.price_per_hour if base else 0.0),
        processors=number("processors", lambda given: reading.whole(given, 1), base.processors if base else 0),
        efficiency=number("efficiency", _constants, dict(base.efficiency) if base else {}),
        capability=number("capability", _capability, base.capability if base else (0, 0)),
        file=base.file if base else "",
        sources={key: source for key, source in sources.items() if source},  # the last: the others say theirs
    )


def _capability(data: Any) -> tuple[int, int]:
    """
    >>> _capability("8.6"), _capability("10.0")
    ((8, 6), (10, 0))
    """
    match = re.fullmatch(r"(\d+)\.(\d)", str(data))
    if not match:
        raise InputError(repr(data), "CUDA's compute capability was expected, two numbers with a point", '"8.0"')
    return int(match[1]), int(match[2])


def _constants(data: Any) -> dict[str, float]:
    """Numbers by name; which names there are is known to `profile/efficiency.py`."""
    if not isinstance(data, dict):
        raise InputError(repr(data), "constants by name were expected", "{product: 0.8}")
    return {str(name): reading.number(value) for name, value in data.items()}


_LINK_KEYS = ("link", "lanes", "name", "rate", "latency", "message", "shared", "source", "reached", "in_switch")


def read_link(data: Any, where: str) -> Link:
    """A link from its name in the catalogue, from a rate (`25GB/s`), or from a mapping.

    In a mapping, `link` names one of the catalogue that the other keys change, and `lanes` multiplies its rate.

    >>> read_link({"link": "nvlink2", "lanes": 2, "latency": "2us"}, "file").rate
    50000000000.0
    """
    if isinstance(data, str):
        return _link_by_word(data, where)
    data = reading.mapping(data, where, _LINK_KEYS)
    base = _link_by_word(reading.text(data["link"], f"{where}.link"), where) if "link" in data else None
    if base is None and not {"rate", "latency"} <= set(data):
        raise InputError(where, "a link needs rate and latency, or the name of one in the catalogue", "link: eth100")
    lanes, _ = reading.sourced(data.get("lanes", 1), f"{where}.lanes", lambda value: reading.whole(value, 1))
    values: dict[str, Any] = {}
    said = {}
    for key, field, parse in (
        ("rate", "rate", partial(parse_rate, positive=True)),
        ("latency", "latency_s", parse_seconds),
        ("message", "message_s", parse_seconds),
        ("reached", "reached", reading.share),
        ("in_switch", "in_switch", reading.share),
    ):
        if key in data:
            values[field], said[key] = reading.sourced(data[key], f"{where}.{key}", parse)
    if "name" in data:
        values["name"] = reading.text(data["name"], f"{where}.name")
    if "shared" in data:
        values["shared"] = reading.flag(data["shared"], f"{where}.shared")
    if "source" in data:
        values["source"] = reading.text(data["source"], f"{where}.source")
    elif any(said.values()):
        values["source"] = "; ".join(f"{key}: {source}" for key, source in said.items() if source)
    found = replace(base, **values) if base else Link(**({"name": "link"} | values))
    if lanes > 1:
        found = replace(found, rate=found.rate * lanes, name=f"{lanes} × {found.name}")
    return found


def _link_by_word(word: str, where: str) -> Link:
    if has("link", word):
        return link(word)
    try:
        rate = parse_rate(word)
    except InputError:
        instead = f"{nearest(word, names('link'))}, or a rate such as 25GB/s"
        raise InputError(f"{where}: {word}", "there is no such link in the catalogue", instead) from None
    if rate == 0:
        raise InputError(f"{where}: {word}", "a link that carries nothing", "leaving it out")
    like = link(DEFAULT_NETWORK_LATENCY)
    return Link(gb_per_s(rate), like.latency_s, rate, source="rate: given; latency: assumed, as of Ethernet with TCP")


def read_network(data: Any, devices: int, where: str) -> Link:
    """The way out of a node of so many devices: `eth100`, `8x ib-ndr`, `25GB/s`, or a mapping as for any link.

    One card is shared by the node's devices. Several are told to the planner as each device's own, at its fair share,
    and at most at the rate of one card.

    >>> read_network("4x ib-edr", 8, "file").rate, read_network("8x ib-ndr", 8, "file").rate
    (6250000000.0, 50000000000.0)
    """
    if not isinstance(data, str):
        return read_link(data, where)
    match = _CARDS.match(data.strip())
    if not match:
        raise InputError(f"{where}: {data!r}", "it is not a network", "eth100, 8xib-ndr or 25GB/s")
    cards = int(match[1] or 1)
    if cards == 0:
        raise InputError(f"{where}: {data}", "a node needs at least one network card", f"1x{match[2]}")
    one = _link_by_word(match[2], where)
    if cards == 1:
        return replace(one, shared=True)
    return replace(one, rate=one.rate * min(1.0, cards / devices), name=f"{cards} × {one.name}")


def read_pairs(data: Any, where: str) -> tuple[Pair, ...]:
    """Pairs of devices with a link of their own: a list of `{between: [0, 1] or [[0, 1], [2, 3]], link: …}`."""
    pairs: list[Pair] = []
    for number, item in enumerate(reading.items(data, where, "[{between: [0, 1], link: nvlink2}]") if data else []):
        place = f"{where}[{number}]"
        item = reading.mapping(item, place, ("between", "link", "lanes"))
        if not {"between", "link"} <= set(item):
            raise InputError(place, "a pair needs 'between' and 'link'", "{between: [0, 1], link: nvlink2}")
        between = reading.items(item["between"], f"{place}.between", "[0, 1]")
        chosen = read_link(item["link"], f"{place}.link")
        if "lanes" in item:
            lanes, _ = reading.sourced(item["lanes"], f"{place}.lanes", lambda value: reading.whole(value, 1))
            chosen = replace(chosen, rate=chosen.rate * lanes, name=f"{lanes} × {chosen.name}")
        for ends in between if isinstance(between[0], list) else [between]:
            whole = isinstance(ends, list) and all(isinstance(end, int) and end >= 0 for end in ends)
            if not whole or len(ends) != 2 or ends[0] == ends[1]:
                raise InputError(f"{place}.between", f"two different devices were expected, found {ends}", "[0, 1]")
            pairs.append(Pair(min(ends), max(ends), chosen))
    return tuple(pairs)
