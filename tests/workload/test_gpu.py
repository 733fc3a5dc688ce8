"""What only a CUDA device can show."""

import pytest
import torch

from trainplan.workload.batch import tensors, to_device
from trainplan.workload.datasets import open_data
from trainplan.workload.load import load
from trainplan.workload.loader import loader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_in_page_locked_memory_and_train(workers):
    workload = load("resnet18:cifar10,batch=4")
    with loader(workload, open_data("memory", workload, samples=8), workers=workers, pin=True) as batches:
        batch = next(batches)
    assert all(tensor.is_pinned() for tensor in tensors(batch).values())
    batch = to_device(batch, "cuda", non_blocking=True)
    with torch.device("cuda"):
        model = workload.build()
    optimizer = workload.optimizer(model.parameters())
    workload.loss.function(model(*batch.args), batch.targets).backward()
    optimizer.step()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_random_numbers_of_the_device_are_left_alone():
    before = torch.cuda.get_rng_state()
    example = load(torch.nn.Linear(3, 2), inputs=lambda samples: torch.randn(samples, 3), loss="mse")
    example.inputs(4, 1)
    assert torch.equal(before, torch.cuda.get_rng_state())
