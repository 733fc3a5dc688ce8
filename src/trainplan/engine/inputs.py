"""What steps train on: batches that come with their step, and those that come ahead of it.

With preload=on, what is preloaded is copied while the step before computes (`copies.py`), and the step takes it from
there. So two copies are on the device at a time, and a third is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainplan.engine.copies import Copier, Copy, Reading, by_shape, first_of
from trainplan.engine.same import check_same
from trainplan.engine.transport import Form
from trainplan.engine.weights import weights_of
from trainplan.errors import PlanError, RunError
from trainplan.plan.rules import micro_batches, of_replicas
from trainplan.plan.text import brief
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.loads import loads, scatters
from trainplan.units import some
from trainplan.workload.batch import as_batch, each_place, per_sample, tensors, to_device
from trainplan.workload.batch import split as split_batch
from trainplan.workload.workload import Batch

if TYPE_CHECKING:
    from trainplan.engine.trainer import StepResult, Trainer

MOST_AHEAD = 2  # the batch of the step that comes, and that of the one after it


@dataclass
class Fed:
    """What one step trains on."""

    total: int  # samples of the whole batch
    parts: list[Batch] = field(default_factory=list)  # micro-batches; or nothing but their sizes, if they are loaded
    weights: list[float] = field(default_factory=list)  # share of each (or of its slices) in the whole batch's mean
    copies: dict[int, Callable[[], Copy]] = field(default_factory=dict)  # by stage: what makes its copy
    ahead: dict[int, Future[Copy]] = field(default_factory=dict)  # by stage: copies that were started before the step


class Inputs:
    """Of one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.plan, self.replica, self.device = trainer.plan, trainer.replica, trainer.device
        self.workload, self.slices, self.is_server = trainer.workload, trainer.slices, trainer.is_server
        least, everybody = self.plan.dp * self.plan.micro, tuple(range(self.plan.dp))
        layout = Layout(self.plan, trainer.shape, least, backend(trainer.backend), everybody)
        self.loads, self.scatters = loads(layout) and not self.is_server, scatters(layout)
        self.is_root = self.scatters and trainer.rank == self.plan.rank(0, 0)
        self._own = [h for h in layout.holdings if h.rank == trainer.rank]
        self._places = {h.stage: self._read(layout, h.stage) for h in self._own}
        self._line_of = layout.line_of[:: max(1, len(self.plan.slices))].tolist()
        self._shared = frozenset(given.name for given in trainer.shape.inputs if given.fixed_bytes)
        self._example = trainer.workload.inputs(2, 0) if self.scatters else Batch(0)
        # Nothing of theirs is read where the root sends it, and asynchronous workers are never all at one step.
        self._is_held = self.plan.world == 1 or self.scatters or trainer.is_asynchronous
        self._ahead: deque[Fed] = deque()
        self._copier: Copier | None = None

    @staticmethod
    def _read(layout: Layout, stage: int) -> frozenset[str]:
        return frozenset(tensor.name for tensor in layout.profile.inputs_of(*layout.plan.bounds[stage]))

    # -- batches ----------------------------------------------------------------------------------------------------

    def part(self, samples: int) -> tuple[int, int]:
        """Which samples of a batch this rank is to be given: from … to. (Whoever gets its part from the root, none.)"""
        if self.scatters:
            return (0, samples) if self.is_root else (0, 0)
        sizes = of_replicas(self.plan, samples)
        first = sum(sizes[: self.replica])
        return first, first + sizes[self.replica]

    def of(self, batch: Any, whole: int | None = None) -> Fed:
        """What a step trains on: a whole batch, or this rank's part of one of `whole` samples."""
        batch = as_batch(batch, self._shared)
        total = whole or batch.samples
        if not self._is_held and whole is None:
            check_same(batch, self.plan, self.replica)
        self._is_held = True
        self._check_size(total)
        if self.is_server:
            return Fed(total)
        sizes = micro_batches(self.plan, total)[self.replica]
        if self.scatters and not self.is_root:
            return Fed(total, self._by_shape(sizes))
        own = batch if self.is_root else self.own(batch, total, whole is not None)
        if self.is_root:
            self._check(batch, total)
        if not self.loads:
            own = to_device(own, self.device)
        parts = first_of(own, sizes)  # at the root the rest is the others'
        weights = weights_of(parts, total, self.plan, self.workload.loss, self.slices)
        if not self.loads:
            return Fed(total, parts, weights)
        copies = {h.stage: self._copy(own, sizes, h.stage, h.lines) for h in self._own if self._places[h.stage]}
        shapes = [Batch(size) for size in sizes]
        if len(copies) < len(self._own):  # a stage that reads nothing is given the form of what it does not read
            shapes = [each_place(part, by_shape) for part in parts]
        return Fed(total, shapes, weights, copies)

    def _check_size(self, total: int) -> None:
        """The last batch of an epoch may be too small to be split."""
        least = self.plan.dp * self.plan.micro
        if total < least:
            parts = f"{some(self.plan.dp, 'replica')} × {some(self.plan.micro, 'micro-batch')}"
            why = f"it cannot be split over {parts}"
            instead = f"batches of {least} samples or more; drop_last=True of a loader leaves a smaller last one out"
            raise PlanError(f"a batch of {some(total, 'sample')} under plan {brief(self.plan)!r}", why, instead)

    def own(self, batch: Batch, total: int, already: bool) -> Batch:
        """The part of a batch that this replica trains; `already`: it is that part."""
        sizes = of_replicas(self.plan, total)
        if already:
            if batch.samples != sizes[self.replica]:
                why = f"replica {self.replica} trains {sizes[self.replica]} of {total} samples"
                instead = f"{sizes[self.replica]} samples on this rank, or the whole batch on all of them"
                raise PlanError(f"a part of {batch.samples} samples", why, instead)
            return batch
        return split_batch(batch, sizes)[self.replica] if self.plan.dp > 1 else batch

    def _copy(self, own: Batch, sizes: tuple[int, ...], stage: int, lines: tuple[int, ...]) -> Callable[[], Copy]:
        reading = Reading(self._places[stage], tuple(line in lines for line in self._line_of))
        return lambda: reading.copied(own, sizes, self.device)

    # -- ahead ------------------------------------------------------------------------------------------------------

    def preload(self, batch: Any, whole: int | None = None) -> None:
        """Start to copy what a later step trains on."""
        if self.plan.preload != "on":
            why = f"preload={self.plan.preload}: a batch comes with its step"
            raise PlanError(f"preloading a batch under plan {brief(self.plan)!r}", why, "preload=on")
        if len(self._ahead) == MOST_AHEAD:
            why = "the batch of the next step and that of the one after it are there, and there is room for no more"
            raise RunError("preloading a third batch", why, "a step first")
        fed = self.of(batch, whole)
        fed.ahead = {stage: self.start(copy) for stage, copy in fed.copies.items()}
        fed.copies = {}  # with which the host's batch goes
        self._ahead.append(fed)

    def start(self, copy: Callable[[], Copy]) -> Future[Copy]:
        """Have a copy made behind the host's back."""
        self._copier = self._copier or Copier(self.device)
        return self._copier.start(copy)

    def next(self) -> Fed:
        """What was preloaded first."""
        if not self._ahead:
            raise RunError("a step without a batch", "none was preloaded", "trainer.preload(batch), or step(batch)")
        return self._ahead.popleft()

    def refuse_another(self) -> None:
        """A step with a batch of its own would leave those that were preloaded for it."""
        if self._ahead:
            why = f"{len(self._ahead)} preloaded before it would be left over"
            raise RunError("a step with a batch of its own", why, "trainer.step(), which takes what was preloaded")

    def close(self) -> None:
        self._ahead.clear()
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    # -- scattered by the root --------------------------------------------------------------------------------------

    def scattered(self) -> list[str]:
        """The places in a batch of what the root sends, in order."""
        return [place for place in tensors(self._example) if place in self._places[0]]

    def forms(self, samples: int) -> list[Form]:
        """What comes from the root."""
        there = tensors(self._example)
        return [(self._shape(place, there[place], samples), there[place].dtype) for place in self.scattered()]

    def received(self, arrived: list[Tensor], total: int) -> tuple[list[Batch], list[float]]:
        """This worker's micro-batches, from what the root has sent; and their weights."""
        sizes = micro_batches(self.plan, total)[self.replica]
        there = dict(zip(self.scattered(), arrived, strict=True))
        whole = self._sized(sum(sizes))
        parts = split_batch(each_place(whole, lambda place, tensor: there.get(place, tensor)), sizes)
        return parts, weights_of(parts, total, self.plan, self.workload.loss, self.slices)

    def _sized(self, samples: int) -> Batch:
        """A batch of so many samples, by shape only."""
        made = each_place(self._example, lambda at, t: t.new_empty(self._shape(at, t, samples), device="meta"))
        return replace(made, samples=samples)

    def _by_shape(self, sizes: tuple[int, ...]) -> list[Batch]:
        return split_batch(self._sized(sum(sizes)), sizes)

    def _shape(self, place: str, tensor: Tensor, samples: int) -> tuple[int, ...]:
        return (samples, *tensor.shape[1:]) if per_sample(self._example, place, tensor) else tuple(tensor.shape)

    def _check(self, batch: Batch, total: int) -> None:
        """The others expect what the workload's own batches are like."""
        if batch.samples != total:
            why = f"under dataparallel with preload=off rank 0 loads all {total}, and scatters them"
            raise PlanError(f"a part of {batch.samples} samples", why, "the whole batch there, or preload=on")
        there, wanted = tensors(batch), tensors(self._sized(total))
        for place in self.scattered():
            found, usual = (_form(of[place]) if place in of else "missing" for of in (there, wanted))
            if found != usual:
                why = f"{place} is {found}, and the other workers expect {usual}"
                raise RunError(f"scattering a batch of {total} samples", why, "preload=on, which scatters nothing")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def steps_of(trainer: Trainer, batches: Iterable[tuple[Any, int | None]]) -> Iterator[Callable[[], StepResult]]:
    """For every batch what takes its step; with preload=on the batch after it comes meanwhile.

    Whoever feeds us says where the data goes on (`Trainer.place`): after a step, with the batch after that of the step.
    """
    if trainer.plan.preload != "on":
        for batch, whole in batches:
            yield lambda batch=batch, whole=whole: trainer.step(batch, whole)  # type: ignore[misc]
        return
    source, places = iter(batches), deque[dict[str, Any]]()

    def fetch() -> None:
        before = trainer.place
        for batch, whole in source:
            trainer.preload(batch, whole)
            places.append(trainer.place)
            break
        trainer.place = before

    def step() -> StepResult:
        fetch()  # now, and not before: whatever is done between two steps would hide it as well
        trainer.place = places.popleft()
        return trainer.step()

    fetch()
    while places:
        yield step
