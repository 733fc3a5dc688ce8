"""Profiles that are given with a model: of the same model, with the same batch, and run in the same way."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainplan
from search.models import model
from tests.test_cli import call
from trainplan import cli
from trainplan.errors import InputError
from trainplan.profile.profile import Profile
from trainplan.saved import refuse_others
from trainplan.workload.load import load

SMALL = "gpt:layers=2,hidden=64,heads=4,seq=16,vocab=50,batch=8"
THERE = ("--cluster", "4xTitanRTX", "--plan", "ddp")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = replace(model(), workload=load(SMALL).name, batch=8)
    made.save("eager.json")
    replace(made, compiled=True).save("compiled.json")
    replace(made, device="cpu").save("here.json")
    return tmp_path


def refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said on stderr by a command that ends with code 2."""
    monkeypatch.setattr(sys, "argv", ["trainplan", *words])
    before = sorted(Path().iterdir())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert sorted(Path().iterdir()) == before
    heard = capsys.readouterr()
    assert heard.out == ""
    return " ".join(heard.err.split())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (SMALL.replace("layers=2", "layers=24"), "the profile was made with layers=2."),
        (f"{SMALL},optimizer=sgd", "made with optimizer=its default"),  # which has one state fewer a weight
        ("resnet18:cifar10", "the model is resnet18:cifar10"),
        ("hf:gpt2", "the model is hf:gpt2"),
    ],
)
def test_another_models_profile_is_refused(name: str, said: str, folder, monkeypatch, capsys) -> None:
    """With both names, and the command that makes its own."""
    heard = refused(["predict", name, "--profile", "eager.json", *THERE], monkeypatch, capsys)
    assert f"--profile of {load(SMALL).name}" in heard
    assert said.rstrip(".") in heard
    assert f"trainplan profile {name} --cluster 4xTitanRTX --output profile.json" in heard


def test_the_batch_of_a_name_is_the_batch(folder) -> None:
    def predicted(*words: object) -> dict:
        return json.loads(call("predict", *words, *THERE, "--json"))

    by_name = predicted(SMALL.replace("batch=8", "batch=64"), "--profile", "eager.json")
    assert by_name == predicted(SMALL, "--profile", "eager.json", "--batch", 64)
    assert by_name == predicted("eager.json", "--batch", 64)
    assert by_name["samples_per_s"] == pytest.approx(64 / by_name["step_s"])
    silent = predicted(SMALL.replace(",batch=8", ""), "--profile", "eager.json")
    assert silent == predicted("eager.json") == predicted(SMALL, "--profile", "eager.json")
    with pytest.raises(InputError, match=r"batch=0 .*at least 1"):
        predicted(SMALL.replace("batch=8", "batch=0"), "--profile", "eager.json")


@given(st.permutations(SMALL.partition(":")[2].split(",")), st.sampled_from(["", ",lr=0.5", ",dropout=0", ",mlp=256"]))
def test_other_words_for_the_same_model_are_the_same(options: list[str], more: str) -> None:
    profile = replace(model(), workload=load(SMALL).name)
    refuse_others(profile, f"gpt:{','.join(options)}{more}", "local", False)
    with pytest.raises(InputError, match="the model is"):
        refuse_others(profile, f"gpt:{','.join(options)}{more},clip_norm=1", "local", False)


def test_a_workload_from_python_has_its_own_profile(folder) -> None:
    profile = Profile.load("eager.json")
    assert trainplan.predict(load(SMALL), "ddp", "4xTitanRTX", profile=profile).prediction.step_s > 0
    with pytest.raises(InputError, match="made with hidden=64"):
        trainplan.predict(load(SMALL.replace("hidden=64", "hidden=32")), "ddp", "4xTitanRTX", profile=profile)
    with pytest.raises(InputError, match="one of the two"):
        trainplan.predict("eager.json", "ddp", "4xTitanRTX", profile="compiled.json")


def test_a_file_may_have_moved(folder) -> None:
    profile = replace(model(), workload="old/net.py:build,width=3")
    refuse_others(profile, "new/net.py:build,width=3", "local", False)


@pytest.mark.parametrize("verb", ["predict", "explain", "timeline", "recommend", "run"])
def test_eager_and_compiled_seconds_are_not_mixed(verb: str, folder, monkeypatch, capsys) -> None:
    words = ["--cluster", "2xcpu", *(["--plan", "dp=2"] if verb != "recommend" else [])]
    heard = refused([verb, SMALL, "--profile", "here.json", "--compile", *words], monkeypatch, capsys)
    assert "its seconds are of eager blocks" in heard
    assert f"Try trainplan profile {SMALL} --cluster 2xcpu --compile --output profile.json" in heard
    heard = refused([verb, "compiled.json", *words], monkeypatch, capsys)
    assert "its seconds are of compiled blocks" in heard
    assert f"Try --compile, or trainplan profile {load(SMALL).name} --cluster 2xcpu --output" in heard
    heard = refused([verb, "eager.json", "--compile", *words], monkeypatch, capsys)  # of a GPU that is not here
    assert heard.endswith("Try leaving --compile out.")


def test_what_comes_next_is_compiled_too(folder) -> None:
    for name, compiled in (("compiled.json", True), ("eager.json", False)):
        words = ["--compile"] if compiled else []
        said = call("recommend", SMALL, "--profile", name, "--cluster", "2xTitanRTX", *words)
        lines = [line[line.index("trainplan ") :] for line in said.splitlines() if "trainplan " in line]
        assert len(lines) == 3
        assert all(("--compile" in shlex.split(line)) == compiled for line in lines)
        explain = next(shlex.split(line) for line in lines if " explain " in line)
        assert call(*explain[1:])


def test_a_job_is_what_was_predicted(folder) -> None:
    for name, compiled in (("compiled.json", True), ("eager.json", False)):
        words = ["--compile"] if compiled else []
        out = folder / f"of-{name}"
        words += ["--cluster", "2xTitanRTX", "--plan", "dp=2", "--dry-run", "--out", str(out)]
        call("run", SMALL, "--profile", name, *words)
        (job,) = out.glob("job*.json")
        assert json.loads(job.read_text())["data"]["compiled"] is compiled
