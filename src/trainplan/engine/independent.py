"""Ranks that go on without each other: the workers of asynchronous servers, each a process that we start ourselves.

torchrun ends all ranks as soon as one has gone. Here, and only here, nobody needs a worker that dies: its servers see
that the connection is closed, apply nothing more of it, and go on with the others. Without a server, or without any
worker, there is nothing to go on with, and all are ended. Every wait is bounded: ranks wait for each other as long
as process groups do (`world.TIMEOUT`), and servers are ended if they do not end soon after their last worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch.distributed as dist

from trainplan.engine.faults import failure
from trainplan.engine.world import TIMEOUT
from trainplan.errors import RunError
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief

_SOON = 30.0  # seconds for servers to end after the last worker
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
    common = {
        **environment, "WORLD_SIZE": str(plan.world), "MASTER_ADDR": HERE, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }  # fmt: skip
    with said.open("w") as log:
        ranks = [_start(job, rank, common, log, module) for rank in range(plan.world)]
        try:
            lost = _watch(ranks, plan, job.parent, said, job.parent / "rank-0.log" if show else None)
        finally:
            for process in ranks:
                _end(process)
    for rank in lost:
        code = ranks[rank].returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        print(f"worker {rank} was lost ({how}); the others went on without it", flush=True)
    return lost


def _start(job: Path, rank: int, common: Mapping[str, str], log: IO[str], module: str) -> subprocess.Popen[bytes]:
    own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-m", module, str(job)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own, start_new_session=True)


def _watch(ranks: list[subprocess.Popen[bytes]], plan: Plan, folder: Path, said: Path, shown: Path | None) -> list[int]:
    """Wait for all; what rank 0 writes into its log is printed."""
    workers, servers = ranks[: plan.workers], ranks[plan.workers :]
    asked, place, last = f"running {brief(plan)!r}", 0, 0.0
    while any(process.poll() is None for process in ranks):
        place = _print(shown, place)
        gone = [process for process in servers if process.returncode]
        if gone or all(process.returncode for process in workers):
            raise failure(folder, asked, (gone or workers)[0].returncode, said)
        if all(process.returncode is not None for process in workers):
            last = last or time.monotonic()
            if time.monotonic() - last > _SOON:
                why = f"servers have not ended {_SOON:g} s after their last worker"
                raise RunError(asked, why, f"a look at {said}")
        time.sleep(_LOOK)
    _print(shown, place)
    if any(process.returncode for process in servers) or all(process.returncode for process in workers):
        raise failure(folder, asked, max(abs(process.returncode) for process in ranks), said)
    return [rank for rank, process in enumerate(workers) if process.returncode]


def _print(shown: Path | None, place: int) -> int:
    """Print what was added to a file since a place in it; the new place."""
    if shown is None or not shown.exists():
        return place
    with shown.open() as log:
        log.seek(place)
        print(log.read(), end="", flush=True)
        return log.tell()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
