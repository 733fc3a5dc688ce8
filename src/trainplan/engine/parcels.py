"""What passes save for backward, on its way to the host's memory and back (`program/lower/away.py`).

autograd hands every tensor that it saves to a hook. What is kept then is a *handle*: the tensor's place in its storage,
and a slot with that storage, which may be on the device, or away. So each storage goes once, whoever saved it; what the
model, the batch or other stages hold is left where it is. A section's parcel is what it and those before it have saved,
and nobody will read any more on the way there. Where blocks are recomputed, it is the crossings that they read again.

Copies go on beside everything else: on a GPU each way has a stream of its own, and host memory that is pinned and used
again; elsewhere a thread. What has been copied out is given up only when the program says so, and a copy in has its
memory as soon as it starts: both are done by the host, in the order of its list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainplan.engine.pending import await_later
from trainplan.engine.transport import Arrivals, Pending
from trainplan.program.lower.away import depths
from trainplan.workload.batch import tensors

if TYPE_CHECKING:
    from trainplan.engine.instructions import Instruction
    from trainplan.engine.runner import Runner

_BYTE = torch.uint8


@dataclass(eq=False)
class Slot:
    """A storage that was saved, wherever it is."""

    storage: torch.UntypedStorage | None  # None: it is away
    size: int  # bytes
    host: Tensor | None = None  # its bytes there


@dataclass(eq=False)
class Handle:
    """A tensor that was saved: its place in a slot."""

    slot: Slot
    form: tuple[torch.dtype, torch.device, Any, torch.Size, tuple[int, ...]]  # with its offset, and strides

    @staticmethod
    def of(tensor: Tensor, slot: Slot) -> Handle:
        return Handle(slot, (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride()))

    def tensor(self) -> Tensor:
        """The tensor, whose storage is on the device again."""
        dtype, device, offset, size, stride = self.form
        assert self.slot.storage is not None  # or the program read what is away: its check says that it does not
        return torch.empty(0, dtype=dtype, device=device).set_(self.slot.storage, offset, size, stride)


@dataclass
class Parcel:
    """What one section has left."""

    slots: list[Slot]
    named: dict[str, Handle] = field(default_factory=dict)  # of a pass that is recomputed: crossings

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Saving:
    """A forward pass whose parcels go away: what autograd saves is kept in slots."""

    def __init__(self, away: int, held: Iterable[Tensor], device: torch.device) -> None:
        self.away, self.parcels, self._device = away, dict[int, Parcel](), device
        self._held = {_key(tensor) for tensor in held}
        self._slots: dict[int, Slot] = {}  # by storage: those that are in no parcel yet

    def hooks(self) -> saved_tensors_hooks:
        """What the pass has to run in."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Handle:
        here = tensor.layout is torch.strided and tensor.device.type == self._device.type  # numbers may be on the host
        if not here or _key(tensor) in self._held:
            return tensor.detach()  # without its graph: a node that holds its own output would never be freed
        storage = tensor.untyped_storage()
        slot = self._slots.setdefault(storage._cdata, Slot(storage, storage.nbytes()))
        return Handle.of(tensor, slot)

    @staticmethod
    def _unpack(saved: Tensor | Handle) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.tensor()

    def over(self, section: int, env: Mapping[str, Any]) -> None:
        """The forward pass of a section is over; `env` is what later ones (or stages) read."""
        read = {_key(value) for value in env.values() if isinstance(value, Tensor)}
        done = [key for key in self._slots if key not in read]
        slots = [self._slots.pop(key) for key in done]
        if section < self.away:
            self.parcels[section] = Parcel(slots)


class Keeping:
    """A forward pass that is recomputed, whose parcels go away: the crossings that sections are the last to read."""

    def __init__(self, away: int, last_read: Sequence[Sequence[str]]) -> None:
        self.away, self.last_read, self.parcels = away, last_read, dict[int, Parcel]()

    def over(self, section: int, env: dict[str, Any]) -> None:
        """The forward pass of a section is over; what goes is taken out of `env`."""
        if section >= self.away:
            return
        slots: dict[int, Slot] = {}
        named = {}
        for name in self.last_read[section]:
            tensor = env.pop(name)
            storage = tensor.untyped_storage()
            named[name] = Handle.of(tensor, slots.setdefault(storage._cdata, Slot(storage, storage.nbytes())))
        self.parcels[section] = Parcel(list(slots.values()), named)


def saving(run: Runner, op: Instruction, leaves: Mapping[str, Tensor]) -> Saving | None:
    """For a forward pass; None where nothing of it goes away."""
    away = _away(run, op)
    if not away:
        return None
    stage = run.part.held[op.stage].stage
    held = (*stage.parameters(), *stage.buffers(), *tensors(run.batch(op)).values(), *leaves.values())
    found = Saving(away, held, run.part.device)
    run.current.parcels[op.stage, run.piece(op)] = found.parcels
    return found


