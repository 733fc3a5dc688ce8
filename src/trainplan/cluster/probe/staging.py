"""Shares of a GPU's tensors between the ranks of a gloo group, through pinned host memory: what the engine does, and a
probe measures.

gloo takes a GPU's tensors itself, but it puts all shares together in memory that it asks the system for every time. A
page that the system has to find and to empty first costs more than what comes to lie in it: 1 ms a MiB on virtual
machines that were measured, twice what its messages take. Pinned memory is torch's, which keeps what it has once.

Two threads: one copies to the host and posts the messages (`shares.py`), the other waits for what arrives and copies it
to the device. So the copies of one go on beside the messages of another, and those of a large one beside its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.cluster.probe import shares


class Staging:
    """Gathers, or scatters, of one rank: one after the other in the order in which they were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = Line(device), Line(device)

    def gather(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Future[float]:
        """Start to bring everybody's share into its place of `whole`; `own` may be a part of it. When it is over."""
        over, computed, place = Future[float](), given(self._device), dist.get_rank(group)

        def leave() -> None:
            self._out.wait_for(computed)
            host = pinned(whole)
            parts, there = host.view(dist.get_world_size(group), -1), whole.view(dist.get_world_size(group), -1)
            self._out.copy(parts[place], own)
            works = shares.gather(host, parts[place], group)

            def arrive() -> None:
                for other, work in zip(shares.others(place, len(parts)), works, strict=False):  # receives come first
                    work.wait()
                    there[other].copy_(parts[other], non_blocking=True)
                if own.data_ptr() != there[place].data_ptr():
                    there[place].copy_(own)
                for work in works[len(parts) - 1 :]:
                    work.wait()

            self._in.then(arrive, over)

        self._out.then(leave, over, ends=False)
        return over

    def scatter(self, flat: Tensor, group: dist.ProcessGroup | None) -> tuple[Future[float], Tensor, Tensor]:
        """Start to give everybody else's share of `flat` to whom it belongs: when it is over, this rank's own share,
        and what comes from the others, one below the other."""
        over, computed = Future[float](), given(self._device)
        place, ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = flat.view(ranks, -1)
        received = flat.new_empty(ranks - 1, parts.shape[1])

        def leave() -> None:
            self._out.wait_for(computed)
            host = pinned(flat)
            staged = host.view(ranks, -1)
            works, _, arriving = shares.scatter(
                host, group, pinned(received), lambda other: self._out.copy(staged[other], parts[other])
            )

            def arrive() -> None:
                for other, work in zip(shares.others(place, ranks), works, strict=False):
                    work.wait()
                    row = other - (other > place)
                    received[row].copy_(arriving[row], non_blocking=True)
                for work in works[ranks - 1 :]:
                    work.wait()

            self._in.then(arrive, over)

        self._out.then(leave, over, ends=False)
        return over, parts[place], received


def given(device: torch.device) -> torch.cuda.Event | None:
    """What a device was given to do so far, to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Line:
    """A thread that does one thing after the other, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[Any], bool]] = SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        threading.Thread(target=self._work, name="staging", daemon=True).start()

    def then(self, work: Callable[[], None], over: Future[Any], ends: bool = True) -> None:
        """Do this; what fails is told to whoever waits for the end, and what `ends` is it."""
        self._queue.put((work, over, ends))

    def wait_for(self, computed: torch.cuda.Event | None) -> None:
        if self._stream is not None and computed is not None:
            self._stream.wait_event(computed)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and wait until it is done."""
        target.copy_(source, non_blocking=True)
        self.copied()

    def copied(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _work(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext(), torch.no_grad():
            while True:
                work, over, ends = self._queue.get()
                try:
                    work()
                    self.copied()
                    if ends:
                        over.set_result(time.perf_counter())
                except BaseException as error:  # whoever waits for it raises it
                    over.set_exception(error)
                del work, over  # and what they keep alive


def pinned(like: Tensor) -> Tensor:
    """Memory of the host for as much; pinned where it is for a GPU. torch keeps what is given back for the next one."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
