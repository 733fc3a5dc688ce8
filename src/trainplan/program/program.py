"""A program: for every rank, ordered operations on values in memory.

Everything that is predicted and everything that is run is one of these. It is kept as columns (one array a field),
because a search plays thousands of programs of 10⁵ operations; an `Op` is a view of one row.

* An **operation** has a key (what it is), the ranks that take part, and the resources that it holds while it runs.
* Each rank has a **list**: the order in which its host issues operations. An operation with `waits` keeps the host
  until it is over (all compute on a CPU, receiving over gloo); the others run on while the host goes ahead. Where
  `hosts_attend`, a host also waits for the collectives whose results an operation computes with, before it issues it.
* A **value** is made by one operation, read by others and freed by one: that is all there is to dependencies and to
  memory. An operation starts when its reads are made, its resources are free, and its list has come to it. What is
  there before the program starts (weights, optimizer state) has no maker; what stays has no end.
* A collective is one operation in the lists of all its members.
* A **cost class** says what an operation is for the purpose of its duration, so that seconds are worked out once a
  class and not once an operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainplan.lasting import lasting
from trainplan.profile.profile import Amount
from trainplan.program.ops import SENDS, Kind, Lane, Value
from trainplan.program.text import Key, name

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def are(kinds: Sequence[Kind]) -> Bools:
    """Kind → whether it is one of these: a table, by which a column of kinds is looked up.

    >>> are((Kind.B, Kind.W))[np.array([Kind.F, Kind.W])].tolist()
    [False, True]
    """
    return np.isin(np.arange(len(Kind)), kinds)


def nonzero(mask: Bools) -> Ints:
    """Where a column is true: as `np.flatnonzero`, whose detours take longer than what it does for a small program.

    >>> nonzero(np.array([False, True, True])).tolist()
    [1, 2]
    """
    return mask.nonzero()[0]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is items[start[i]:start[i + 1]]."""

    start: Ints
    items: Ints

    def row(self, i: int) -> Ints:
        return self.items[self.start[i] : self.start[i + 1]]

    def __len__(self) -> int:
        return len(self.start) - 1

    @lasting
    def owner(self) -> Ints:
        """For every item, the row it is in."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.start))

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        """
        >>> Ragged.of([[3, 1], [], [2]]).start.tolist()
        [0, 2, 2, 3]
        """
        start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=start[1:])
        return Ragged(start, np.array([item for row in rows for item in row], dtype=np.int64))


class Inside(NamedTuple):
    """Collectives inside a pass, of the ranks that share its blocks: part of the operation, and communication."""

    what: str  # all_reduce, reduce_scatter, all_gather
    bytes: int  # of the whole tensor
    times: int
    hidden: bool = False  # beside arithmetic that does not need it


class CostClass(NamedTuple):
    """What decides how long an operation takes."""

    kind: Kind
    rank: int  # on whose device, or who sends: ranks of the cluster
    peer: int = -1  # who receives
    first: int = 0  # blocks first ≤ b < last
    last: int = 0
    samples: Amount = 0  # or a slice of some
    bytes: int = 0
    members: tuple[int, ...] = ()  # of a collective: ranks of the cluster, also those that are not simulated
    # Of a backward pass that was cut where gradient buckets become ready: the share of its time, from … to.
    since: float = 0.0
    until: float = 1.0
    # Of a backward pass, how many times it goes over the gradients: to add to those that are there already, and to put
    # them into buckets. Of a step, 1: it empties buckets.
    accumulate: int = 0
    tensors: int = 1  # of a message: how many tensors it carries; of a sum: how many gradients are put together for it
    # Of a collective: who sums, a backend or an algorithm of `program/exchanges`; bytes of an element; ranks of a node.
    by: str = ""
    element: int = 4
    node: int = 0
    summed: int = 0  # of a step: how many workers' gradients are added to those of the first
    seconds: float = 0.0  # that were asked for: of a cycle
    background: bool = False  # of a sum: a thread of its own takes care of it, and not the host
    sharing: tuple[int, ...] = ()  # of a pass: the ranks of the cluster that share its blocks
    inside: tuple[Inside, ...] = ()  # what these exchange meanwhile
    started: bool = False  # of a section of a pass: an earlier one of the same call has had the host start it
    apart: bool = False  # of a step: this block's alone, in between passes


@dataclass(frozen=True)
class Op:
    """One row of a program, for people."""

    id: int
    key: Key
    ranks: tuple[int, ...]
    bytes: int
    waits: bool

    def __str__(self) -> str:
        return name(self.key)


@dataclass(frozen=True)
class Program:
    """The operations of some steps of training. Made by `program.lower`, or by hand with `program.builder`."""

    world: int
    steps: int
    # -- operations, one entry each
    kind: NDArray[np.uint8]
    job: Ints
    step: Ints
    pipeline: Ints
    stage: Ints
    unit: Ints
    micro_batch: Ints
    slice: Ints
    peer_stage: Ints  # other stage of a message, -1
    rank: Ints  # the rank that runs it; of a collective the first member
    peer: Ints  # the rank at the other end of a message, -1
    bytes: Ints  # payload of a message or collective
    group: Ints  # of a collective, -1
    version: Ints  # of the weights that a compute operation reads: how many updates they have seen
    cost: Ints  # index into `classes`
    waits: Bools
    # -- lists, resources, values
    lists: Ragged  # rank → operations in issue order
    holds: Ragged  # operation → resources
    reads: Ragged  # operation → values
    resource_lane: NDArray[np.uint8]
    resource_rank: Ints
    resource_peer: Ints  # other rank of a link (-1: all of them), group of a queue, -1
    value_kind: NDArray[np.uint8]
    value_bytes: Ints
    value_rank: Ints  # where it is; -1: in flight
    value_maker: Ints  # -1: there from the start
    value_end: Ints  # the operation that frees it when it ends; -1: stays
    # A long operation makes and frees values on its way, and they need not all be there at its worst moment. A late
    # value counts only from the end of its maker on, an early one only until the operation that frees it starts.
    value_late: Bools
    value_early: Bools
    # -- tables
    classes: tuple[CostClass, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    # How each rank decides what is next: 0 by its list, otherwise a `policies.Policy` among what is ready.
    policy: tuple[int, ...] = ()
    priority: Ints | None = None  # of operations, for policies that ask; lower goes first
    staleness: int = 0  # updates that the weights of a step may lack at most
    replicas: int = 1  # how many ranks each rank here stands for, where replicas are alike and are simulated once
    title: str = ""
    # Of asynchronous servers: how far a worker may be ahead, at least and at most, and go on (`staleness.py`).
    bound: tuple[int, int] | None = None
    slicers: int = 1  # how many ranks each rank here stands for, where they share stages and do the same at once
    hosts_attend: bool = False  # whether it is hosts, and not devices, that wait for collectives

    def __len__(self) -> int:
        return len(self.kind)

    def key(self, i: int | np.integer) -> Key:
        """What an operation is."""
        return Key(
            Kind(int(self.kind[i])), int(self.stage[i]), int(self.micro_batch[i]), int(self.unit[i]),
            int(self.slice[i]), int(self.pipeline[i]), int(self.step[i]), int(self.job[i]), int(self.peer_stage[i]),
        )  # fmt: skip

    def op(self, i: int) -> Op:
        return Op(int(i), self.key(i), self.members(i), int(self.bytes[i]), bool(self.waits[i]))

    def name(self, i: int | np.integer) -> str:
        return name(self.key(i))

    def ops(self) -> Iterator[Op]:
        return (self.op(i) for i in range(len(self)))

    def rank_list(self, rank: int) -> list[str]:
        """The names of a rank's operations, in order."""
        return [self.name(i) for i in self.lists.row(rank)]

    def resource_name(self, r: int) -> str:
        lane, rank, peer = Lane(int(self.resource_lane[r])), int(self.resource_rank[r]), int(self.resource_peer[r])
        if lane is Lane.LINK:
            return f"link {rank}→{peer}" if peer >= 0 else f"links of {rank}"
        return f"{lane.name.lower().replace('_', ' ')} {rank}" + (f" group {peer}" if lane is Lane.GROUP else "")

    @property
    def links(self) -> list[tuple[int, int]]:
        """The pairs of ranks (from, to) between which something is sent."""
        sends = are(SENDS)[self.kind]
        pairs = np.unique(self.rank[sends] * self.world + self.peer[sends]).tolist()
        return [divmod(pair, self.world) for pair in pairs]

    @lasting
    def frees(self) -> Ragged:
        """Operation → values that it frees."""
        return _invert(self.value_end, len(self))

    @lasting
    def makes(self) -> Ragged:
        """Operation → values that it makes."""
        return _invert(self.value_maker, len(self))

    @lasting
    def initial(self) -> Ints:
        """Values that are there before the program starts."""
        return np.flatnonzero(self.value_maker < 0)

    def members(self, i: int) -> tuple[int, ...]:
        """The ranks in whose lists an operation stands."""
        group = int(self.group[i])
        return self.groups[group] if group >= 0 else (int(self.rank[i]),)

    def bytes_at_start(self, rank: int, kind: Value | None = None) -> int:
        """Bytes on a rank before the first operation, of one kind or of all."""
        here = self.initial[self.value_rank[self.initial] == rank]
        if kind is not None:
            here = here[self.value_kind[here] == kind]
        return int(self.value_bytes[here].sum())


def _invert(op_of_value: Ints, ops: int) -> Ragged:
    values = np.flatnonzero(op_of_value >= 0)
    owners = op_of_value[values]
    order = np.argsort(owners, kind="stable")
    start = np.zeros(ops + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners, minlength=ops), out=start[1:])
    return Ragged(start, values[order])
