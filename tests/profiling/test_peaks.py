"""The peak of a whole step that a profile notes, and the one that is predicted from its blocks, against real steps.

(Plans of all kinds, operation by operation, on the engine: tests/predict/test_memory.py.)
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainplan.plan.plan import plan
from trainplan.predict.clock import play
from trainplan.predict.memory import peaks
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.measure import measure
from trainplan.profile.memory import watch
from trainplan.profile.profile import Profile
from trainplan.profile.update import state_bytes
from trainplan.program.lower import lower
from trainplan.workload.batch import split, tensors
from trainplan.workload.load import load
from trainplan.workload.workload import Workload

BATCH = 8
MODELS = [pytest.param("mobilenetv2:cifar10", marks=pytest.mark.slow), "vgg11:cifar10"]


def measured_peaks(workload: Workload, micros: tuple[int, ...]) -> list[int]:
    """Bytes at the worst moment of later steps: what lasts, and what the allocator saw beside it."""
    model = workload.build()
    captured = capture(model, workload.inputs(2, 0), workload.loss)
    stage = captured.stage(0, len(captured.blocks)).bind(values_of(model))
    optimizer = workload.optimizer(stage.named_parameters())
    batch = workload.inputs(BATCH, 0)

    def step(micro: int) -> None:
        for part in split(batch, [BATCH // micro] * micro):
            _, output = stage({}, part)
            loss = workload.loss.function(output, part.targets)
            del output
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step(1)  # makes the optimizer's state
    with watch(torch.device("cpu")) as seen:
        for micro in micros:
            with seen.part(str(micro)):
                step(micro)
    lasting = sum(t.nbytes for t in [*stage.parameters(), *stage.buffers(), *tensors(batch).values()])
    found = [seen.levels[str(micro)] for micro in micros]
    return [lasting + state_bytes(optimizer) + level.peak - level.start for level in found]


def predicted_peak(profile: Profile, micro: int) -> int:
    """By the program that would run."""
    program = lower(plan(micro=micro, blocks=len(profile.blocks)), profile, BATCH, steps=2)
    return peaks(play(program, np.ones(len(program))))[0].bytes


@pytest.mark.parametrize("name", MODELS)
def test_peak_of_one_device(name):
    workload = load(name)
    profile = measure(workload, samples=[2, 4, 8], repeats=1, verify=False)
    micros = (1, 2, 4)
    for micro, measured in zip(micros, measured_peaks(workload, micros), strict=True):
        if micro == 1:
            assert profile.whole[-1].peak_bytes == pytest.approx(measured, rel=0.02)
        assert predicted_peak(profile, micro) == pytest.approx(measured, rel=0.05), f"{micro} micro-batches"
