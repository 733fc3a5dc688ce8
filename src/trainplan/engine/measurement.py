"""Steps that are timed: the one loop that `trainplan run`, the accuracy tables and the tests share.

A rank trains its steps and keeps a `Measurement`; the measurements of all ranks together are a `RunResult`. Machines
drift, so where it is asked for every recorded step is preceded by the reference kernel that profiles are made beside.
Where steps overlap (`crossing.py`, asynchronous servers, a frozen first stage) a kernel between two of them would hide
what one leaves to the next: there it runs before the first and after the last, and every step has the mean of the two.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from trainplan.engine.inputs import steps_of
from trainplan.engine.trainer import StepResult, Trainer
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.plan.rules import of_replicas
from trainplan.profile.reference import Reference
from trainplan.program.ops import COLLECTIVES, Kind, goes_ahead
from trainplan.program.text import parse
from trainplan.program.timeline import Event, Timeline
from trainplan.workload.workload import Batch


@dataclass(frozen=True)
class Measurement:
    """What one rank knows of a run."""

    rank: int
    replica: int
    stages: tuple[int, ...]  # that it holds
    seconds: tuple[float, ...]  # of every step
    losses: tuple[float | None, ...]  # None: another rank works it out; or it was read, and is no finite number
    references: tuple[float, ...]  # of the reference kernel before every recorded step; 0: another rank ran it
    peak_bytes: int
    events: tuple[Event, ...]  # of the recorded steps, as far as this rank knows them
    arrivals: dict[str, float]  # of messages from other ranks, by the name of their SEND
    within: float = 0.0  # seconds that all these moments may be off by rank 0's clock


@dataclass(frozen=True)
class RunResult:
    """What a run did."""

    out: str
    step_seconds: list[float]  # of the slowest rank, every step
    losses: list[float]
    peak_bytes: list[int | None]  # of every rank; None: it was lost
    references: list[float]  # seconds of the reference kernel beside the recorded steps
    timeline: Timeline
    warm_up: int
    lost: list[int] = field(default_factory=list)  # workers that died, and that asynchronous servers went on without

    @property
    def steady_seconds(self) -> list[float]:
        """Step times after the warm-up; none where the run was not longer than that."""
        return self.step_seconds[self.warm_up :]


def measure(
    trainer: Trainer,
    batches: Iterable[tuple[Batch, int | None]],
    *,
    warm_up: int,
    reference: Reference | None = None,
    after: Callable[[StepResult], None] | None = None,
    record: bool = True,
) -> Measurement:
    """Train on batches as `Trainer.step` takes them, and keep what happened; all ranks call this.

    The first `warm_up` steps are timed, but their timeline is not recorded; without `record` that of no step is.
    `after`: called after every step.
    """
    seconds, losses, references = [], [], []
    samples, between = 0, reference is not None and not overlap(trainer)
    for number, step in enumerate(steps_of(trainer, batches)):
        if record and number == warm_up:
            trainer.record()
        if reference is not None and (number == warm_up or (between and number > warm_up)):
            references.append(_reference(reference, trainer))
        result = step()
        seconds.append(result.seconds)
        losses.append(result.loss)
        samples = result.samples
        if after is not None:
            after(result)
    trainer.settle()
    counted = len(seconds) > warm_up
    recorded = record and counted
    if reference is not None and counted and not between:
        references = [(references[0] + _reference(reference, trainer)) / 2] * (len(seconds) - warm_up)
    if recorded:
        trainer.record(False)
    events = trainer.events(samples) if recorded else []
    arrivals = trainer.recorder.arrivals(trainer.program(samples)) if recorded else {}
    return Measurement(
        trainer.rank, trainer.replica, tuple(trainer.stages), tuple(seconds), tuple(losses), tuple(references),
        peak_bytes(trainer.device), tuple(events), arrivals, trainer.recorder.within,
    )  # fmt: skip


def overlap(trainer: Trainer) -> bool:
    """Whether a step goes on while the next one begins."""
    if trainer.is_asynchronous or trainer.part.layout.crosses:
        return True
    program = trainer.program(trainer.workload.batch)
    kinds = map(Kind, program.kind[program.lists.items].tolist())
    return goes_ahead(zip(program.lists.owner.tolist(), kinds, strict=True))


def _reference(reference: Reference, trainer: Trainer) -> float:
    """How fast the machine is now: rank 0 runs the kernel while the others wait, as when the profile was made."""
    seconds = reference.seconds() if trainer.rank == 0 else 0.0
    if trainer.plan.world > 1:
        dist.barrier()
    return seconds


def peak_bytes(device: torch.device) -> int:
    """Peak bytes so far: what torch has allocated on a GPU; the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def known_loss(loss: float | None) -> float:
    """The loss of a step on a rank that works it out; files have none where it is no finite number."""
    return math.nan if loss is None else float(loss)


