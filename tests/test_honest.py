"""What would otherwise go wrong without a word: data that differ by rank, sums for means, other models' profiles."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainplan
from capture.verified import captured_and_verified
from search.models import model
from trainplan import api, cli, files
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, ModelError
from trainplan.plan.plan import plan
from trainplan.predict.predict import predict
from trainplan.profile.capture.captured import capture
from trainplan.profile.structure import structure
from trainplan.workload.load import load
from trainplan.workload.workload import Loss


def of(module: nn.Module, **parts):
    parts = {"inputs": lambda samples: (torch.randn(samples, 6), torch.randint(3, (samples,)))} | parts
    return load(module, **({"loss": "cross_entropy", "batch": 8} | parts))


CODE = """
import random, numpy, torch
from torch import nn

def drawn(samples, seed):
    return torch.randn(samples, 4) + numpy.random.rand() + random.random(), torch.randint(3, (samples,))

def made(samples=5):
    return torch.randn(samples, 4), torch.randint(3, (samples,))

def unseeded():
    return {"model": nn.Linear(4, 3), "inputs": drawn, "loss": "cross_entropy"}

def example():
    return {"model": nn.Linear(4, 3), "inputs": made(), "loss": "cross_entropy"}
"""


@pytest.mark.parametrize("name", ["unseeded", "example"])
def test_every_rank_has_the_same_batch(tmp_path, name):
    """Each makes it for itself, from wherever its random numbers are."""
    (tmp_path / "own.py").write_text(CODE)
    batches = []
    for rank in range(2):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        batches.append(load(f"{tmp_path}/own.py:{name}").inputs(3, 7))
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert torch.equal(batches[0].args[0], batches[1].args[0])
    assert torch.equal(batches[0].targets, batches[1].targets)


def test_a_loss_that_is_a_sum_is_refused():
    def total(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, targets, reduction="sum")

    for loss, refused in ((total, True), (nn.functional.cross_entropy, False)):
        job = of(nn.Linear(6, 3), loss=Loss(loss, lambda batch: batch.samples))
        asked = job.build(), job.inputs(4, 0), job.loss
        if refused:
            with pytest.raises(ModelError, match=r"a sum over samples.*mean"):
                captured_and_verified(*asked)
        else:
            captured_and_verified(*asked)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * x.max().item())


def test_what_looks_at_values_is_refused():
    job = of(Scaled())
    with pytest.raises(ModelError, match=r"block \w+: .*values of its data"):
        structure(capture(job.build(), job.inputs(2, 0), job.loss), job, job.inputs(2, 0))


def test_a_model_that_fails_on_its_own_batch_says_so():
    job = of(nn.Linear(6, 3), inputs=lambda samples: (torch.randn(samples, 6), torch.randint(3, (samples, 2))))
    with pytest.raises(ModelError, match=r"your model and its loss, on a batch of 4.* raised"):
        captured_and_verified(job.build(), job.inputs(4, 0), job.loss)


def test_the_profile_of_another_model_is_refused():
    known = model()
    with pytest.raises(InputError, match=r"--profile of .*the model is resnet50:cifar10"):
        trainplan.predict("resnet50:cifar10", "dp=2", "4xTitanRTX", profile=known)


def test_far_beyond_a_profile_no_error_is_claimed():
    known, there = model(), cluster("4xTitanRTX")
    near, far = (predict(plan(blocks=len(known.blocks)), known, there, known.samples[-1] * n) for n in (2, 3))
    assert "at most" not in near.error.source
    assert "at most" in far.error.source
    assert far.error.median is None


def test_comparisons_that_differ_have_an_exit_code(monkeypatch):
    for same, code in ((True, 0), (False, 1)):
        answer = SimpleNamespace(comparison=SimpleNamespace(same=same))
        monkeypatch.setattr(api, "compare", lambda *_, answer=answer: answer)
        monkeypatch.setattr("sys.argv", ["trainplan", "compare", "resnet18:cifar10", "--plan", "dp=2"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code


def test_what_cannot_be_written_or_counted(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        files.write(tmp_path, "profile", {})
    for words in ({"steps": 0}, {"timed_steps": -1}):
        with pytest.raises(InputError, match="at least one"):
            trainplan.compare("resnet18:cifar10", "dp=2", "2xcpu", **words)
