"""Messages between two workers, and collectives of several, over sizes.

Where a team is large enough for several groups, collectives are measured twice: in one group while the others are idle,
and in all of them at once, as groups that share out each other's replicas will be at it (`zero=3 shard=2` on four).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist

from trainplan.cluster.probe import shares
from trainplan.cluster.probe.parts import Parts
from trainplan.cluster.probe.staging import Staging
from trainplan.cluster.probe.team import Record, Round, Team, levels
from trainplan.units import KIB, MIB

SIZES = (1, 256, 4 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
QUICK_SIZES = (1, 4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB, 32 * MIB)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SHARED_OUT = ("all_gather", "reduce_scatter")
IN_FLIGHT = ("all_reduces", *SHARED_OUT)  # measured while others are on their way where copies overlap with messages
BESIDE = ("all_reduce", *SHARED_OUT)  # what several groups do at once
SMALL = 64 * KIB  # up to this size a message is repeated within a round: it is short, and its time jumps about
REPEATS = 4
AT_ONCE = 4  # so many of them


def pairs(count: int) -> list[tuple[int, int]]:
    """The pairs to measure: all when they are few, else neighbours and the most distant.

    >>> pairs(3)
    [(0, 1), (0, 2), (1, 2)]
    >>> len(pairs(16))
    16
    """
    if count <= 4:
        return list(combinations(range(count), 2))
    return [(rank, rank + 1) for rank in range(count - 1)] + [(0, count - 1)]


def prepare(team: Team, quick: bool) -> Round:
    """A round of this phase: every pair and every collective, at every size, once."""
    sizes = QUICK_SIZES if quick else SIZES
    wire = Wire(team, sizes[-1])
    groups: dict[int, list[dist.ProcessGroup | None]] = {}
    for count in levels(team.count)[1:]:
        # Every worker takes part in making every group, also of those that it is not in.
        starts = range(0, team.count - count + 1, count)
        groups[count] = [dist.new_group(list(range(s, s + count)), backend=team.backend) for s in starts]
    room = tuple(torch.zeros(sizes[-1] // 4 + team.count, device=team.device) for _ in range(2))
    staging = Staging(team.device) if team.staged else None
    parts = Parts(team) if team.backend == "gloo" else None

    def collective(op: str, size: int, count: int, group: dist.ProcessGroup, record: Record, at_once: str = "") -> None:
        call, total = _collective(op, size, count, room, group, staging)
        many = AT_ONCE if staging is not None and op in IN_FLIGHT else 1
        for _ in range(REPEATS if size <= SMALL else 1):
            team.barrier() if at_once else dist.barrier(group=group)
            team.sync()
            started = time.perf_counter()
            call()
            team.sync()
            # Both moments, on the clock that all processes of a machine share: the collective lasts from the last
            # arrival to the last departure, which only all samples together tell.
            lasted = time.perf_counter() - started
            record(f"{op}.{count}.{total}{at_once}", (started, started + lasted / many))

    def one_round(record: Record) -> None:
        for a, b in pairs(team.count):
            for size in sizes:
                team.barrier()
                if team.rank in (a, b):
                    for _ in range(REPEATS if size <= SMALL else 1):
                        wire.ping(a, b, size, record)
        for count, (first, *_) in groups.items():
            if team.rank < count and first is not None:
                for op in OPS if staging is None else (*OPS, "all_reduces"):
                    for size in sizes:
                        collective(op, size, count, first, record)
                if parts is not None:
                    parts.measure(count, first, record)
        for count, several in groups.items():
            if len(several) == 1:
                continue
            ours = team.rank // count
            for op in BESIDE:
                for size in (size for size in sizes if size > SMALL):
                    if ours < len(several) and (group := several[ours]) is not None:
                        collective(op, size, count, group, record, at_once=f".{len(several)}")
                    else:
                        team.barrier()

    return one_round


class Wire:
    """Tagged messages as the engine sends them: from memory that the backend can read."""

    def __init__(self, team: Team, most: int) -> None:
        self.team = team
        self.tensor = torch.zeros(most, dtype=torch.uint8, device=team.device)
        self.host = torch.zeros(most, dtype=torch.uint8, pin_memory=True) if team.staged else self.tensor

    def send(self, to: int, size: int, tag: int) -> dist.Work | None:
        if self.team.staged:
            self.host[:size].copy_(self.tensor[:size], non_blocking=True)
            self.team.sync()
        return dist.isend(self.host[:size], to, tag=tag)

    def receive(self, source: int, size: int, tag: int) -> dist.Work | None:
        return dist.irecv(self.host[:size], source, tag=tag)

    def arrived(self, work: dist.Work | None, size: int) -> None:
        if work is not None:
            work.wait()
        if self.team.staged:
            self.tensor[:size].copy_(self.host[:size], non_blocking=True)
        self.team.sync()

    def ping(self, a: int, b: int, size: int, record: Record) -> None:
        """There and back: half of it is one way. The host's part is its own processor time for the two messages."""
        first = self.team.rank == a
        other = b if first else a
        started, busy = time.perf_counter(), time.thread_time()
        if first:
            sent = self.send(other, size, tag=1)
            self.arrived(self.receive(other, size, tag=2), size)
        else:
            self.arrived(self.receive(other, size, tag=1), size)
            sent = self.send(other, size, tag=2)
        if sent is not None:
            sent.wait()
        self.team.sync()
        if first:
            record(f"p2p.{a}.{b}.{size}", (time.perf_counter() - started) / 2)
        if size == 1:
            record("message", (time.thread_time() - busy) / 2)


