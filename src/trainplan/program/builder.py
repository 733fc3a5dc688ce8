"""Programs by hand, for tests and for the literal programs of papers. Lowering does the same with arrays.

>>> from trainplan.program.ops import Value
>>> build = Builder(world=2)
>>> build.op(0, "0F0", makes={"h": (Value.BOUNDARY, 100)})
0
>>> build.op(0, "0SEND_F0", to=1, reads=["h"], makes={"h→1": (Value.MESSAGE, 100)}, frees=["h"])
1
>>> build.op(1, "1RECV_F0", to=0, reads=["h→1"], makes={"h on 1": (Value.BOUNDARY, 100)}, frees=["h→1"])
2
>>> build.op(1, "1F0", reads=["h on 1"], frees=["h on 1"])
3
>>> build.program().rank_list(1)
['1RECV_F0', '1F0']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainplan.errors import ProgramError
from trainplan.program.ops import RECEIVES, SPECS, Lane, Value
from trainplan.program.policies import Policy
from trainplan.program.program import CostClass, Program, Ragged
from trainplan.program.text import Key, parse


class Builder:
    """Collects operations in the order in which each rank issues them."""

    def __init__(self, world: int, steps: int = 1, staleness: int = 0, title: str = "") -> None:
        self.world, self.steps, self.staleness, self.title = world, steps, staleness, title
        self.keys: list[Key] = []
        self.ranks: list[tuple[int, ...]] = []
        self.peers: list[int] = []
        self.bytes: list[int] = []
        self.versions: list[int] = []
        self.waits: list[bool] = []
        self.priorities: list[int] = []
        self.reads: list[list[int]] = []
        self.lists: list[list[int]] = [[] for _ in range(world)]
        self.values: dict[str, int] = {}
        self.value_kind: list[Value] = []
        self.value_bytes: list[int] = []
        self.value_rank: list[int] = []
        self.value_maker: list[int] = []
        self.value_end: list[int] = []
        self.policies = [Policy.LIST] * world
        self.groups: list[tuple[int, ...]] = []

    def value(self, rank: int, name: str, kind: Value, size: int) -> None:
        """A value that is there before the program starts."""
        self._new_value(name, kind, size, rank, maker=-1)

    def policy(self, rank: int, policy: Policy) -> None:
        """Let a rank decide its order while running."""
        self.policies[rank] = policy

    def op(
        self,
        rank: int | Sequence[int],
        text: str,
        reads: Sequence[str] = (),
        makes: Mapping[str, tuple[Value, int]] | None = None,
        frees: Sequence[str] = (),
        to: int = -1,
        version: int | None = None,
        waits: bool | None = None,
        priority: int = 0,
    ) -> int:
        """Append an operation to the list of its rank (or of all its members); its number.

        `to` is the rank at the other end of a message. Compute and receiving hold the host, unless said otherwise.
        A value made by a collective gets the name given here once for each member, as name@rank.
        """
        key, number = parse(text), len(self.keys)
        members = (rank,) if isinstance(rank, int) else tuple(rank)
        spec = SPECS[key.kind]
        size = 0
        for name, (kind, value_bytes) in (makes or {}).items():
            size = max(size, value_bytes)
            for member in members:
                where = -1 if kind is Value.MESSAGE else member
                self._new_value(name if len(members) == 1 else f"{name}@{member}", kind, value_bytes, where, number)
        self.keys.append(key)
        self.ranks.append(members)
        self.peers.append(to)
        self.bytes.append(size if spec.message or spec.collective else 0)
        self.versions.append(key.step if version is None else version)
        self.waits.append(spec.lane is Lane.COMPUTE or key.kind in RECEIVES if waits is None else waits)
        self.priorities.append(priority)
        self.reads.append([self._find(name, text) for name in reads])
        for name in frees:
            self.value_end[self._find(name, text)] = number
        for member in members:
            self.lists[member].append(number)
        return number

    def program(self) -> Program:
        """The columns. The cost class of an operation is its kind on its rank, one class each."""
        resources: dict[tuple[Lane, int, int], int] = {}
        classes: dict[CostClass, int] = {}
        holds, cost, group = [], [], []
        for key, ranks, peer, size in zip(self.keys, self.ranks, self.peers, self.bytes, strict=True):
            spec = SPECS[key.kind]
            if spec.collective:
                number = self.groups.index(ranks) if ranks in self.groups else len(self.groups)
                if number == len(self.groups):
                    self.groups.append(ranks)
                needs = [(Lane.GROUP, rank, number) for rank in ranks]
            else:
                number = -1
                needs = [] if key.kind in RECEIVES else [(spec.lane, ranks[0], peer if spec.message else -1)]
            group.append(number)
            holds.append([resources.setdefault(need, len(resources)) for need in needs])
            row = CostClass(key.kind, ranks[0], peer, bytes=size, members=ranks if spec.collective else ())
            cost.append(classes.setdefault(row, len(classes)))

        def column(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array(values, dtype=np.int64)

        keys = self.keys
        return Program(
            world=self.world, steps=self.steps,
            kind=np.array([k.kind for k in keys], dtype=np.uint8),
            job=column([k.job for k in keys]), step=column([k.step for k in keys]),
            pipeline=column([k.pipeline for k in keys]), stage=column([k.stage for k in keys]),
            unit=column([k.unit for k in keys]), micro_batch=column([k.micro_batch for k in keys]),
            slice=column([k.slice for k in keys]), peer_stage=column([k.peer for k in keys]),
            rank=column([r[0] for r in self.ranks]), peer=column(self.peers), bytes=column(self.bytes),
            group=column(group), version=column(self.versions), cost=column(cost),
            waits=np.array(self.waits, dtype=bool),
            lists=Ragged.of(self.lists), holds=Ragged.of(holds), reads=Ragged.of(self.reads),
            resource_lane=np.array([lane for lane, _, _ in resources], dtype=np.uint8),
            resource_rank=column([rank for _, rank, _ in resources]),
            resource_peer=column([peer for _, _, peer in resources]),
            value_kind=np.array(self.value_kind, dtype=np.uint8), value_bytes=column(self.value_bytes),
            value_rank=column(self.value_rank), value_maker=column(self.value_maker), value_end=column(self.value_end),
            value_late=np.zeros(len(self.value_kind), bool), value_early=np.zeros(len(self.value_kind), bool),
            classes=tuple(classes), groups=tuple(self.groups), policy=tuple(int(p) for p in self.policies),
            priority=column(self.priorities), staleness=self.staleness, title=self.title,
        )  # fmt: skip

    def _new_value(self, name: str, kind: Value, size: int, rank: int, maker: int) -> None:
        if name in self.values:
            raise ProgramError(f"value {name!r}", "it is made twice; a value is made once", "another name")
        self.values[name] = len(self.value_kind)
        self.value_kind.append(kind)
        self.value_bytes.append(size)
        self.value_rank.append(rank)
        self.value_maker.append(maker)
        self.value_end.append(-1)

    def _find(self, name: str, op: str) -> int:
        if name not in self.values:
            raise ProgramError(f"{op} reads {name!r}", "no operation before it makes that")
        return self.values[name]
