"""Where it is trained: nodes, devices, links, prices. Values only; no torch here.

Ranks count over the devices of node 0, then node 1, and so on. `Cluster.link(a, b)` is the link between two ranks;
`collectives` and `slowdown` are there when the cluster was probed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.cluster.sound import checked
from trainplan.errors import PlanError


@dataclass(frozen=True)
class Device:
    """An accelerator, or a CPU core that serves as one."""

    name: str
    memory_bytes: int
    flops: dict[str, float]  # dense peak FLOP/s by precision: fp32, tf32, bf16, fp16
    memory_rate: float  # bytes/s
    host_rate: float = 0.0  # bytes/s to host memory, one direction; 0: it shares the host's memory
    context_bytes: int = 0  # taken by driver and libraries before the first tensor
    price_per_hour: float = 0.0  # of one device; 0: not known
    sources: dict[str, str] = field(default_factory=dict)  # where each number is from
    processors: int = 0  # that work side by side (NVIDIA's multiprocessors); 0: not known
    efficiency: dict[str, float] = field(default_factory=dict)  # fitted constants (`profile/efficiency.py`), if any
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability, (9, 0) of an H200; (0, 0): not known, or none
    file: str = ""  # whole path of the device file that alone says how fast it is; "": whichever there is
    slice_of: int = 0  # processors of the whole device, whose data sheet's rates these are; 0: it is no slice of one


@dataclass(frozen=True)
class Link:
    """One direction between two devices, or between a node and the network."""

    name: str
    latency_s: float  # of one message, wire and software
    rate: float  # bytes/s
    message_s: float = 0.0  # host time that sending or receiving one message takes
    shared: bool = False  # one for all devices of the node (a network card), not one a pair
    source: str = ""
    # Shares of the rate that NCCL reaches in collectives (`predict/nccl.py`): in rings, and where a switch adds up; 0:
    # it is not known, or there is no such switch.
    reached: float = 0.0
    in_switch: float = 0.0


@dataclass(frozen=True)
class Pair:
    """Two devices of a node that have a link of their own."""

    a: int
    b: int
    link: Link


@dataclass(frozen=True)
class Node:
    """A machine: devices, the link between any two of them, and its way out."""

    name: str
    devices: tuple[Device, ...]
    inside: Link
    network: Link | None = None  # None: there is only one node
    pairs: tuple[Pair, ...] = ()  # exceptions to `inside`, such as NVLink between some
    host_memory_bytes: int = 0
    cores: int = 0
    disk_rate: float = 0.0
    price_per_hour: float = 0.0  # of the whole node; 0: sum of its devices
    sources: dict[str, str] = field(default_factory=dict)  # where its own numbers are from


@dataclass(frozen=True)
class Curve:
    """Measured seconds of a collective (or of a message, `op="p2p"`) by bytes, for one number of ranks.

    Bytes are those of the whole tensor: the one that is reduced or broadcast, the one that all_gather ends with and
    the one that reduce_scatter starts with. Seconds run from the moment when the last rank arrives to the moment when
    the last one leaves.
    """

    op: str  # all_reduce, all_gather, reduce_scatter, broadcast, p2p …
    ranks: int
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    groups: int = 1  # that were at it at the same time, of as many ranks each, on one node


@dataclass(frozen=True)
class Slowdown:
    """How many times longer compute takes while this goes on on the same rank, and the other way round; 1: it does not
    notice.

    While communication goes on, compute advances at 1 / slowdown. And while one of its ranks computes, communication
    advances at 1 / slowed: on a CPU the threads that send, receive and add want cores, caches and memory, too. So
    communication that alone takes M seconds, beside compute that alone takes C and outlasts it, is over after
    S = M · slowed seconds, and the compute after C + S - S / slowdown.
    """

    send: float = 1.0
    receive: float = 1.0
    collective: float = 1.0
    copy: float = 1.0
    slowed_message: float = 1.0
    slowed_collective: float = 1.0
    slowed_copy: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Machines as the planner sees them."""

    name: str
    nodes: tuple[Node, ...]
    backend: str  # gloo, gloo-staged, nccl
    collectives: tuple[Curve, ...] = ()
    slowdown: Slowdown = Slowdown()
    # How much slower a device computes when so many devices of its node compute at once (shared memory bandwidth,
    # power): contention[k-1] for k busy devices; 1.0 beyond its end repeats the last.
    contention: tuple[float, ...] = ()
    # How much longer the host of a device takes to issue work when so many of a node do: cores, and a driver, that they
    # share. As above; nothing where the host is the device.
    hosts: tuple[float, ...] = ()
    dispatch_s: float = 0.0  # host time of the engine for one operation, beside the operation itself
    source: str = ""  # "catalogue", "probed 2026-11-15 …", a file
    notes: tuple[str, ...] = ()  # what the short name stood for, printed to the user
    # How far apart devices are that should be equally fast, while all of them compute: standard deviation over mean.
    spread: float = 0.0
    # `slowdown` is when all devices are at it. With two of them there may be cores to spare; None: it is not known.
    slowdown_of_two: Slowdown | None = None
    # Its nodes are network namespaces of one machine: what passes between them is theirs, and cores are in common.
    one_machine: bool = False

    @cached_property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """(node, device in node) of every rank."""
        return tuple((n, d) for n, node in enumerate(self.nodes) for d in range(len(node.devices)))

    @property
    def world(self) -> int:
        return len(self.ranks)

    @cached_property
    def known_sums(self) -> dict[Any, Any]:
        """By members and bytes, what `predict.collectives` has worked out."""
        return {}

    @cached_property
    def known_groups(self) -> dict[Any, Any]:
        """By members, how they lie on the nodes (`predict.nccl`)."""
        return {}

    @cached_property
    def known_messages(self) -> dict[Any, Any]:
        """By source, target and bytes, the same of messages."""
        return {}

    def slowdown_of(self, ranks: int) -> Slowdown:
        """The slow-downs when so many devices compute and communicate: by a straight line from two to all.

        >>> two, all_8 = Slowdown(slowed_collective=1.5), Slowdown(slowed_collective=3.0)
        >>> device, link = Device("cpu", 1, {}, 1.0), Link("", 0.0, 1.0)
        >>> cluster = Cluster("", (Node("", (device,) * 8, link),), "gloo", slowdown=all_8, slowdown_of_two=two)
        >>> [cluster.slowdown_of(ranks).slowed_collective for ranks in (1, 2, 4, 8)]
        [1.5, 1.5, 2.0, 3.0]
        """
        two = self.slowdown_of_two
        if two is None or self.world <= 2:
            return self.slowdown
        way = min(max((ranks - 2) / (self.world - 2), 0.0), 1.0)
        names = [field.name for field in fields(Slowdown)]
        ends = {name: (getattr(two, name), getattr(self.slowdown, name)) for name in names}
        return Slowdown(**{name: few + way * (all_of - few) for name, (few, all_of) in ends.items()})

    def device(self, rank: int) -> Device:
        node, local = self._place(rank)
        return self.nodes[node].devices[local]

    def node_of(self, rank: int) -> int:
        return self._place(rank)[0]

    def machine_of(self, rank: int) -> int:
        """Whose cores and memory a rank has a part of: its node's, as a rule."""
        return 0 if self.one_machine else self.node_of(rank)

    def link(self, a: int, b: int) -> Link:
        """The link that a message from rank a to rank b takes."""
        (node_a, local_a), (node_b, local_b) = self._place(a), self._place(b)
        if node_a != node_b:
            out, into = self.nodes[node_a].network, self.nodes[node_b].network
            if out is None or into is None:
                raise PlanError(
                    f"a message from rank {a} to rank {b}", "their nodes have no network", "network: eth100 for both"
                )
            return out if out.rate <= into.rate else into
        for pair in self.nodes[node_a].pairs:
            if {pair.a, pair.b} == {local_a, local_b}:
                return pair.link
        return self.nodes[node_a].inside

    @cached_property
    def kinds(self) -> dict[str, Device]:
        """The devices that differ in their names, in the order of ranks: few, where ranks are many."""
        return {device.name: device for node in self.nodes for device in node.devices}

    @cached_property
    def uniform(self) -> bool:
        """All nodes alike and all devices alike: replicas need to be simulated only once."""
        first = self.nodes[0]
        return all(node == first for node in self.nodes) and all(d == first.devices[0] for d in first.devices)

    def price_per_hour(self, ranks: int | None = None) -> float:
        """Price of the nodes that the first so many ranks sit on (a node is rented whole); 0: not known."""
        used = {node for node, _ in self.ranks[: self.world if ranks is None else ranks]}
        prices = [_price(self.nodes[node]) for node in used]
        return sum(prices) if all(prices) else 0.0

    def save(self, path: str | Path) -> None:
        files.write(path, "cluster", files.to_json(self))

    @staticmethod
    def load(path: str | Path) -> Cluster:
        where = f"cluster {path}"
        return checked(files.from_json(Cluster, files.read(path, "cluster"), where), where, files.made_by("cluster"))

    def _place(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < len(self.ranks):
            there = len(self.ranks)
            raise PlanError(f"rank {rank}", f"the cluster {self.name} has {there} devices", f"rank 0 to {there - 1}")
        return self.ranks[rank]


def _price(node: Node) -> float:
    devices = [device.price_per_hour for device in node.devices]
    return node.price_per_hour or (sum(devices) if all(devices) else 0.0)
