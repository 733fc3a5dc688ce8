"""Worker processes that are started once and reused: `pool(2).run(function, *args)` calls it on every rank.

A function runs as function(rank, world, *args) inside a gloo group of that many processes; the results come back in
rank order. If one raises, the pool is stopped and the first traceback is raised here.
"""

import atexit
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.multiprocessing as mp

_POOLS: dict[int, "Pool"] = {}
TIMEOUT = 120


def _work(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            pipe.send(("ok", function(rank, world, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """Processes of one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        context = mp.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="trainplan-test-")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, f"{folder}/store", theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))
        results, waiting = [None] * self.world, dict(zip(self.pipes, range(self.world), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT)
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in {TIMEOUT} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                kind, value = pipe.recv()
                if kind == "error":
                    self.stop()
                    raise RuntimeError(f"rank {rank} of {self.world}:\n{value}")
                results[rank] = value
        return results

    def stop(self) -> None:
        _POOLS.pop(self.world, None)
        for process in self.processes:
            process.kill()


def pool(world: int) -> Pool:
    """The processes for this world size, started if there are none."""
    if world not in _POOLS:
        _POOLS[world] = Pool(world)
    return _POOLS[world]


@atexit.register
def _stop_all() -> None:
    for found in list(_POOLS.values()):
        found.stop()
