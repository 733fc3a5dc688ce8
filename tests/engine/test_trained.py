"""The trained model, out of a checkpoint, into a module of one process."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trainplan
from tests.engine import jobs
from tests.engine.test_checkpoint import run, trainer_of
from trainplan.errors import InputError
from trainplan.plan.plan import plan


@pytest.mark.parametrize("choices", ["pipeline", "zero1 on two"])
def test_no_rank_has_all_of_it_and_the_checkpoint_has(choices: str, tmp_path: Path) -> None:
    """Tied weights are one tensor, and buffers come along."""
    ranks = run(choices, 0, 2, str(tmp_path / "checkpoint-2"), False, ("tied", "sgd"))
    trained = {name: value for _, values, _ in reversed(ranks) for name, value in values.items()}
    model = jobs.built("tied", "sgd")[1]
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    assert trainplan.load_weights(tmp_path, model) is model
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(found) == set(trained)
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    assert any(not torch.equal(value, fresh[name]) for name, value in model.state_dict().items())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = trainer_of(plan(blocks=6), "chain", "sgd")
    trainer.save(tmp_path / "run" / "checkpoint-1")
    return tmp_path / "run"


def test_types_are_those_of_the_module(saved: Path) -> None:
    model = jobs.built("chain", "sgd")[1].float()
    trainplan.load_weights(saved / "checkpoint-1", model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_another_model_is_refused_and_takes_nothing(saved: Path) -> None:
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match=r"lacks 2 tensors of the model, first 'weight', and it has \d+ .* chain"):
        trainplan.load_weights(saved, model)
    assert torch.equal(model.weight, before)
    chain = jobs.built("chain", "sgd")[1]
    name, parameter = list(chain.named_parameters())[-1]
    parameter.data = parameter.data.new_zeros(*parameter.shape, 2)
    with pytest.raises(InputError, match=rf"'{name}' is .* there, and .* here"):
        trainplan.load_weights(saved, chain)


def test_where_no_checkpoint_is(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no checkpoint in it. Try a folder of trainer.save, or of a run with --save"):
        trainplan.load_weights(tmp_path / "empty", nn.Linear(1, 1))
    with pytest.raises(InputError, match="it is not there"):
        trainplan.load_weights(tmp_path / "nowhere", nn.Linear(1, 1))


@pytest.mark.usefixtures("quick_start")
def test_the_guide_gets_the_model_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `### Getting the model out` has, after a run of its example."""
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "guide.md").read_text()
    section = guide.partition("### Getting the model out")[2].partition("\n### ")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])  # as where one starts Python in a clone
    trainer = trainplan.build("single", str(root / "examples" / "net.py:build"))
    trainer.step(trainer.workload.inputs(16, 0))
    trainer.save("first-run/checkpoint-6")
    exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), {})
    found = torch.load("net.pt")
    assert all(torch.equal(found[name], value) for name, value in trainer.parameters.items())
