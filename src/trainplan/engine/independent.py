"""Ranks that go on without each other: the workers of asynchronous servers, each a process that we start ourselves.

torchrun ends all ranks as soon as one has gone. Here, and only here, nobody needs a worker that dies: its servers see
that the connection is closed, apply nothing more of it, and go on with the others. Until a rank has joined all groups
the others do need it; and without a server, or without any worker, there is nothing to go on with. Then all are ended,
and it is said who died of what. Every wait is bounded: servers give up a worker of which they hear nothing for as long
as process groups wait (`world.TIMEOUT`), it is ended soon after they have, and whoever is through has ten minutes to
write down what it knows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch.distributed as dist

from trainplan.engine.asynchronous import LOST, load
from trainplan.engine.faults import how, of_ranks
from trainplan.engine.world import TIMEOUT, is_ready
from trainplan.errors import RunError
from trainplan.lasting import lasting
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief

_SOON = 30.0  # seconds that a worker which servers gave up may outlive them
_WRITING = 600.0  # seconds for the others to write what they recorded: of 100,000 steps, a minute or more
_LOOK = 0.05  # seconds between looks
HERE = "127.0.0.1"


def refuse(plan: Plan, nnodes: str, max_restarts: int) -> None:
    """Refused where more is asked for than one machine and one attempt."""
    asked = f"running {brief(plan)!r}"
    if nnodes != "1":
        why = f"asynchronous servers and their workers are started on one machine, and --nnodes is {nnodes}"
        raise RunError(asked, why, "exchange=ps-bsp, or leaving --nnodes out")
    if max_restarts:
        why = "a worker that dies is not started again: the others go on without it"
        raise RunError(asked, why, "leaving --max-restarts out")


def run_each(
    job: Path, plan: Plan, said: Path, environment: Mapping[str, str], show: bool = True, module: str = "trainplan.run"
) -> list[int]:
    """Run all ranks of a job until they are through; the workers that were lost on the way."""
    # The store is ours, so that no rank takes it with it.
    store = dist.TCPStore(
        HERE, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT.total_seconds())
    )
    run = uuid.uuid4().hex
    common = {
        **environment, "WORLD_SIZE": str(plan.world), "MASTER_ADDR": HERE, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": run,
    }  # fmt: skip
    with said.open("w") as log:
        ranks = [_start(job, rank, common, log, module) for rank in range(plan.world)]
        try:
            watch = _Watch(ranks, plan, said, lambda rank: is_ready(store, run, rank), _Shown(job.parent, show))
            return watch.through()
        finally:
            for process in ranks:
                _end(process)


def _start(job: Path, rank: int, common: Mapping[str, str], log: IO[str], module: str) -> subprocess.Popen[bytes]:
    own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-m", module, str(job)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own, start_new_session=True)


@dataclass
class _Watch:
    """Sees ranks end, and knows who can do without whom."""

    ranks: list[subprocess.Popen[bytes]]
    plan: Plan
    said: Path
    has_joined: Callable[[int], bool]
    shown: _Shown
    lost: list[int] = field(default_factory=list)
    over: float = 0.0  # when all workers, or all servers, had ended; 0: they have not

    def through(self) -> list[int]:
        """Wait for all; the workers that were lost."""
        while True:
            ended = {rank: code for rank, process in enumerate(self.ranks) if (code := process.poll()) is not None}
            self.shown.go_on(self.lost)
            self._fail({rank: code for rank, code in ended.items() if code})
            if len(ended) == self.plan.world:
                return self.lost
            self._hurry(set(range(self.plan.world)) - ended.keys())
            time.sleep(_LOOK)

    @property
    def _folder(self) -> Path:
        return self.said.parent

    def _fail(self, codes: dict[int, int]) -> None:
        """Raise where ranks have failed without which the others cannot go on; else note which workers have."""
        workers = self.plan.workers
        starting = {rank: code for rank, code in codes.items() if not self.has_joined(rank)}
        servers = {rank: code for rank, code in codes.items() if rank >= workers}
        if starting:
            raise self._failure(starting, "before all ranks had met")
        if servers:
            raise self._failure(servers, "and workers cannot go on without a server")
        if len(codes) == workers:
            raise self._failure(codes, "and no worker is left")
        for rank in codes.keys() - self.lost:
            self.lost = sorted([*self.lost, rank])
            log = self._folder / f"rank-{rank}.log"
            print(f"worker {rank} was lost: it {how(codes[rank])}; its log is {log}, and the others go on", flush=True)

    def _failure(self, codes: dict[int, int], when: str) -> RunError:
        instead = "a plan that needs less memory, if that was short; or exchange=ps-bsp with --max-restarts 1"
        return of_ranks(codes, when, f"running {brief(self.plan)!r}", instead, self.said)

    def _hurry(self, here: set[int]) -> None:
        """Nobody waits without end for those that are still here when the others are through."""
        workers = {rank for rank in here if rank < self.plan.workers}
        if workers and workers != here:
            return
        self.over = self.over or time.monotonic()
        late = time.monotonic() - self.over
        if workers and late > _SOON:
            for rank in workers & self._given_up:
                print(f"worker {rank} is ended: its servers have given it up, and it is still there", flush=True)
                _end(self.ranks[rank])
        if late > _WRITING:
            why = f"ranks {sorted(here)} have not ended {_WRITING:g} s after the others"
            raise RunError(f"running {brief(self.plan)!r}", why, f"a look at {self.said}")

    @lasting
    def _given_up(self) -> set[int]:
        """The workers of which servers, all of which have ended, have heard nothing for too long."""
        records = [load(self._folder / f"arrivals-{server}.json") for server in range(self.plan.servers)]
        return {entry.left for record in records for entry in record if entry.number == LOST}


class _Shown:
    """Prints what the first worker that is there writes into its log."""

    def __init__(self, folder: Path, show: bool) -> None:
        self._folder, self._show, self._rank, self._place = folder, show, 0, 0

    def go_on(self, lost: Collection[int]) -> None:
        """Print what has come since; when the worker was lost, that of the next one, from its last line on."""
        if not self._show:
            return
        self._print()
        while self._rank in lost:
            self._rank += 1
            said = self._log.read_bytes() if self._log.exists() else b""
            self._place = said.rstrip().rfind(b"\n") + 1

    @property
    def _log(self) -> Path:
        return self._folder / f"rank-{self._rank}.log"

    def _print(self) -> None:
        if self._log.exists():
            with self._log.open() as log:
                log.seek(self._place)
                print(log.read(), end="", flush=True)
                self._place = log.tell()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
