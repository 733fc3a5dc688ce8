"""How good are our predictions? Plans predicted and run side by side.

For each workload: a measured profile; for each plan a prediction, and runs on real processes in which every step is
preceded by the reference kernel that the profile was made beside. Machines drift, so plans are run in rounds, one
after the other and all of them again, and three numbers are kept: the error of what would have been predicted at the
speed that the reference kernel shows (`error`), the error as it stands (`raw_error`), and the noise floor: how far two
halves of the same measurement are apart. On one machine everything slows down together, messages too. A link with a
rate of its own does not: across one, what is predicted is the step with slower blocks and the same link.

Workers of asynchronous servers have no steps in common. What is compared of them is how often the servers update the
weights: a "step" is the time in which they do so as many times as there are workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainplan.bench.pool import pool
from trainplan.bench.row import Difference, Row
from trainplan.cluster.cluster import Cluster
from trainplan.engine.feed import part_of
from trainplan.engine.measurement import Measurement, RunResult, measure, one_by_one, together
from trainplan.engine.trainer import Trainer
from trainplan.plan.decided import BY_PRIORITY
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import parse, text
from trainplan.predict.accuracy import plan_kind
from trainplan.predict.predict import predict
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import keep_memory
from trainplan.profile.profile import Profile
from trainplan.profile.reference import Reference
from trainplan.profile.slower import slower
from trainplan.profile.structure import structure
from trainplan.program.ops import Kind
from trainplan.program.staleness import step_seconds as by_push
from trainplan.program.text import parse as parse_name
from trainplan.program.timeline import Timeline
from trainplan.report import joined
from trainplan.solve.resolve import resolve
from trainplan.workload.batch import each_tensor
from trainplan.workload.load import load
from trainplan.workload.workload import Batch, Workload

WARM_UP = 2
RECORDED = 3  # steps of a GPU whose timeline is kept
WORST = 8  # operations that are named in a row
DRIFTS = 5  # speeds at which a step across a link is predicted; those between are interpolated
LEAST_PUSHES = 12  # of a worker that goes on without the others: the first ones do not count


@cache
def _captured(name: str) -> tuple[Workload, Skeleton, Captured, Profile]:
    workload = load(name)
    skeleton = Skeleton(workload.build)
    captured = capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")
    return workload, skeleton, captured, structure(captured, workload, workload.inputs(2, 0))


def _train(
    rank: int, world: int, name: str, plan: Plan, batch: int, steps: int, device: str, backend: str
) -> Measurement:
    """On every rank: the steps of a plan, each preceded by the reference kernel on rank 0."""
    workload, skeleton, captured, shape = _captured(name)
    trainer = Trainer(
        plan, workload, captured, lambda names: skeleton.materialise(names, 0, device), shape=shape, backend=backend,
        device=device,
    )  # fmt: skip
    data = _there(trainer, workload.inputs(batch, 0))
    # To note when everything happens takes a GPU's host a tenth of a step that it is busy with: such steps are not
    # those that are timed, but where what is timed are the notes (of asynchronous servers).
    apart = trainer.device.type != "cpu" and not trainer.is_asynchronous
    measured = measure(
        trainer, [(data, batch)] * (WARM_UP + steps), warm_up=WARM_UP, reference=Reference(device), record=not apart
    )  # fmt: skip
    if apart:
        told = measure(trainer, [(data, batch)] * (1 + RECORDED), warm_up=1)
        measured = replace(measured, events=told.events, arrivals=told.arrivals, within=told.within)
    if world > 1:
        dist.barrier()
        trainer.close()
    return measured


def _there(trainer: Trainer, whole: Batch) -> Batch:
    """A rank's part of a batch where its plan has it when a step begins: where it is read, or, of a plan that loads it,
    in memory of the host that a GPU can copy from by itself."""
    part = part_of(trainer, whole)
    if trainer.device.type == "cpu":
        return part
    return each_tensor(part, Tensor.pin_memory if trainer.inputs.loads else lambda tensor: tensor.to(trainer.device))


def run_plan(name: str, plan: Plan, batch: int, steps: int, device: str = "cpu", backend: str = "gloo") -> RunResult:
    """Run a plan on processes that are kept. On `cuda` all of them use the one device: slices of it."""
    if plan.world == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_memory()
        try:
            ranks = [_train(0, 1, name, plan, batch, steps, device, backend)]
        finally:
            torch.set_num_threads(threads)
    else:
        if plan.exchange in ASYNCHRONOUS:
            steps = max(steps, LEAST_PUSHES)
        ranks = pool(plan.world).run(_train, name, plan, batch, steps, device, backend)
    if plan.exchange in ASYNCHRONOUS:
        return replace(one_by_one(ranks, plan, batch, WARM_UP, "", []), references=list(ranks[0].references))
    return together(ranks, plan, WARM_UP)


def steady(run: RunResult, plan: Plan) -> tuple[list[float], list[float]]:
    """Seconds of the steps that count, and of the reference kernel beside each; where there are none, of two halves."""
    if plan.exchange in ASYNCHRONOUS:
        moments = list(pushes(run.timeline, plan).values())
        halves = [own[: len(own) // 2 + 1] for own in moments], [own[len(own) // 2 :] for own in moments]
        return [by_push(half) for half in halves], run.references[:2]
    # Where steps cross, the first that is recorded finds everything settled: it counts only if there is no other.
    first = int(plan.exchange in BY_PRIORITY and len(run.steady_seconds) > 1)
    return run.steady_seconds[first:], run.references[first:]


def pushes(timeline: Timeline, plan: Plan) -> dict[int, NDArray[np.float64]]:
    """When the first server has applied the pushes of every worker."""
    found: dict[int, list[float]] = {}
    for event in timeline.events:
        if event.kind == Kind.STEP.name and event.rank == plan.workers:
            found.setdefault(parse_name(event.name).pipeline, []).append(event.end)
    return {worker: np.array(moments) for worker, moments in found.items()}


def by_kind(timeline: Timeline) -> dict[str, float]:
    """Seconds of every kind of operation, a step and a rank, whatever else goes on meanwhile."""
    found: Counter[str] = Counter()
    for event in timeline.events:
        found[event.kind] += (event.end - event.start) / timeline.steps / timeline.world  # type: ignore[assignment]
    return dict(found)


class Compared:
    """A plan that is predicted once, and run as often as wanted."""

    def __init__(
        self, name: str, asked: str, profile: Profile, cluster: Cluster, batch: int, rated_link: bool = False
    ) -> None:
        self.name, self.asked, self.profile, self.cluster, self.batch = name, asked, profile, cluster, batch
        self.rated_link = rated_link  # whether ranks talk over a link that is as fast as before when processors are not
        self.plan = resolve(parse(asked), profile, cluster, batch)
        self.predicted = predict(self.plan, profile, cluster, batch, keep=True)
        self.runs: list[RunResult] = []

    def run(self, steps: int) -> None:
        """One round more."""
        device = "cpu" if self.profile.device == "cpu" else "cuda"
        self.runs.append(run_plan(self.name, self.plan, self.batch, steps, device, self.cluster.backend))

    def row(self) -> Row:
        """All rounds so far together."""
        both = [steady(run, self.plan) for run in self.runs]
        seconds = [own for own, _ in both]
        drifts = [[r / self.profile.provenance.reference_s for r in references] for _, references in both]
        expected = self._expected(_all(drifts))
        ratios = [[s / expected(d) for s, d in zip(*pair, strict=True)] for pair in zip(seconds, drifts, strict=True)]
        # Each round is in one half, where there are several: what changes between rounds is noise, too.
        halves = (ratios[0][0::2], ratios[0][1::2]) if len(ratios) == 1 else (_all(ratios[0::2]), _all(ratios[1::2]))
        predicted_s, measured_s = self.predicted.step_s, median(_all(seconds))
        kinds, worst = self._joined()
        return Row(
            workload=self.name, plan=text(self.plan), kind=plan_kind(self.plan), ranks=self.plan.world,
            batch=self.batch, predicted_s=predicted_s, measured_s=measured_s,
            error=1 / median(_all(ratios)) - 1, raw_error=predicted_s / measured_s - 1,
            noise_floor=abs(median(halves[0]) / median(halves[1]) - 1) if all(halves) else 0.0,
            steps=sum(len(run.steady_seconds) for run in self.runs),
            by_kind={d.name: (d.predicted_s, d.measured_s) for d in kinds},
            asked=self.asked, rounds=tuple(1 / median(each) - 1 for each in ratios), worst=worst[:WORST],
            drift=median(_all(drifts)), spent=self._spent(),
        )  # fmt: skip

    def _spent(self) -> dict[str, float]:
        """By kind of operation, the seconds of a step and a rank: medians over rounds."""
        each = [by_kind(run.timeline) for run in self.runs]
        return {kind: median(one.get(kind, 0.0) for one in each) for kind in sorted(set().union(*each))}

    def _expected(self, drifts: Sequence[float]) -> Callable[[float], float]:
        """The predicted seconds of a step, by how much longer everything takes than when the profile was made."""
        if not self.rated_link:
            return lambda drift: self.predicted.step_s * drift
        known = np.linspace(min(drifts), max(drifts), DRIFTS)
        slowed = [predict(self.plan, slower(self.profile, d), self.cluster, self.batch).step_s for d in known]
        return lambda drift: float(np.interp(drift, known, slowed))

    def _joined(self) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
        """By kind and by operation; where ranks go on without each other, only by kind."""
        predicted = self.predicted.timeline()
        if self.plan.exchange in ASYNCHRONOUS:
            expected = by_kind(predicted)
            each = [
                {kind: (expected.get(kind, 0.0), s) for kind, s in by_kind(run.timeline).items()} for run in self.runs
            ]
            return _middle([joined.Row(kind, *both) for kind, both in one.items()] for one in each), ()
        both = [joined.join(predicted, run.timeline) for run in self.runs]
        return _middle(one.kinds for one in both), _middle(one.ops for one in both)


def _all(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for each in rounds for value in each]


def _middle(rounds: Iterable[Sequence[joined.Row]]) -> tuple[Difference, ...]:
    """Medians over rounds of what each operation (or kind of them) took; the largest difference first."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for rows in rounds:
        for row in rows:
            found.setdefault((row.name, row.rank), []).append((row.predicted_s, row.measured_s))
    differences = [Difference(*key, *map(median, zip(*values, strict=True))) for key, values in found.items()]
    return tuple(sorted(differences, key=lambda d: (-abs(d.predicted_s - d.measured_s), d.name, d.rank)))
