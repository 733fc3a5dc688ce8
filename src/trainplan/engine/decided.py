"""The exchange of a stage on a rank, where its order is decided while running: a thread that goes through rounds.

The rounds are those of `program/agenda.py`: tell the others what is ready here, learn what is ready everywhere, and sum
what `choose` says. The ranks use two process groups of their own for it, one for the bits (always gloo, on the host)
and one for the gradients, so that nothing else the host does is in the way.

A rank comes to a round when it has enough to send (and credit), or when its cycle is over; and its backward pass,
which makes everything ready in the end, does not wait for the rounds of its own step. So every rank comes to every
round, all decide alike, and the order of sums is the same everywhere: nobody waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.engine.clocks import now
from trainplan.engine.telling import Telling
from trainplan.errors import RunError
from trainplan.program.agenda import STATUS_BITS, Agenda, Buffer, Rule, check_agenda, choose, worth
from trainplan.program.lower.parts import Part
from trainplan.program.ops import Kind

if TYPE_CHECKING:
    from trainplan.engine.agendas import Log

Note = Callable[[int, Kind, int, float, float, int], None]  # step, kind, unit, start, end, bytes
_STATUS = (1 << STATUS_BITS) - 1


class Exchange:
    """Sums the parts of gradients of one copy of a stage, step after step."""

    def __init__(
        self,
        rule: Rule,
        parts: Sequence[Part],
        flat: Sequence[Tensor],  # the gradients of every bucket
        bits: Telling,
        sums: dist.ProcessGroup | None,
        note: Note,
    ) -> None:
        self.rule, self.note = rule, note
        self.views = [flat[part.bucket][part.start : part.start + part.count] for part in parts]
        self.decided: dict[int, Agenda] = {}  # by step, of those that were asked for
        self.keeps = False  # whether decisions are kept
        self.log: Log | None = None  # where all of them are, for a file
        self._parts_of: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            self._parts_of.setdefault(part.bucket, []).append(number)
        self.bits, self._sums = bits, sums
        self._change = threading.Condition()
        self._step, self._busy = -1, False  # the one that goes on, and whether it does
        self._opened = 0.0
        self._ready: set[int] = set()
        self._left: set[int] = set()  # not gone yet
        self._flying: dict[int, tuple[Buffer, float]] = {}  # on their way: by the first part, since when
        self._landed: set[int] = set()
        self._last_end = 0.0
        self._events: dict[int, torch.cuda.Event] = {}
        self._script: list[Agenda] = []  # to be followed instead of deciding
        self._failed: BaseException | None = None
        self._ends = False
        self._landing: SimpleQueue[tuple[dist.Work, Callable[[], None]] | None] = SimpleQueue()
        for what in (self._run, self._land) if rule.several else (self._run,):
            threading.Thread(target=self._guarded, args=(what,), name="exchange", daemon=True).start()

    # -- for the host ---------------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """The backward pass begins that completes the gradients of a step."""
        self.settle()
        with self._change:
            self._ready, self._landed, self._flying = set(), set(), {}
            self._left = set(range(len(self.views)))
            self._events = {}
            self._step, self._opened, self._busy = step, now(), True
            self._change.notify_all()

    def settle(self) -> None:
        """Until the rounds of the last step are over."""
        self._until(lambda: not self._busy)

    def ready(self, bucket: int) -> None:
        """The gradients of a bucket are complete here."""
        with self._change:
            if self.views[0].is_cuda:
                event = torch.cuda.Event()
                event.record()
                self._events[bucket] = event
            self._ready.update(self._parts_of.get(bucket, ()))
            self._change.notify_all()

    def wait(self, buckets: Collection[int] | None = None) -> None:
        """Until the gradients of these (or all) buckets have been summed."""
        waiting = self._parts_of if buckets is None else buckets
        wanted = {part for bucket in waiting for part in self._parts_of[bucket]}
        self._until(lambda: wanted <= self._landed)

    def replay(self, agendas: Sequence[Agenda]) -> None:
        """In the next steps follow these agendas, instead of deciding."""
        self._script = [check_agenda(self.rule, agenda) for agenda in agendas]

    def close(self) -> None:
        """No step will come any more: end the threads, and leave the groups."""
        self._landing.put(None)
        with self._change:
            self._ends = True
            self._change.notify_all()
        self.bits.close()
        if self._sums is not None:
            dist.destroy_process_group(self._sums)

    def _until(self, true: Callable[[], bool]) -> None:
        with self._change:
            self._change.wait_for(lambda: self._failed is not None or true())
            if self._failed is not None:
                reason = str(self._failed).splitlines()[0]
                raise RunError("summing gradients", f"waiting for the other ranks failed: {reason}") from self._failed

    # -- the thread -----------------------------------------------------------------------------------------------

    def _guarded(self, what: Callable[[], None]) -> None:
        """What a thread does; what goes wrong there the host raises, as soon as it waits."""
        try:
            if self.views[0].is_cuda:
                torch.cuda.set_device(self.views[0].device)
            what()
        except BaseException as error:
            with self._change:
                self._failed = self._failed or error
                self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ends or self._busy)
                if self._ends:
                    return
                step = self._step
            agenda = self._rounds(step, self._script.pop(0) if self._script else None)
            if self.keeps:
                self.decided[step] = agenda
            if self.log is not None:
                self.log.add(agenda)
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _land(self) -> None:
        """Wait for sums that are on their way, in the order in which they went."""
        while (one := self._landing.get()) is not None:
            work, landed = one
            work.wait()
            landed()

    def _rounds(self, step: int, script: Agenda | None) -> Agenda:
        agenda: list[tuple[Buffer, ...]] = []
        last, told = self._opened, None
        while self._left:
            number = len(agenda)
            self.bits.expect()
            if self.rule.fuses:
                began, last = last, self._cycle(last)
                self.note(step, Kind.TICK, number, began, last, 0)
            planned = script[number] if script is not None else None
            ready, landed = self._know(told, planned)
            told = ready, landed
            start = now()
            ready, landed = self._tell(ready, landed)
            self.note(step, Kind.NEGOTIATE, number, start, now(), self.rule.bits_bytes)
            flying: list[int] = []
            if self.rule.several:
                flying = [p for buffers in agenda for buffer in buffers for p in buffer if p not in landed]
            chosen = planned if planned is not None else choose(self.rule, ready, flying)
            agenda.append(chosen)
            if chosen:
                told = None
            for buffer in chosen:
                self._send(step, buffer)
        self._until(lambda: not self._flying)
        return tuple(agenda)

    def _cycle(self, last: float) -> float:
        """Sleep until a cycle has passed since the last; when that was."""
        time.sleep(max(0.0, last + self.rule.cycle - now()))
        return now()

    def _know(
        self, told: tuple[set[int], set[int]] | None, planned: tuple[Buffer, ...] | None
    ) -> tuple[set[int], set[int]]:
        """What is ready and has not gone, and what has landed: at once where a cycle has passed, otherwise as soon as
        there is enough to send and credit for it; and after a round in which nothing went, something new."""

        def comes() -> bool:
            if planned is not None:
                return {part for buffer in planned for part in buffer} <= self._ready
            if self.rule.fuses:
                return True
            own = self._ready & self._left
            flying = sum(self.rule.sizes[part] for buffer, _ in self._flying.values() for part in buffer)
            changes = told != (own, self._landed_here()) or (own == self._left and not self._flying)
            return worth(self.rule, own, self._left) and flying < self.rule.credit and changes

        self._until(comes)
        with self._change:
            return self._ready & self._left, self._landed_here()

    def _landed_here(self) -> set[int]:
        """What has arrived, where others are told of it; elsewhere all that went has."""
        return set(self._landed) if self.rule.several else set()

    def _tell(self, ready: set[int], landed: set[int]) -> tuple[set[int], set[int]]:
        """What is ready, and what has landed, on all ranks: one AND of all their bits."""
        count = len(self.views)
        mine = _STATUS | sum(1 << (STATUS_BITS + part) for part in ready)
        if self.rule.several:
            mine |= sum(1 << (STATUS_BITS + count + part) for part in landed)
        both = self.bits.tell(mine) >> STATUS_BITS
        common = {part for part in ready if both >> part & 1}
        if not self.rule.several:
            return common, landed
        return common, {part for part in landed if both >> (count + part) & 1}

    def sum(self, tensor: Tensor) -> dist.Work:
        """Start the sum of a tensor over all ranks."""
        work = dist.all_reduce(tensor, group=self._sums, async_op=True)
        assert work is not None
        return work

    def _send(self, step: int, buffer: Buffer) -> None:
        """Sum some parts, put side by side where they are several."""
        first, views = min(buffer), [self.views[part] for part in buffer]
        with self._change:  # the pass goes on, and adds to them
            events = list(self._events.values())
        for event in events:  # on a GPU the pass runs behind its host
            event.wait()
        whole = views[0] if len(views) == 1 else torch.cat(views)
        started = now()
        with self._change:
            self._flying[first] = (buffer, started)
            self._left -= set(buffer)
        work = self.sum(whole)

        def landed() -> None:
            if len(views) > 1:
                for view, piece in zip(views, whole.split([view.numel() for view in views]), strict=True):
                    view.copy_(piece)
            if whole.is_cuda:
                torch.cuda.current_stream(whole.device).synchronize()
            end = now()
            with self._change:
                self.note(step, Kind.REDUCE_GRAD, first, max(started, self._last_end), end, whole.nbytes)
                self._last_end = end
                del self._flying[first]
                self._landed.update(buffer)
                self._change.notify_all()

        if self.rule.several:
            self._landing.put((work, landed))
        else:
            work.wait()
            landed()
