"""What the engine takes of a host for one operation, beside the operation itself: measured with the engine.

    python -m trainplan.engine.dispatch FOLDER RANK COUNT      one worker of a probe (`engine/probe.py` starts them)

The workers train a small pipeline whose devices have next to nothing to do, so that a pass takes as long as its host
issues it, and note by the host's clock what each operation takes. The passes of the same stage by hand, as a profile is
measured, take turns with it. What the engine's forward and backward passes take more, and what taking a message takes,
is what an operation costs beside itself: finding what it reads, keeping what it leaves, posting the next receive, and
caches that hold what was done in between.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from trainplan.cluster.probe.team import Record, Round, Team
from trainplan.cluster.probe.worker import PHASES, Phase, main
from trainplan.engine.recorder import Recorder
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import plan
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.stage import Stage
from trainplan.program.ops import RECEIVES, Kind
from trainplan.workload.batch import to_device
from trainplan.workload.load import load
from trainplan.workload.workload import Batch, Workload

LAYERS, WIDTH = 16, 8  # of a stage; of a layer: nothing to a device
MICRO_BATCHES, SAMPLES = 8, 2
STEPS = 3  # in a round


def prepare(team: Team, quick: bool) -> Round:
    """A round of this phase: some steps under the engine, and as many passes by hand."""
    if team.backend == "nccl" and team.count > 1:  # which the engine was never seen to work with
        return lambda record: None
    trainer = _trainer(team)
    [stage] = trainer.stages.values()
    batch = trainer.workload.inputs(MICRO_BATCHES * SAMPLES, 0)
    by_hand = _ByHand(stage, trainer.workload, team.device)

    def one_round(record: Record) -> None:
        by_engine = _seconds(trainer, batch)
        forward, backward = zip(*(by_hand() for _ in range(STEPS * MICRO_BATCHES)), strict=True)
        record("dispatch.forward", by_engine[Kind.F] - median(forward))
        record("dispatch.backward", by_engine[Kind.B] - median(backward))
        for kind in (kind for kind in RECEIVES if kind in by_engine):
            record("dispatch.receive", by_engine[kind])

    return one_round


def _trainer(team: Team) -> Trainer:
    """Of a chain of small layers, of which each worker has as many."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS * team.count))
    workload = load(
        nn.Sequential(*layers), inputs=lambda samples, seed: (torch.ones(samples, WIDTH), torch.ones(samples, WIDTH)),
        loss="mse", batch=MICRO_BATCHES * SAMPLES,
    )  # fmt: skip
    skeleton = Skeleton(workload.build)
    captured = capture(skeleton.model, workload.inputs(SAMPLES, 0), workload.loss, device="cpu")
    blocks = len(captured.blocks)
    choices = plan(
        pp=team.count, micro=MICRO_BATCHES, schedule="gpipe" if team.count > 1 else "naive", blocks=blocks,
        stages=tuple(round(blocks * stage / team.count) for stage in range(1, team.count)),
    )  # fmt: skip
    trainer = Trainer(
        choices, workload, captured, lambda names: skeleton.materialise(names, 0, team.device),
        backend="gloo-staged" if team.staged else team.backend, device=team.device,
    )  # fmt: skip
    trainer.recorder = Recorder(torch.device("cpu"), alone=True)  # moments are the host's, also on a GPU
    return trainer


def _seconds(trainer: Trainer, batch: Batch) -> dict[Kind, float]:
    """The median seconds of a host by kind of operation, over some steps."""
    recorder = trainer.recorder
    recorder.switch(True)
    for _ in range(STEPS):
        trainer.step(batch)
    recorder.switch(False)
    program = trainer.program(batch.samples)
    found: dict[Kind, list[float]] = {}
    for _, op, start, end, _ in recorder.rows:
        assert isinstance(op, int)  # nothing of this is decided while running
        found.setdefault(Kind(int(program.kind[op])), []).append(end - start)
    recorder.rows.clear()
    return {kind: median(taken) for kind, taken in found.items()}


class _ByHand:
    """The passes of a stage without the engine: seconds of forward and of backward."""

    def __init__(self, stage: Stage, workload: Workload, device: torch.device) -> None:
        self.stage, self.loss = stage, workload.loss
        self.batch = to_device(workload.inputs(SAMPLES, 0), device)
        self.came = {name: torch.ones(SAMPLES, WIDTH, device=device) for name in stage.reads}

    def __call__(self) -> tuple[float, float]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.came.items()}
        begun = time.perf_counter()
        made, output = self.stage(leaves, self.batch)
        roots: list[Tensor] = list(made.values())
        if self.stage.is_last:
            roots = [self.loss.function(output, self.batch.targets)]
        turn = time.perf_counter()
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return turn - begun, time.perf_counter() - turn


if __name__ == "__main__":
    more = Phase("what the engine takes of hosts", 0.1, prepare, alone=True)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), (*PHASES, more))
