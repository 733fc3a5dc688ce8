"""Compute beside communication: how much of one the other costs.

Each round times compute alone, communication alone, and both at once, right after each other, so that drift of the
machine hits all three. `fit.slowdown` makes two numbers of them: how much slower compute is beside communication, and
communication beside compute.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainplan.cluster.probe.compute import Kernel, seconds
from trainplan.cluster.probe.messages import Wire
from trainplan.cluster.probe.team import Record, Round, Team
from trainplan.units import MIB

MESSAGE = 4 * MIB  # about the size of a gradient bucket or of an activation
COMPUTE_S = 0.12  # what compute takes alone, about
POLL_S = 2e-4
SHARE = 0.6  # communication alone takes so much of that, so that it mostly ends before compute when both are slowed

Start = Callable[[int], list[dist.Work]]  # starts so many messages


def prepare(team: Team, quick: bool) -> Round:
    """A round of this phase: collectives, messages, and on CUDA copies, each alone and beside compute."""
    kernel = Kernel(team.device)
    compute_s = COMPUTE_S / 2 if quick else COMPUTE_S
    kernel()
    kernels = max(1, round(compute_s / team.agree(seconds(team, kernel, 3))))
    kinds: dict[str, Start] = {"collective": _collectives(team), "message": _messages(team)}
    if team.device.type == "cuda":
        kinds["copy"] = _copies(team)
    many = {}
    for kind, start in kinds.items():
        team.barrier()
        _wait(team, start(1))
        team.barrier()
        started = time.perf_counter()  # waiting takes no time of a core
        _wait(team, start(2))
        one = team.longest((time.perf_counter() - started) / 2)  # a sender may be done before anything has arrived
        many[kind] = min(200, max(2, math.ceil(SHARE * compute_s / one)))

    def compute() -> float:
        started = time.perf_counter()
        for _ in range(kernels):
            kernel()
        team.sync()
        return time.perf_counter() - started

    def one_round(record: Record) -> None:
        for kind, start in kinds.items():
            team.barrier()
            alone = compute()
            team.barrier()
            started = time.perf_counter()
            works = start(many[kind])
            _wait(team, works)
            communication = time.perf_counter() - started
            team.barrier()
            started = time.perf_counter()
            works = start(many[kind])
            issue = time.perf_counter() - started
            watch = Watch(team, works)
            together = compute()
            over = watch.over() - started
            team.barrier()
            alone = (alone + compute()) / 2  # before and after, so that steady drift cancels
            sample = {"alone": alone, "communication": communication, "issue": issue}
            name = kind
            if kind == "message":
                name = "send" if team.rank % 2 == 0 else "receive"
                if team.rank == team.count - 1 and team.count % 2:
                    continue  # the odd one out computes with the others and has nobody to talk to
            record(f"overlap.{name}", sample | {"together": together, "over": over})

    return one_round


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


def _collectives(team: Team) -> Start:
    """All-reduces of all workers, as data parallelism has them during backward."""
    tensors = [torch.zeros(MESSAGE // 4, device=team.device) for _ in range(4)]

    def start(many: int) -> list[dist.Work]:
        return [_work(dist.all_reduce(tensors[i % len(tensors)], async_op=True)) for i in range(many)]

    return start


def _messages(team: Team) -> Start:
    """Every even worker sends to the next one, as neighbouring stages of a pipeline do."""
    wire = Wire(team, MESSAGE)
    alone = team.rank == team.count - 1 and team.count % 2 == 1

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