def keeping(run: Runner, op: Instruction) -> Keeping | None:
    """The same for one that is recomputed."""
    away = _away(run, op)
    if not away:
        return None
    stage, cut = run.part.held[op.stage].stage, run.part.layout.sections[op.stage]
    inside = [c for c in stage.captured.crossings if stage.first <= c.producer and c.consumers[-1] < stage.last]
    last_read = [[c.name for c in inside if first <= c.consumers[-1] < last] for first, last in cut]
    found = Keeping(away, last_read)
    run.current.parcels[op.stage, run.piece(op)] = found.parcels
    return found


def _away(run: Runner, op: Instruction) -> int:
    layout = run.part.layout
    return int(depths(layout, op.stage)[run.piece(op)]) if layout.offloads else 0


# -- copies -----------------------------------------------------------------------------------------------------------


@dataclass
class _Work:
    """Something that a thread does."""

    do: Callable[[], None]

    def wait(self) -> None:
        self.do()


class _Copy:
    """A copy that goes on; whoever has waited for it goes on to what follows from it."""

    def __init__(self, done: Future[float] | torch.cuda.Event, device: torch.device, then: Callable[[], None]) -> None:
        self._done, self._device, self._then, self._over = done, device, then, False

    def wait(self) -> None:
        if self._over:
            return
        self._over = True
        if isinstance(self._done, Future):
            self._done.result()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._then()


class Way:
    """One direction between a device and its host: one copy after the other, beside everything else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = Arrivals(1) if self._stream is None else None

    def go(
        self, pairs: list[tuple[Tensor, Tensor]], after: torch.cuda.Event | None, mark: Callable[[], Any],
        note: Callable[[Any, Any], None], then: Callable[[torch.cuda.Event | None], None],
    ) -> Pending:  # fmt: skip
        """Copy (into, from) each of these, once what the device was given until now (and `after`) is over."""

        def copy() -> None:
            start = mark()
            while pairs:  # whoever does this must not be the last to hold on to them
                into, source = pairs.pop(0)
                into.copy_(source, non_blocking=True)
            note(start, mark())

        if self._stream is None:
            assert self._thread is not None
            return _Copy(self._thread.watch(_Work(copy)), self._device, lambda: then(None))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            copy()
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Copy(done, self._device, lambda: then(done))


class Host:
    """The memory of the host that parcels go to, and the ways there and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = Way(device), Way(device)
        # Buffers by size that nobody uses, with the copy out of each that comes last.
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._used: dict[int, Tensor] = {}  # by parcel

    def take(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Memory for so many bytes, and what must be over before it is written to."""
        if self._free.get(size):
            return self._free[size].pop()
        return torch.empty(size, dtype=_BYTE, pin_memory=self.device.type == "cuda"), None

    def offload(self, parcel: Parcel, mark: Callable[[], Any], note: Callable[[Any, Any], None]) -> Pending:
        """Start a parcel's copy out; whoever waits for it gives up its memory on the device."""
        buffer, after = self.take(parcel.size)
        self._used[id(parcel)] = buffer
        pairs = []
        for slot, part in zip(parcel.slots, buffer.split([slot.size for slot in parcel.slots]), strict=True):
            assert slot.storage is not None  # it was saved just now
            slot.host = part
            pairs.append((part, _bytes(slot.storage, self.device)))

        def give_up(_: Any) -> None:
            for slot in parcel.slots:
                slot.storage = None

        return self.out.go(pairs, after, mark, note, give_up)

    def fetch(self, parcel: Parcel, mark: Callable[[], Any], note: Callable[[Any, Any], None]) -> Pending:
        """Start its copy back, into memory that it has from now on."""
        buffer, pairs = self._used.pop(id(parcel)), []
        for slot in parcel.slots:
            assert slot.host is not None  # its copy out comes before, in the same list
            slot.storage = torch.empty(slot.size, dtype=_BYTE, device=self.device).untyped_storage()
            pairs.append((_bytes(slot.storage, self.device), slot.host))
            slot.host = None
        size = parcel.size
        return self.back.go(
            pairs, None, mark, note, lambda event: self._free.setdefault(size, []).append((buffer, event))
        )


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=_BYTE, device=device).set_(storage)


# -- handlers ---------------------------------------------------------------------------------------------------------


def offload(run: Runner, op: Instruction, place: int) -> None:
    """Start the copy of a parcel to the host."""
    _start(run, op, run.current.parcels[op.stage, run.piece(op)][op.unit])


def fetch(run: Runner, op: Instruction, place: int) -> None:
    """Start its copy back; the backward pass of its section waits for it."""
    where = op.stage, run.piece(op)
    parcel = run.current.parcels[where].pop(op.unit)
    _start(run, op, parcel)
    if parcel.named:
        run.current.passes[where].env |= {name: handle.tensor() for name, handle in parcel.named.items()}


def _start(run: Runner, op: Instruction, parcel: Parcel) -> None:
    host, recorder, size = run.part.host, run.recorder, parcel.size
    assert host is not None  # there is one where anything goes away
    start = host.offload if op.kind.name == "OFFLOAD" else host.fetch
    pending = start(parcel, recorder.mark, lambda begun, over: recorder.note(op.op, begun, over, size))
    if op.waits:
        pending.wait()
    await_later(run, op, pending)
