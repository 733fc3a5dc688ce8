"""Measuring a model that fits the device: the whole chain forward, then the whole chain back, as training does.

The clock is read at the border of every block. So a block meets the caches as it does in training, emptied by the
blocks before it, and not as it would in a tight loop by itself. Sizes take turns, and the reference kernel runs before
the forward pass, between the passes and after the backward pass.

* The host's time (on a CPU that is all there is) is taken from passes in one piece (`one_piece`), which run exactly as
  the engine runs a stage.
* A GPU's time is taken from a walk that stops at every border (`walk`), because the device must be kept from waiting
  for the host within each block (`timing`).

Beside it whole steps are timed without looking at borders: `gap.sum_gap` tells how far the blocks' sum is from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from trainplan.profile.capture.halves import Halfway, backward_weight
from trainplan.profile.capture.sliced import Slice, slices_of
from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.tokens import Tokens
from trainplan.profile.memory import Saved, watch
from trainplan.profile.once_more import time_once_more
from trainplan.profile.one_piece import OnePiece
from trainplan.profile.subject import BlockBytes, Subject, drop_gradients, first_used, trainable
from trainplan.profile.timing import Spent
from trainplan.profile.update import resting, state_bytes
from trainplan.profile.walk import Walk

SLICES = (1, 2, 4)  # numbers of slices of a sequence that are timed


class InChain:
    """The measurements of one model, all of whose blocks are on the device."""

    def __init__(self, subject: Subject, stage: Stage) -> None:
        self.subject, self.stage = subject, stage
        ours = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self.optimizer = resting(subject.workload, subject.captured.stand_ins(), ours)
        self.cost_s: dict[int, float] = {}  # size → seconds of one round, roughly

    # -- bytes ----------------------------------------------------------------------------------------------------

    def survey(self, size: int) -> None:
        """Count the bytes of a step and of every block. These passes also warm up what the timings need warm."""
        self._watch_step(size)
        started = self.subject.clock.elapsed()
        self._watch_blocks(size)
        # A round goes through the chain, and takes a whole step.
        self.cost_s[size] = 2 * (self.subject.clock.elapsed() - started)

    def _watch_step(self, size: int) -> None:
        """The peak of a whole step, with what is there before and after it."""
        subject = self.subject
        if not self.optimizer.state:
            self._step(size, lambda what, work: work())  # makes it
        with watch(subject.device) as seen:

            def watched(what: str, work: Callable[[], object]) -> None:
                with seen.part(what):
                    work()

            self._step(size, watched)
        lasting = _bytes(subject.apart(self.stage, size))
        subject.state_bytes = state_bytes(self.optimizer)
        subject.optimizer = type(self.optimizer).__name__.lower()
        update = seen.levels["update"]
        subject.update_workspace[None] = update.peak - update.start
        most = max(level.peak for level in seen.levels.values()) - seen.levels["forward"].start
        subject.peak_bytes[size] = lasting + subject.state_bytes + most

    def _watch_blocks(self, size: int) -> None:
        """What each block saves, and its workspace.

        Gradients of the weights are there and are added to, which needs most: a new one then needs memory of its own
        until it has been added.
        """
        subject, walk = self.subject, self.subject.walk(size)
        saved = Saved(subject.apart(self.stage, size))
        for parameter in trainable(self.stage):
            parameter.grad = torch.zeros_like(parameter)
        with watch(subject.device) as seen:
            for index in subject.blocks:
                with seen.part(f"forward {index}"), saved.block(index, lambda i=index: walk.graphs[i].made):  # type: ignore[misc]
                    walk.forward(self.stage, index)
                walk.leave(index)
            for index in reversed(subject.blocks):
                with seen.part(f"backward {index}"):
                    walk.backward(index)
        drop_gradients(self.stage)
        subject.saved_by = {name: tuple(sorted(blocks)) for name, blocks in saved.by.items()}
        for index in subject.blocks:
            there, back = seen.levels[f"forward {index}"], seen.levels[f"backward {index}"]
            subject.bytes[size, index] = BlockBytes(
                saved=saved.inside[index],
                forward_workspace=there.peak - max(there.end, there.start),
                backward_workspace=max(0, back.peak - back.start - subject.read_bytes(index, size)),
            )

    # -- seconds --------------------------------------------------------------------------------------------------

    def round(self, size: int, whole: bool = True) -> None:
        """Time every block once, and one whole step."""
        subject, note = self.subject, self.subject.readings.note
        piece = OnePiece(subject.captured, subject.batch(size), subject.workload.loss, subject.clock.host)
        subject.look()
        there = piece.forward(self.stage)
        self._note("forward", size, there)
        subject.look()
        back = piece.backward()
        self._note("backward", size, back)
        drop_gradients(self.stage)
        if subject.device.type == "cuda":
            subject.look()
            for what, on_host, on_device in zip(("forward", "backward"), (there, back), self._walk(size), strict=True):
                for index, (issue, spent) in enumerate(zip(on_host, on_device, strict=True)):
                    note((what, size, index), Spent(spent.run_s, issue))
            drop_gradients(self.stage)
        if whole:
            subject.look()
            self._step(size, lambda what, work: note((f"whole {what}", size), Spent(subject.clock.whole(work), 0.0)))
        subject.look()

    def _note(self, what: str, size: int, on_host: list[float]) -> None:
        """On a CPU the host's seconds are the device's."""
        if self.subject.device.type == "cpu":
            for index, seconds in enumerate(on_host):
                self.subject.readings.note((what, size, index), Spent(seconds, 0.0))

    def _walk(self, size: int) -> tuple[list[Spent], list[Spent]]:
        walk = self.subject.walk(size)
        there = [self._forward(walk, size, index) for index in self.subject.blocks]
        back = [self._backward(walk, size, index) for index in reversed(self.subject.blocks)]
        return there, back[::-1]

    def _forward(self, walk: Walk, size: int, index: int) -> Spent:
        spent = self.subject.clock.time(("forward", size, index), lambda: walk.forward(self.stage, index))
        walk.leave(index)
        return spent

    def _backward(self, walk: Walk, size: int, index: int) -> Spent:
        return self.subject.clock.time(("backward", size, index), lambda: walk.backward(index))

    def _step(self, size: int, timed: Callable[[str, Callable[[], object]], object]) -> None:
        """One step of training on one device, as the engine takes it."""
        batch, loss = self.subject.batch(size), self.subject.workload.loss
        found: list[Tensor] = []

        def forward() -> None:
            _, output = self.stage({}, batch)
            found.append(loss.function(output, batch.targets))

        def backward() -> None:
            torch.autograd.backward([found.pop()])

        timed("forward", forward)
        timed("backward", backward)
        timed("update", self.optimizer.step)
        drop_gradients(self.stage)

    def accumulate(self, size: int) -> None:
        """Time the backward pass of the chain without gradients and with them, one right after the other."""
        subject = self.subject
        subject.look()
        first, again = (sum(spent.run_s for spent in self._walk(size)[1]) for _ in range(2))
        subject.readings.note(("added", None), Spent(again - first, 0.0))
        subject.look()
        drop_gradients(self.stage)

    def halves(self, size: int) -> None:
        """Time the two parts of the backward pass of every block."""
        subject, walk, clock = self.subject, self.subject.walk(size), self.subject.clock
        subject.look()
        for index in subject.blocks:
            self._forward(walk, size, index)
        subject.look()
        for index in reversed(subject.blocks):
            held = subject.captured.blocks[index].holds
            weights = [p for name, p in self.stage.named_parameters() if name in held and p.requires_grad]
            found: list[Halfway] = []
            names = [("input", size, index), ("weights", size, index)]
            first = clock.time(names[0], lambda i=index, w=weights, f=found: f.append(walk.backward_input(i, w)))  # type: ignore[misc]
            second = clock.time(names[1], lambda w=weights, f=found: backward_weight(f.pop(), w))  # type: ignore[misc]
            for name, spent in zip(names, (first, second), strict=True):
                subject.readings.note(name, spent)
        subject.look()
        drop_gradients(self.stage)

    def again(self, size: int) -> None:
        """Time every block as it is run again for its backward pass, beside its forward pass."""
        walk = self.subject.walk(size)
        self.subject.look()
        for index in self.subject.blocks:
            self.subject.clock.time(("forward", size, index), lambda i=index: walk.forward(self.stage, i))  # type: ignore[misc]
            time_once_more(self.subject, self.stage, walk, index, size)
            walk.leave(index)
        self.subject.look()

    def slices(self, size: int, tokens: Tokens) -> None:
        """Time every block on slices of its sequences: of several lengths, after few and after many tokens."""
        subject = self.subject
        for count in SLICES:
            lengths = even(tokens.length, min(count, tokens.length))
            walks: list[Walk] = []
            subject.look()
            for part in slices_of(tokens, lengths):
                walks.append(Walk(subject.captured, subject.batch(size), subject.workload.loss, part, tuple(walks)))
                self._timed(walks[-1].forward, "slice forward", size, part)
            subject.look()
            for part, walk in reversed(list(zip(slices_of(tokens, lengths), walks, strict=True))):
                self._timed(walk.backward, "slice backward", size, part)
            subject.look()
            drop_gradients(self.stage)

    def _timed(self, run: Callable[..., None], what: str, size: int, part: Slice) -> None:
        forward = what == "slice forward"
        for index in self.subject.blocks if forward else reversed(self.subject.blocks):
            name = (what, size, index, part.start, part.length)
            work = partial(run, self.stage, index) if forward else partial(run, index)
            self.subject.readings.note(name, self.subject.clock.time(name, work))

    def arrivals(self, size: int) -> None:
        """Note when within the backward pass of its block each parameter's gradient arrives."""
        subject, walk = self.subject, self.subject.walk(size)
        for index in subject.blocks:
            self._forward(walk, size, index)
        for index in reversed(subject.blocks):
            note_arrivals(subject, self.stage, index, size, lambda i=index: walk.backward(i))  # type: ignore[misc]
        drop_gradients(self.stage)


def note_arrivals(subject: Subject, stage: Stage, index: int, size: int, backward: Callable[[], None]) -> None:
    """Run the backward pass of a block, and note for the parameters that it is the first to use when they are ready."""
    names = first_used(subject.captured, index, subject.trained)
    moments: dict[str, Callable[[], float]] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: moments.update({name: subject.clock.now()}))
        for name, parameter in stage.named_parameters()
        if name in names
    ]
    edges: list[Callable[[], float]] = []

    def run() -> None:
        edges.append(subject.clock.now())
        backward()
        edges.append(subject.clock.now())

    subject.clock.time(("backward", size, index), run)
    for handle in handles:
        handle.remove()
    start, end = edges[0](), edges[1]()
    for name, moment in moments.items():
        share = (moment() - start) / (end - start) if end > start else 1.0
        subject.ready.setdefault(name, []).append(min(max(share, 0.0), 1.0))


def _bytes(found: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def even(length: int, parts: int) -> list[int]:
    """Lengths that differ by one token at most.

    >>> even(10, 4)
    [2, 3, 2, 3]
    """
    edges = [length * part // parts for part in range(parts + 1)]
    return [after - before for before, after in pairwise(edges)]
