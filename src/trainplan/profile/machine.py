"""The device that a profile is made on: its name, its memory, and how it is kept still meanwhile."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psutil
import torch

from trainplan.cluster import catalogue
from trainplan.cluster.probe import machine
from trainplan.errors import InputError


def device_of(name: str | torch.device) -> torch.device:
    """The torch device of that name, or an error that says what is here.

    >>> device_of("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name}", "torch knows no such device", "cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name}", "profiles are measured on cpu or cuda", "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {name}", "this machine has no CUDA device that torch can use", "cpu")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise InputError(f"device {name}", f"there are {torch.cuda.device_count()}, counted from 0", "cuda:0")
    return device


def name_of(device: torch.device) -> str:
    """The name that clusters use for such a device.

    >>> name_of(torch.device("cpu"))
    'cpu'
    """
    return catalogue.reported(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def describe(device: torch.device) -> str:
    """The machine in words."""
    host = f"{machine.processor()}, {machine.cores()} cores"
    return f"{torch.cuda.get_device_name(device)} ({host})" if device.type == "cuda" else host


def free_bytes(device: torch.device) -> int:
    """Memory that tensors could take now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    available: int = psutil.virtual_memory().available
    return min(available, machine.memory_bytes())


def versions() -> dict[str, str]:
    """What timings depend on, besides the machine."""
    return machine.versions()


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # the numbers that mallopt(3) knows them by


def keep_memory() -> bool:
    """Tell the C library to keep freed memory for the next tensor instead of giving it back; whether it listened.

    By default glibc gives large blocks back, and asks for them again a moment later: the system then zeroes every page
    anew. Which sizes that happens to depends on what the process freed before, so the same step of a small VGG on a CPU
    takes 51 or 74 ms. Workers and profiles both need this, or they are not comparable. Peak memory is no higher by it.

    Threads get their memory from where the first one does: on their own they would have heaps of 64 MiB, which go back
    whenever they are empty. (8 MiB written by a thread: 16 ms, or 0.7.)
    """
    try:
        library, said = ctypes.CDLL(None), ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
        return all(library.mallopt(what, value) for what, value in said)
    except (OSError, AttributeError, TypeError):  # another C library
        return False


@contextmanager
def still(device: torch.device) -> Iterator[None]:
    """One thread on a CPU (a core is a device), and no garbage collection in the middle of a timing."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_memory()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()
