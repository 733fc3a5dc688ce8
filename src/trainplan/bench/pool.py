"""Worker processes that are started once and reused: `pool(2).run(function, *args)` calls it on every rank.

A function runs as function(rank, world, *args) inside a gloo group of that many processes, each with one thread; the
results come back in rank order. If one raises, the pool is stopped and the first traceback is raised here. Starting
Python and torch takes seconds, so whoever measures many plans, or tests them, keeps the processes; and where there is
no GPU, they are forked from one that has imported what they need. (A GPU cannot be used after a fork if anything has
touched it before, which an import might.)
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from trainplan.cluster.probe.launch import Place
from trainplan.errors import RunError
from trainplan.profile.machine import keep_memory

_POOLS: dict[int, Pool] = {}
_PLACES: list[Place] = []  # where processes are started; none: here
_IMPORTED = ["trainplan.engine.worker", "torch.distributed.pipelining", "torch.export._trace", "torch._dynamo"]
TIMEOUT = 300.0  # seconds without an answer after which the processes are given up


def _work(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_memory()
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    gc.freeze()  # what was imported stays: to visit it again and again would disturb what is measured
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            pipe.send_bytes(_by_value(("ok", function(rank, world, *args))))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class _ByValue(pickle.Pickler):
    """Tensors go with the rest. Torch's own way, by shared memory, takes a file and a socket of each of thousands of
    small ones, and whoever has got them keeps as many files open."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def _by_value(value: Any) -> bytes:
    made = io.BytesIO()
    _ByValue(made, pickle.HIGHEST_PROTOCOL).dump(value)
    return made.getvalue()


class Pool:
    """Processes of one gloo group."""

    def __init__(self, world: int, place: Place | None = None) -> None:
        self.world = world
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = _context(place)
        self.folder = tempfile.mkdtemp(prefix="trainplan-pool-")
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, f"{self.folder}/store", theirs), daemon=True)
            with place(rank, world) if place else nullcontext():
                process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call function(rank, world, *args) on every rank; the results in rank order."""
        asked = f"{function.__name__} on {self.world} processes"
        results: list[Any] = [None] * self.world
        waiting: dict[Connection, int] = {}
        try:
            for rank, pipe in enumerate(self.pipes):
                pipe.send((function, args))
                waiting[pipe] = rank
            while waiting:
                ready = wait(list(waiting), timeout=timeout)
                if not ready:
                    why = f"ranks {sorted(waiting.values())} gave no answer in {timeout:g} s"
                    raise RunError(asked, why, "a longer timeout=, or a machine that is less busy")
                for pipe in (pipe for pipe in self.pipes if pipe in ready):
                    rank = waiting.pop(pipe)
                    kind, value = pipe.recv()
                    if kind == "error":
                        raise RunError(asked, f"rank {rank} failed\n{value}")
                    results[rank] = value
        except BaseException as error:
            self.stop()
            if isinstance(error, EOFError | ConnectionError):
                why = "a process ended without an answer"
                raise RunError(asked, why, "fewer processes, if memory was short") from None
            raise
        return results

    def stop(self) -> None:
        """End the processes at once."""
        _POOLS.pop(self.world, None)
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _context(place: Place | None) -> Any:
    """How processes are started. What is forked has the place of the server, not of whoever asks for it."""
    if place or torch.cuda.is_available() or "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)  # of no effect once there is a server
    return context


def pool(world: int) -> Pool:
    """The processes for this world size, started if there are none."""
    if world not in _POOLS:
        _POOLS[world] = Pool(world, _PLACES[-1] if _PLACES else None)
    return _POOLS[world]


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """Pools that are started meanwhile have their processes there, rank by rank; they are stopped afterwards."""
    stop_pools()
    _PLACES.append(place)
    try:
        yield
    finally:
        stop_pools()
        _PLACES.pop()


@atexit.register
def stop_pools() -> None:
    """End all processes that are kept."""
    for found in list(_POOLS.values()):
        found.stop()
