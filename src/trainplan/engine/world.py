"""Joining the other ranks: process groups under a store that a restart does not confuse."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from trainplan.engine.endpoint import store
from trainplan.errors import InputError, RunError

TIMEOUT = timedelta(seconds=120)
_FAILURE = "failure"  # where a rank that fails leaves what it says
_READY = "ready"  # ... and each that needs the others no longer to start
_store: dist.Store | None = None  # of this attempt


def join(backend: str = "gloo", timeout: timedelta = TIMEOUT, until_exit: bool = False) -> tuple[int, int]:
    """Join the ranks that torchrun started; (rank, world). `until_exit`: nobody else sees to leaving them.

    torchrun restarts workers under the same store, where the addresses of the dead attempt still stand; so every
    attempt has a prefix of its own.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RunError(
            "joining the other ranks",
            f"{', '.join(missing)} is not set, so this was not started by torchrun",
            "trainplan run, or torchrun -m trainplan.run",
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun's agent holds the store itself; started by hand, rank 0 does.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = store(host, port, world, master=rank == 0 and not agent, timeout=timeout)
    global _store
    _store = prefixed = dist.PrefixStore(_prefix(os.environ.get("TORCHELASTIC_RUN_ID", ""), attempt), met)
    dist.init_process_group(
        "gloo" if backend != "nccl" else "nccl", store=prefixed, rank=rank, world_size=world, timeout=timeout
    )
    if until_exit:
        atexit.register(_leave_in_peace)
    return rank, world


def _leave_in_peace() -> None:
    """A group that is there when C++ cleans up may abort the process. (After an error its messages may never come, and
    leaving would wait for them: then the process ends as it is.)"""
    if not hasattr(sys, "last_value"):
        leave()


def _prefix(run: str, attempt: str) -> str:
    return f"trainplan/{run}/{attempt}"


def ready() -> None:
    """Leave word that this rank has joined all groups: those that go on without each other can, from now on."""
    if _store is not None:
        _store.set(f"{_READY}/{os.environ['RANK']}", "")


def is_ready(store: dist.Store, run: str, rank: int) -> bool:
    """Whether a rank of a run has left word of that, as whoever keeps the store sees it."""
    return dist.PrefixStore(_prefix(run, "0"), store).check([f"{_READY}/{rank}"])


def tell(text: str) -> None:
    """Leave word for the ranks of other nodes of why this one fails, if it gets through."""
    with suppress(RuntimeError):  # the store may have gone with its node
        if _store is not None:
            _store.set(_FAILURE, json.dumps([int(os.environ["RANK"]), socket.gethostname(), text]))


def told(patience: float = 2.0) -> tuple[int, str, str] | None:
    """(rank, host, text) of a rank that has failed, if it left word."""
    with suppress(RuntimeError):
        if _store is not None:
            _store.wait([_FAILURE], timedelta(seconds=patience))
            rank, host, text = json.loads(_store.get(_FAILURE))
            return rank, host, text
    return None


def leave() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def host_group() -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for what is in the host's memory, which NCCL cannot send; all ranks ask for it."""
    if dist.get_backend() == "gloo":
        yield None  # the default group is one
        return
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)  # of all ranks, so also of this one
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def groups_of(
    groups: tuple[tuple[int, ...], ...], timeout: timedelta = TIMEOUT, backend: str | None = None
) -> list[dist.ProcessGroup | None]:
    """A process group for each group of ranks of a program; every rank must ask for the same, in the same order."""
    found: list[dist.ProcessGroup | None] = []
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        found.append(group if isinstance(group, dist.ProcessGroup) else None)
    return found


def carrying(asked: str | None, device: str) -> str:
    """What carries tensors between ranks, where it was not asked for; refused where it cannot."""
    on_cpu = device.startswith("cpu")
    fitting = ("gloo",) if on_cpu else ("nccl", "gloo-staged")
    if asked is not None and asked not in fitting:
        why = f"tensors are on {device}, {'and it takes those of GPUs' if on_cpu else 'and gloo takes those of CPUs'}"
        raise InputError(f"backend={asked!r}", why, " or ".join(f"backend={name!r}" for name in fitting))
    return asked or fitting[0]