def together(ranks: Sequence[Measurement], plan: Plan, warm_up: int, out: str = "") -> RunResult:
    """The measurements of all ranks, in rank order, as one result."""
    last = next(r for r in ranks if plan.depth - 1 in r.stages and r.replica == 0)
    return RunResult(
        out=out,
        step_seconds=[max(step) for step in zip(*(r.seconds for r in ranks), strict=True)],
        losses=[known_loss(loss) for loss in last.losses],
        peak_bytes=[r.peak_bytes for r in ranks],
        references=[s for s in ranks[0].references if s > 0],
        timeline=merge(ranks, plan),
        warm_up=warm_up,
    )


def one_by_one(
    ranks: Sequence[Measurement], plan: Plan, batch: int, warm_up: int, out: str, lost: list[int]
) -> RunResult:  # fmt: skip
    """The measurements of ranks that go on without each other, of those that are left: the losses of a step are those
    that each worker had in it, whenever that was."""
    workers = [r for r in ranks if r.stages]
    share = {replica: samples / batch for replica, samples in enumerate(of_replicas(plan, batch))}
    whole = sum(share[r.replica] for r in workers)
    peaks = {r.rank: r.peak_bytes for r in ranks}
    losses = [sum(map(known_loss, step)) / whole for step in zip(*(r.losses for r in workers), strict=True)]
    return RunResult(
        out=out, step_seconds=[max(step) for step in zip(*(r.seconds for r in workers), strict=True)], losses=losses,
        peak_bytes=[peaks.get(rank) for rank in range(plan.world)], references=[], timeline=merge(ranks, plan),
        warm_up=warm_up, lost=lost,
    )  # fmt: skip


def merge(ranks: Sequence[Measurement], plan: Plan) -> Timeline:
    """One timeline from what all ranks noted, starting at zero, in which operations mean what they are predicted as.

    * A SEND lasts from when it was posted, and the message before it on the same link was over, until it arrived.
    * A collective starts when the last of its members comes.
    * What was loaded ahead of the first step, before anything was recorded, is there when the timeline starts.
    """
    events = _collectives(_messages(ranks))
    begin = min((event.start for event in events if plan.preload != "on" or event.kind != "LOAD"), default=0.0)
    events = [replace(e, start=max(e.start, begin), end=max(e.end, begin)) for e in events]
    steps = 1 + max((parse(event.name).step for event in events), default=0)
    moved = tuple(
        replace(e, start=e.start - begin, end=e.end - begin) for e in sorted(events, key=lambda e: (e.start, e.rank))
    )
    return Timeline("measured", plan.world, steps, moved, plan_text.brief(plan))


def _messages(ranks: Sequence[Measurement]) -> list[Event]:
    """All events; of messages with the arrival that their receiver noted."""
    arrival = {name: (rank.rank, moment) for rank in ranks for name, moment in rank.arrivals.items()}
    free: dict[tuple[int, int], float] = {}  # link → when it has delivered what was put on it
    found = []
    for event in sorted((event for rank in ranks for event in rank.events), key=lambda e: (e.start, e.end)):
        if event.name in arrival:
            to, moment = arrival[event.name]
            start = max(event.start, free.get((event.rank, to), event.start))
            event = replace(event, start=start, end=max(start, moment))
            free[event.rank, to] = event.end
        found.append(event)
    return found


def _collectives(events: list[Event]) -> list[Event]:
    """The same events; a collective starts on all its members when the last one comes."""
    last: dict[str, float] = {}
    for event in events:
        if Kind[event.kind] in COLLECTIVES:
            last[event.name] = max(event.start, last.get(event.name, event.start))
    return [replace(e, start=min(last[e.name], e.end)) if e.name in last else e for e in events]
