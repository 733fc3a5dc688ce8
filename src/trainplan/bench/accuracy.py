"""How good are our predictions? Plans predicted and run side by side.

For each workload: a measured profile; for each plan a prediction, and runs on real processes in which every step is
preceded by the reference kernel that the profile was made beside. Machines drift, so plans are run in rounds, one
after the other and all of them again, and three numbers are kept: the error of the ratio to the reference (`error`),
the error as it stands (`raw_error`), and the noise floor: how far two halves of the same measurement are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
import torch.distributed as dist

from trainplan.bench.pool import pool
from trainplan.cluster.cluster import Cluster
from trainplan.engine.measurement import Measurement, RunResult, measure, together
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse, text
from trainplan.predict.accuracy import plan_kind
from trainplan.predict.predict import predict
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import keep_memory
from trainplan.profile.profile import Profile
from trainplan.profile.reference import Reference
from trainplan.report import joined
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load
from trainplan.workload.workload import Workload

WARM_UP = 2
WORST = 8  # operations that are named in a row


@dataclass(frozen=True)
class Difference:
    """One operation of one rank: predicted beside measured, in seconds of the step that only it accounts for."""

    name: str
    rank: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Row:
    """One plan of one workload: predicted beside measured."""

    workload: str
    plan: str
    kind: str
    ranks: int
    batch: int
    predicted_s: float
    measured_s: float
    error: float  # of the ratio to the reference kernel: (predicted − measured) / measured
    raw_error: float
    noise_floor: float
    steps: int
    by_kind: dict[str, tuple[float, float]]  # kind of operation → predicted and measured seconds a step, mean rank
    asked: str = ""  # the request that the plan was made from
    rounds: tuple[float, ...] = ()  # the error of every round by itself
    worst: tuple[Difference, ...] = ()  # the operations that are furthest off


@cache
def _captured(name: str) -> tuple[Workload, Skeleton, Captured]:
    workload = load(name)
    skeleton = Skeleton(workload.build)
    skeleton.model.train()
    return workload, skeleton, capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")


def _train(
    rank: int, world: int, name: str, plan: Plan, batch: int, steps: int, device: str, backend: str
) -> Measurement:
    """On every rank: the steps of a plan, each preceded by the reference kernel on rank 0."""
    workload, skeleton, captured = _captured(name)

    trainer = Trainer(
        plan, workload, captured, lambda names: skeleton.materialise(names, 0, device), backend=backend, device=device
    )
    data = workload.inputs(batch, 0)
    measured = measure(trainer, [(data, None)] * (WARM_UP + steps), warm_up=WARM_UP, reference=Reference(device))
    if world > 1:
        dist.barrier()
        trainer.close()
    return measured


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
        ranks = pool(plan.world).run(_train, name, plan, batch, steps, device, backend)
    return together(ranks, plan, WARM_UP)


class Compared:
    """A plan that is predicted once, and run as often as wanted."""

    def __init__(self, name: str, asked: str, profile: Profile, cluster: Cluster, batch: int) -> None:
        self.name, self.asked, self.profile, self.cluster, self.batch = name, asked, profile, cluster, batch
        self.plan = resolve(parse(asked), profile, cluster, batch)
        self.predicted = predict(self.plan, profile, cluster, batch, keep=True)
        self.runs: list[RunResult] = []

    def run(self, steps: int) -> None:
        """One round more."""
        device = "cpu" if self.profile.device == "cpu" else "cuda"
        self.runs.append(run_plan(self.name, self.plan, self.batch, steps, device, self.cluster.backend))

    def row(self) -> Row:
        """All rounds so far together."""
        ratios = [[s / r for s, r in zip(run.steady_seconds, run.references, strict=True)] for run in self.runs]
        seconds = [run.steady_seconds for run in self.runs]
        expected, predicted_s = self.predicted.step_s / self.profile.provenance.reference_s, self.predicted.step_s
        # Each round is in one half, where there are several: what changes between rounds is noise, too.
        halves = (ratios[0][0::2], ratios[0][1::2]) if len(ratios) == 1 else (_all(ratios[0::2]), _all(ratios[1::2]))
        both = [joined.join(self.predicted.timeline(), run.timeline) for run in self.runs]
        measured_s = median(_all(seconds))
        return Row(
            workload=self.name, plan=text(self.plan), kind=plan_kind(self.plan), ranks=self.plan.world,
            batch=self.batch, predicted_s=predicted_s, measured_s=measured_s,
            error=expected / median(_all(ratios)) - 1, raw_error=predicted_s / measured_s - 1,
            noise_floor=abs(median(halves[0]) / median(halves[1]) - 1), steps=len(_all(seconds)),
            by_kind={d.name: (d.predicted_s, d.measured_s) for d in _middle(each.kinds for each in both)},
            asked=self.asked, rounds=tuple(expected / median(each) - 1 for each in ratios),
            worst=_middle(each.ops for each in both)[:WORST],
        )  # fmt: skip


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


def suite(ranks: Sequence[int], micro: int = 4) -> list[str]:
    """The plans that are measured: one device, replicas, and each order of work, on so many ranks."""
    lines = ["dp=1 pp=1 micro=1"]
    for count in ranks:
        lines += [
            f"dp={count} pp=1 micro=1",
            f"pp={count} dp=1 schedule=naive micro={micro}",
            f"pp={count} dp=1 schedule=gpipe micro={micro}",
            f"pp={count} dp=1 schedule=1f1b micro={micro}",
        ]
    return lines


def orders(ranks: int, micro: int = 8) -> list[str]:
    """Every order of work on so many ranks (an even number), but for that of slices of sequences."""
    words = [
        "schedule=naive", "schedule=gpipe", "schedule=lockstep", "schedule=looped chunks=2", "schedule=1f1b",
        "schedule=1f1b-early", "schedule=interleaved chunks=2", "schedule=zb-h1", "schedule=zb-h2",
        "schedule=zb-v chunks=2", "schedule=gems", "schedule=chimera", "schedule=chimera-doubled",
    ]  # fmt: skip
    lines = [f"pp={ranks} dp=1 {word} micro={micro}" for word in words]
    return [*lines, f"dp=2,{','.join(['1'] * (ranks - 2))} pp={ranks - 1} schedule=1f1b micro={micro}"]


def exchanges(ranks: int) -> list[str]:
    """Every way to train replicas in step on so many ranks: who sums gradients, and what is shared out."""
    words = ["", "exchange=ring", "exchange=tree", "exchange=all-to-all", "exchange=all-to-all-sliced",
             "exchange=halving-doubling", "exchange=dataparallel", "zero=1", "zero=2", "zero=3"]  # fmt: skip
    if ranks % 2 == 0 and ranks > 2:
        words += [f"exchange=hierarchical node={ranks // 2}", f"zero=3 shard={ranks // 2}"]
    lines = [f"dp={ranks} pp=1 micro=1 {word}".strip() for word in words]
    return [*lines, f"dp={ranks - 1} pp=1 micro=1 exchange=ps-bsp servers=1"] if ranks > 2 else lines
