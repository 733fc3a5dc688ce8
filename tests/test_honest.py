"""What would otherwise go wrong without a word: data that differ by rank, sums for means, other models' profiles."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Checkpointed(nn.Module):
    """Eight layers, each of which it would compute again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def of_checkpoints():
    inputs = {"inputs": lambda samples: (torch.randn(samples, 64), torch.randn(samples, 64)), "loss": "mse"}
    return of(Checkpointed(), **inputs, batch=4096)


def test_own_checkpointing_is_not_kept_and_told(tmp_path):
    job, told = of_checkpoints(), "note     its own checkpointing is not kept (first in "
    answers = [
        trainplan.profile(job, "1xA100-80"),
        trainplan.predict(job, "single", cluster="1xA100-80"),
        trainplan.recommend(job, cluster="2xA100-80"),
    ]
    for answer in answers:
        (line,) = [line for line in str(answer).splitlines() if "checkpointing" in line]
        assert line.startswith(told)
        assert answer.to_json()["notes"] == [line.removeprefix("note     ")]
    answers[0].profile.save(tmp_path / "kept.json")
    assert type(answers[0].profile).load(tmp_path / "kept.json").notes == answers[0].profile.notes
    saved, again = (
        trainplan.predict(job, plan, cluster="1xA100-80").prediction.peak.bytes
        for plan in ("single", "single recompute=full")
    )
    assert again < saved  # trainplan's own is what keeps less


def test_a_run_of_what_checkpoints_tells_it(tmp_path, monkeypatch):
    """Whether it is started here or only written down; and one's own loop is warned."""
    job = of_checkpoints()
    with pytest.warns(UserWarning, match="its own checkpointing is not kept"):
        trainplan.build("single", Checkpointed(), job.loss, job.optimizer, inputs=job.inputs(2, 0))
    path = tmp_path / "checkpoints.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.checkpoint import checkpoint\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return checkpoint(self.inner, x, use_reentrant=False)\n\n"
        "def build():\n"
        "    example = (torch.randn(4, 4), torch.randint(3, (4,)))\n"
        '    return {"model": Net(), "inputs": example, "loss": "cross_entropy", "batch": 4}\n'
    )
    name = f"{path}:build"
    for dry in (True, False):
        answer = trainplan.run(name, "single", "1xcpu", steps=3, out=str(tmp_path / str(dry)), dry_run=dry)
        assert "its own checkpointing is not kept (first in " in str(answer)
        assert len(answer.to_json()["notes"]) == 1


def test_gradient_checkpointing_of_transformers_is_told():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    network = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    )
    tokens = torch.randint(32, (2, 16))
    notes = []
    for enable in (False, True):
        if enable:
            network.gradient_checkpointing_enable()
        job = of(network.train(), inputs={"input_ids": tokens, "labels": tokens}, loss=lambda out, _: out.loss)
        captured = capture(job.build(), job.inputs(2, 0), job.loss)
        notes.append(structure(captured, job, job.inputs(2, 0)).notes)
    assert notes[0] == ()
    assert [note.partition(" is not kept")[0] for note in notes[1]] == ["its own checkpointing"]


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
