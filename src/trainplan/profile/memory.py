"""Bytes: what a forward pass saves for backward, and what is alive beside it at the worst moment.

**Saved bytes** are counted by storage, once each, by the hooks that autograd calls for every tensor it saves. Tensors
of the model and of the batch are there anyhow and do not count. A crossing that is saved (by the block that made it, by
a block that reads it, or by both) is not counted in either: the profile notes which blocks need it.

**Workspace** is what a block needs for a moment: copies in another layout, a gradient before it is added, logits. Only
the allocator sees it. On a CPU the profiler reports every allocation; on a GPU the allocator keeps the peak itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# -- saved for backward ---------------------------------------------------------------------------------------------


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the storage that a tensor is a view of."""
    return tensor.untyped_storage().nbytes()


class Saved:
    """Storages that forward passes save, block by block.

    `inside[b]` are the bytes that block b saves and that neither the model, nor the batch, nor a crossing owns;
    `by[name]` are the blocks that save a crossing.
    """

    def __init__(self, apart: Iterable[Tensor], bytes_of: Callable[[Tensor], int] = storage_bytes) -> None:
        self.inside: dict[int, int] = {}
        self.by: dict[str, set[int]] = {}
        self.each: dict[int, list[tuple[int, int, bool]]] = {}  # of `inside`: storage, bytes, whether of fractions
        self.all: dict[int, set[int]] = {}  # storages that block b saves, whoever owns them
        self._bytes_of = bytes_of
        self._apart = {_storage(tensor) for tensor in apart}
        self._crossing: dict[int, str] = {}  # storage → the crossing that it belongs to
        # The address of a storage is used again once it is gone. A weak reference keeps the address, not the memory.
        self._seen: dict[int, StorageWeakRef] = {}

    @contextmanager
    def block(self, index: int, made: Callable[[], dict[str, Tensor]]) -> Iterator[None]:
        """Count what is saved meanwhile for a block; `made()` are the crossings that it has made by the end."""
        saved: dict[int, int] = {}  # storage → bytes
        fractions: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            key = self._see(tensor)
            if key not in saved:
                saved[key] = self._bytes_of(tensor)
                if tensor.is_floating_point() and saved[key] >= storage_bytes(tensor):  # a mask counts as bytes
                    fractions.add(key)
            return tensor.detach()  # without its graph: a node that holds its own output would never be freed

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.inside[index] = 0
        self.each[index] = []
        self.all[index] = set(saved)
        for name, tensor in made().items():
            if self.crossing(name, tensor) and _storage(tensor) in saved:
                # It may be a part of something larger, all of which is kept alive.
                self.inside[index] += max(0, storage_bytes(tensor) - tensor.nbytes)
        for key, size in saved.items():
            if key in self._crossing:
                self.by[self._crossing[key]].add(index)
            elif key not in self._apart:
                self.inside[index] += size
                self.each[index].append((key, size, key in fractions))

    def crossing(self, name: str, tensor: Tensor) -> bool:
        """Let a crossing own its storage, unless something else does already."""
        key = self._see(tensor)
        if key in self._apart or key in self._crossing:
            return False
        self._crossing[key] = name
        self.by.setdefault(name, set())
        return True

    def _see(self, tensor: Tensor) -> int:
        key = _storage(tensor)
        if key not in self._seen:
            self._seen[key] = StorageWeakRef(tensor.untyped_storage())
        return key


# -- the allocator --------------------------------------------------------------------------------------------------


@dataclass
class Level:
    """Bytes alive when a piece of work began, at its worst moment, and when it ended."""

    start: int
    peak: int
    end: int


@dataclass
class Watch:
    """Bytes alive during named pieces of work; the level before the first piece is 0 on a CPU."""

    device: torch.device
    levels: dict[str, Level] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            start = torch.cuda.memory_allocated(self.device)
            yield
            peak = torch.cuda.max_memory_allocated(self.device)
            self.levels[name] = Level(start, peak, torch.cuda.memory_allocated(self.device))
        else:
            with torch.profiler.record_function(_MARK + name):
                yield


_MARK = "trainplan:"


@contextmanager
def watch(device: torch.device) -> Iterator[Watch]:
    """Watch the allocator; the levels are there when the watch is over."""
    found = Watch(device)
    if device.type == "cuda":
        yield found
        return
    # Otherwise the profiler's library prints two lines whenever it starts and stops (torch 2.13).
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Not `torch.profiler.profile`: it makes events of all it has seen when it ends, which takes seconds, and fails now
    # and then ("cannot create std::vector larger than max_size()", torch 2.13) where other threads went on meanwhile.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield found
    found.levels.update(_replay(profiler))


def _replay(profiler: torch.autograd.profiler.profile) -> dict[str, Level]:
    """The running sum of all allocations, cut at the marks."""
    recorded: Any = profiler.kineto_results
    events = recorded.events()  # the raw list
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    marks = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(_MARK))
        for event in events
        if event.name().startswith(_MARK)
    ]
    levels: dict[str, Level] = {}
    level, place = 0, 0
    for begin, end, name in sorted(marks):
        while place < len(changes) and changes[place][0] < begin:
            level += changes[place][1]
            place += 1
        found = Level(level, level, level)
        while place < len(changes) and changes[place][0] <= end:
            level += changes[place][1]
            place += 1
            found.peak = max(found.peak, level)
        found.end = level
        levels[name] = found
    return levels