def _collective(
    op: str, size: int, count: int, room: tuple[torch.Tensor, ...], group: dist.ProcessGroup, staging: Staging | None
) -> tuple[Callable[[], object], int]:
    """The call, and the bytes of its whole tensor: `size`, or the next multiple that can be dealt out."""
    floats, more = room
    part = max(1, round(size / 4 / count))
    whole = part * count
    if op == "all_reduce":
        tensor = floats[: max(1, size // 4)]
        return lambda: dist.all_reduce(tensor, group=group), tensor.numel() * 4
    if op == "all_reduces":
        tensor = floats[: max(1, size // 4)]
        return lambda: _several(tensor, group), tensor.numel() * 4
    if op == "broadcast":
        tensor = floats[: max(1, size // 4)]
        return lambda: dist.broadcast(tensor, src=0, group=group), tensor.numel() * 4
    if staging is not None:
        return _staged(op, floats[:whole], more[:part], group, staging), whole * 4
    if dist.get_backend(group) == "gloo":  # as the engine does it
        return _by_messages(op, floats[:whole], more[:part], group), whole * 4
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(floats[:whole], more[:part], group=group), whole * 4
    return lambda: dist.reduce_scatter_tensor(more[:part], floats[:whole], group=group), whole * 4


def _several(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums on their way together. What they sum is the same zeros, so that it does not matter who writes when."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(AT_ONCE)]:
        work.wait()


def _by_messages(op: str, whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Everybody's share to everybody, or of everybody's tensor the sum of one share each."""

    def gather() -> None:
        for work in shares.gather(whole, own, group):
            work.wait()

    def scatter() -> None:
        works, mine, received = shares.scatter(whole, group)
        for work in works:
            work.wait()
        _add_up(own, mine, received)

    return gather if op == "all_gather" else scatter


def _staged(
    op: str, whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, staging: Staging
) -> Callable[[], object]:
    """The same of a GPU's memory, several at once."""

    def gather() -> None:
        for over in [staging.gather(whole, own, group) for _ in range(AT_ONCE)]:
            over.result()

    def scatter() -> None:
        for over, mine, received in [staging.scatter(whole, group) for _ in range(AT_ONCE)]:
            over.result()
            _add_up(own, mine, received)

    return gather if op == "all_gather" else scatter


def _add_up(own: torch.Tensor, mine: torch.Tensor, received: torch.Tensor) -> None:
    own.copy_(mine)
    for share in received:
        own.add_(share)
