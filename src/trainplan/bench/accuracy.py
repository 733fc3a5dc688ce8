"""How good are our predictions? Plans predicted and run side by side.

For each workload: a measured profile; for each plan a prediction, and a run on real processes in which every step is
preceded by the reference kernel that the profile was made beside. Machines drift, so three numbers are kept: the
error of the ratio to the reference (`error`), the error as it stands (`raw_error`), and the noise floor: how far two
halves of the same measurement are apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

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
from trainplan.report.joined import join
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load
from trainplan.workload.workload import Workload

WARM_UP = 2


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


def compare(name: str, plan_line: str, profile: Profile, cluster: Cluster, batch: int, steps: int) -> Row:
    """Predict a plan and run it."""
    plan = resolve(parse(plan_line), profile, cluster, batch)
    predicted = predict(plan, profile, cluster, batch, keep=True)
    measured = run_plan(name, plan, batch, steps, "cpu" if profile.device == "cpu" else "cuda", cluster.backend)
    ratios = [s / r for s, r in zip(measured.steady_seconds, measured.references, strict=True)]
    expected = predicted.step_s / profile.provenance.reference_s
    halves = statistics.median(ratios[0::2]), statistics.median(ratios[1::2])
    joined = join(predicted.timeline(), measured.timeline)
    median = statistics.median(measured.steady_seconds)
    return Row(
        workload=name, plan=text(plan), kind=plan_kind(plan), ranks=plan.world, batch=batch,
        predicted_s=predicted.step_s, measured_s=median, error=expected / statistics.median(ratios) - 1,
        raw_error=predicted.step_s / median - 1, noise_floor=abs(halves[0] / halves[1] - 1), steps=steps,
        by_kind={row.name: (row.predicted_s, row.measured_s) for row in joined.kinds}, asked=plan_line,
    )  # fmt: skip


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
