"""Models with several tensors between blocks, dict outputs, tied and frozen weights, buffers and dropout:
measured in the chain, measured one block at a time, and estimated, their bytes are the same."""

import pytest
import torch

from tests.capture.models import CASES
from trainplan.cluster.catalogue import device
from trainplan.profile.estimate import estimate
from trainplan.profile.measure import measure
from trainplan.workload.workload import Workload


@pytest.mark.parametrize("name", ["dict", "gpt", "oddities"])
def test_bytes_are_the_same_however_they_are_found(name):
    case = CASES[name]
    workload = Workload(
        name=name,
        build=case.build,
        inputs=lambda samples, seed: case.batch(samples, seed),
        loss=case.loss,
        optimizer=torch.optim.AdamW,
        batch=4,
        samples_per_epoch=100,
    )
    chain = measure(workload, samples=[2, 4], repeats=1)
    alone = measure(workload, samples=[2, 4], repeats=1, seconds=0.1, memory=1)
    guess = estimate(workload, device("cpu"), samples=[2, 4])
    assert chain.provenance.verified
    assert [b.saved_bytes for b in chain.blocks] == [b.saved_bytes for b in alone.blocks]
    assert [b.saved_bytes for b in chain.blocks] == [b.saved_bytes for b in guess.blocks]
    assert chain.crossings == alone.crossings == guess.crossings
    assert chain.state_bytes_per_parameter == alone.state_bytes_per_parameter == guess.state_bytes_per_parameter
    assert [b.flops for b in chain.blocks] == [b.flops for b in guess.blocks]
