"""Copies of a batch on a device: at once, or behind the host's back.

On a GPU what goes ahead is copied from pinned memory on a stream of its own, so that neither the host nor what is
computed waits for it; whoever reads it has its own stream wait for the copy. On a CPU a thread copies it. Either way a
thread starts it: memory that is not pinned yet has to be copied once more on the host, which takes as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from trainplan.engine.clocks import now
from trainplan.errors import RunError
from trainplan.workload.batch import each_place, per_sample, split
from trainplan.workload.workload import Batch


@dataclass
class Span:
    """When something was copied, and how much."""

    begun: float
    bytes: int = 0
    over: float | None = None
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around a copy that a stream makes
    after: Span | None = None  # the copy that was still on the stream when this one was started

    def seconds(self) -> tuple[float, float]:
        """When it began and when it was over, once it is."""
        if self.over is None:
            assert self.events is not None  # else the host has made it
            if self.after is not None:
                self.begun, self.after = max(self.begun, self.after.seconds()[1]), None
            self.events[1].synchronize()
            self.over = self.begun + self.events[0].elapsed_time(self.events[1]) / 1e3
        return self.begun, self.over


@dataclass
class Copy:
    """What a stage reads of a batch, on its device, in micro-batches; what it does not read is there by shape only."""

    whole: Batch  # of which the micro-batches are the first parts
    parts: list[Batch]
    tensors: list[Tensor]  # that were copied
    span: Span

    def join(self) -> None:
        """What follows on the current stream comes after the copy."""
        if self.span.events is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.span.events[1])
            for tensor in self.tensors:
                tensor.record_stream(stream)


@dataclass(frozen=True)
class Reading:
    """What a stage reads of a batch: which of its tensors, and of which of its micro-batches."""

    places: frozenset[str]
    chosen: tuple[bool, ...]

    def copied(self, source: Batch, sizes: Sequence[int], device: torch.device) -> Copy:
        """The copy, made at once. `sizes` are those of the micro-batches; what is beyond them is for other workers."""
        begun, tensors, fixed = now(), list[Tensor](), dict[str, Tensor]()

        def brought(batch: Batch) -> Batch:
            def bring(place: str, tensor: Tensor) -> Tensor:
                if place not in self.places:
                    return by_shape(place, tensor)
                if place in fixed:
                    return fixed[place]
                tensors.append(moved(tensor, device))
                if not per_sample(batch, place, tensor):  # the same for all micro-batches
                    fixed[place] = tensors[-1]
                return tensors[-1]

            return each_place(batch, bring)

        if all(self.chosen):
            whole = brought(source)
            parts = first_of(whole, sizes)
        else:
            whole, several = source, zip(first_of(source, sizes), self.chosen, strict=True)
            parts = [brought(part) if mine else each_place(part, by_shape) for part, mine in several]
        return Copy(whole, parts, tensors, Span(begun, sum(tensor.nbytes for tensor in tensors)))


def first_of(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The first parts of a batch."""
    rest = batch.samples - sum(sizes)
    return split(batch, [*sizes, rest] if rest else sizes)[: len(sizes)]


def by_shape(place: str, tensor: Tensor) -> Tensor:
    """In the place of a tensor that is not read here: whoever reads it nevertheless is refused by torch."""
    return torch.empty_like(tensor, device="meta")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host's on a device; on a CUDA device it is under way on the current stream."""
    if tensor.device.type != "cpu":
        why = f"it is on {tensor.device} already, and the plan is to load it from the host's memory"
        raise RunError("a batch", why, "preload=given, or a batch in the host's memory")
    if device.type == "cpu":
        return tensor.clone()
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class Copier:
    """A thread that copies what is given to it, in turn; a daemon, so that nobody has to wait for it to end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: Span | None = None  # on the stream
        self._queue: SimpleQueue[tuple[Callable[[], Copy], Future[Copy]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def start(self, copy: Callable[[], Copy]) -> Future[Copy]:
        """A copy that is made, or on its way on a stream of its own."""
        made: Future[Copy] = Future()
        self._queue.put((copy, made))
        return made

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            copy, made = item
            try:
                made.set_result(self._copied(copy))
            except BaseException as error:  # whoever waits for the copy is told
                made.set_exception(error)
            del item, copy, made  # or the batch would stay until the next one comes

    def _copied(self, copy: Callable[[], Copy]) -> Copy:
        if self._stream is None:
            found = copy()
            found.span.over = now()
            return found
        with torch.cuda.stream(self._stream):  # and on its device: this thread has no other
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            found = copy()
            end.record()
        last, self._last = self._last, found.span
        found.span.events = (begin, end)
        if last is not None and last.events is not None and not last.events[1].query():
            found.span.after = last
        return found
