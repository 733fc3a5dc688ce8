"""Compute beside communication: how much of one the other costs.

Each round times compute alone, communication alone, and both at once, right after each other, so that drift of the
machine hits all three. `fit.slowdown` makes two numbers of them: how much slower compute is beside communication, and
communication beside compute. That depends on how many workers are at it: two of many leave cores to the threads that
send and add. So it is measured with two workers, and with all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainplan.cluster.probe.compute import Kernel, seconds
from trainplan.cluster.probe.messages import Wire
from trainplan.cluster.probe.team import Record, Round, Team
from trainplan.units import MIB

MESSAGE = 4 * MIB  # about the size of a gradient bucket or of an activation
COMPUTE_S = 0.08  # what compute takes alone, about
POLL_S = 2e-4
SHARE = 0.6  # communication alone takes so much of that, so that it mostly ends before compute when both are slowed

Start = Callable[[int], list[dist.Work]]  # starts so many messages


def prepare(team: Team, quick: bool) -> Round:
    """A round of this phase: collectives, messages, and on CUDA copies, each alone and beside compute; of all workers,
    and if there is time of two."""
    kernel = Kernel(team.device)
    compute_s = COMPUTE_S / 2 if quick else COMPUTE_S
    kernel()
    kernels = max(1, round(compute_s / team.agree(seconds(team, kernel, 3))))

    def compute() -> float:
        started = time.perf_counter()
        for _ in range(kernels):
            kernel()
        team.sync()
        return time.perf_counter() - started

    counts = {team.count} if quick else {2, team.count}
    kinds = [kind for count in sorted(counts) for kind in _kinds(team, count, compute_s)]

    def one_round(record: Record) -> None:
        for kind in kinds:
            at_it = team.rank < kind.workers
            team.barrier()
            alone = compute() if at_it else 0.0
            team.barrier()
            started = time.perf_counter()
            if at_it:
                _wait(team, kind.start(kind.many))
            communication = time.perf_counter() - started
            team.barrier()
            started = time.perf_counter()
            works = kind.start(kind.many) if at_it else []
            issue = time.perf_counter() - started
            watch = Watch(team, works)
            together = compute() if at_it else 0.0
            over = watch.over() - started
            team.barrier()
            alone = (alone + compute()) / 2 if at_it else 0.0  # before and after, so that steady drift cancels
            # Who has nobody to talk to computes with the others.
            if at_it and not (kind.name == "message" and team.rank == kind.workers - 1 and kind.workers % 2):
                sample = {"alone": alone, "communication": communication, "issue": issue}
                name = kind.name if kind.name != "message" else "receive" if team.rank % 2 else "send"
                record(f"overlap.{kind.workers}.{name}", sample | {"together": together, "over": over})

    return one_round


@dataclass(frozen=True)
class Talk:
    """Communication of the first so many workers, and how often it fits beside compute."""

    name: str
    workers: int
    start: Start
    many: int


def _kinds(team: Team, count: int, compute_s: float) -> list[Talk]:
    """What is measured with so many workers. All call this: they make groups."""
    starts: dict[str, Start] = {"collective": _collectives(team, count), "message": _messages(team, count)}
    if team.device.type == "cuda":
        starts["copy"] = _copies(team)
    found = []
    for name, start in starts.items():
        one = 0.0
        team.barrier()
        if team.rank < count:
            _wait(team, start(1))
        team.barrier()
        if team.rank < count:
            started = time.perf_counter()  # waiting takes no time of a core
            _wait(team, start(2))
            one = (time.perf_counter() - started) / 2
        one = team.longest(one)  # a sender may be done before anything has arrived
        found.append(Talk(name, count, start, min(200, max(2, math.ceil(SHARE * compute_s / one)))))
    return found


class Watch:
    """Notes when communication is over while this process computes.

    gloo cannot say whether it is, only wait for it; so a thread does, which takes no time of a core. NCCL can, and
    waiting would make the device's own stream wait.
    """

    def __init__(self, team: Team, works: list[dist.Work]) -> None:
        self.team, self.works, self.moment = team, works, 0.0
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def over(self) -> float:
        """When all of it was over."""
        self.thread.join()
        if self.team.backend == "nccl":
            _wait(self.team, self.works)
        return self.moment

    def _wait(self) -> None:
        if self.team.device.type == "cuda":
            torch.cuda.set_device(self.team.device)
        for work in reversed(self.works):  # those before the last one are over when it is, or soon after
            if self.team.backend == "nccl" and isinstance(work, dist.Work):
                while not work.is_completed():
                    time.sleep(POLL_S)
            else:
                work.wait()
        self.moment = time.perf_counter()


def _wait(team: Team, works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    team.sync()


def _collectives(team: Team, count: int) -> Start:
    """All-reduces of so many workers, as data parallelism has them during backward."""
    group = dist.new_group(list(range(count)), backend=team.backend) if count < team.count else None
    tensors = [torch.zeros(MESSAGE // 4, device=team.device) for _ in range(4)]

    def start(many: int) -> list[dist.Work]:
        return [_work(dist.all_reduce(tensors[i % len(tensors)], group=group, async_op=True)) for i in range(many)]

    return start


def _messages(team: Team, count: int) -> Start:
    """Every even one of so many workers sends to the next one, as neighbouring stages of a pipeline do."""
    wire = Wire(team, MESSAGE)
    alone = team.rank == count - 1 and count % 2 == 1

    def start(many: int) -> list[dist.Work]:
        if alone:
            return []
        if team.rank % 2 == 0:
            return [_work(wire.send(team.rank + 1, MESSAGE, tag=i)) for i in range(many)]
        return [_work(wire.receive(team.rank - 1, MESSAGE, tag=i)) for i in range(many)]

    return start


def _copies(team: Team) -> Start:
    """Copies from pinned host memory on a stream of their own, as offloading has them."""
    host = torch.zeros(MESSAGE // 4, pin_memory=True)
    target = torch.empty_like(host, device=team.device)
    stream = torch.cuda.Stream(team.device)

    class Copy:
        def wait(self) -> None:
            stream.synchronize()

    def start(many: int) -> list[dist.Work]:
        with torch.cuda.stream(stream):
            for _ in range(many):
                target.copy_(host, non_blocking=True)
        return [Copy()]  # type: ignore[list-item]

    return start


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this worker is not in the group that communicates")
    return work
